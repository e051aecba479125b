"""Digits at twice their size, by sub-pixel convolution."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import DataLoader


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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Upscaler().to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
    loader = DataLoader(Digits(), batch_size=16, shuffle=True)

    history = []
    for _ in range(epochs):
        for images, _ in loader:
            images = images.to(device)
            loss = F.l1_loss(model(F.avg_pool2d(images, 2)), images)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
            if len(history) % 10 == 0:
                print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
