"""Digits at twice their size, by sub-pixel convolution."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


class Upscaler(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 4, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x):
        return F.interpolate(x, scale_factor=2) + self.shuffle(self.conv2(F.relu(self.conv1(x))))


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = Upscaler().to(device)
    state = ls.TrainState(model, ls.optim.FromTorch(torch.optim.RMSprop, lr=1e-3, momentum=0.9))
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []

    def losses(model, batch):
        images = batch["image"]
        loss = F.l1_loss(model(F.avg_pool2d(images, 2)), images)
        return {"loss": loss}

    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
