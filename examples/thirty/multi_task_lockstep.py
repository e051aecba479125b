"""One body, two heads: the class of a digit and its ink, with weights of the losses that are learned too."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU())
        self.classes, self.ink = nn.Linear(64, 10), nn.Linear(64, 1)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        hidden = self.body(x)
        return self.classes(hidden), self.ink(hidden).squeeze(1)


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = TwoHeads().to(device)
    state = ls.TrainState(model, ls.optim.Adam(lr=1e-3))
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []

    def losses(model, batch):
        images, labels = batch["image"], batch["label"]
        scores, ink = model(images)
        class_loss = F.cross_entropy(scores, labels)
        ink_loss = F.mse_loss(ink, images.mean((1, 2, 3)))
        weights = torch.exp(-model.log_variances)
        loss = weights[0] * class_loss + weights[1] * ink_loss + model.log_variances.sum()
        return {"loss": loss}

    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
