"""Pretrained layers are fine-tuned at a low rate, and a new head is trained at a high one."""

import torch
import torch.nn.functional as F
from common import Digits, pretrained_features
from torch import nn

import lockstep as ls


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = pretrained_features()
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        x = F.interpolate(x, size=(48, 48)).expand(-1, 3, -1, -1)
        return self.head(self.features(x).mean((2, 3)))


def losses(model, batch):
    return {"loss": F.cross_entropy(model(batch["image"]), batch["label"])}


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = Classifier().to(device)
    state = ls.TrainState(model, {r"^features\.": ls.optim.AdamW(1e-4), r"^head\.": ls.optim.AdamW(1e-3)})
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []
    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
