"""A residual network with batch norm: Nesterov's momentum, weight decay, a rate that falls along a cosine."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        residual = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(residual)))


def resnet():
    stem = nn.Conv2d(1, 8, 3, stride=2, padding=1)
    return nn.Sequential(stem, Block(8), nn.MaxPool2d(2), Block(8), nn.Flatten(), nn.Linear(8 * 49, 10))


def losses(model, batch):
    return {"loss": F.cross_entropy(model(batch["image"]), batch["label"])}


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = resnet().to(device)
    loader = ls.data.Loader(Digits(), batch_size=16)
    state = ls.TrainState(
        model, ls.optim.SGD(ls.optim.Cosine(0.02, ls.Epochs(epochs)), momentum=0.9, nesterov=True, weight_decay=5e-4)
    )

    history = []
    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
