"""A recurrent network reads an image row by row; its gradients are clipped."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


class RowReader(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(28, 32, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        outputs, _ = self.rnn(x.squeeze(1))
        return self.head(outputs[:, -1])


def losses(model, batch):
    return {"loss": F.cross_entropy(model(batch["image"]), batch["label"])}


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = RowReader().to(device)
    state = ls.TrainState(model, ls.optim.Adam(lr=1e-2), gradient_transforms=[ls.optim.ClipGlobalNorm(0.5)])
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []
    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
