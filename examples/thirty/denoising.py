"""A network predicts the noise on an image, of another strength for each."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import DataLoader


def denoiser(channels=16):
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 1, 3, padding=1),
    )


def main(epochs=2):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = denoiser().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Digits(), batch_size=16, shuffle=True)

    history = []
    for _ in range(epochs):
        for images, _ in loader:
            images = images.to(device)
            noise = torch.randn_like(images) * torch.rand(len(images), 1, 1, 1, device=images.device)
            loss = F.mse_loss(model(images + noise), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
            if len(history) % 10 == 0:
                print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
