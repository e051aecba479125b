"""A small convolutional network tells digits apart."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.head = nn.Linear(16 * 7 * 7, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.head(x.flatten(1))


def losses(model, batch):
    return {"loss": F.cross_entropy(model(batch["image"]), batch["label"])}


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = Net().to(device)
    state = ls.TrainState(model, ls.optim.SGD(lr=0.1, momentum=0.9))
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []
    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
