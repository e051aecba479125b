"""BYOL: a network predicts what a slow average of itself makes of another view."""

import copy

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


def perceptron(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, outputs))


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Flatten(), perceptron(784, 32))
        self.predictor = perceptron(32, 32)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, first, second):
        losses = [self.distance(first, second), self.distance(second, first)]
        return torch.cat(losses).mean()

    def distance(self, first, second):
        with torch.no_grad():
            expected = self.target(second)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(first)), expected)

    @torch.no_grad()
    def update_target(self, momentum=0.99):
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            target.lerp_(online, 1 - momentum)


def view(images):
    return images.roll(torch.randint(-3, 4, (2,)).tolist(), (2, 3)) + 0.1 * torch.randn_like(images)


def losses(model, batch):
    return {"loss": model(view(batch["image"]), view(batch["image"]))}


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = BYOL().to(device)
    state = ls.TrainState(model, ls.optim.Adam(lr=1e-3))
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []
    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        model.update_target()
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
