"""A generator draws digits, and a discriminator tells them from real ones."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import DataLoader

NUM_CODES = 32


def main(epochs=2):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = nn.Sequential(nn.Linear(NUM_CODES, 128), nn.ReLU(), nn.Linear(128, 784), nn.Sigmoid()).to(device)
    discriminator = nn.Sequential(nn.Linear(784, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)).to(device)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    loader = DataLoader(Digits(), batch_size=16, shuffle=True)

    history = []
    for _ in range(epochs):
        for images, _ in loader:
            images = images.to(device)

            fakes = generator(torch.randn(len(images), NUM_CODES, device=images.device)).detach()
            real_loss = F.softplus(-discriminator(images.flatten(1))).mean()
            fake_loss = F.softplus(discriminator(fakes)).mean()
            d_loss = real_loss + fake_loss
            d_optimizer.zero_grad()
            d_loss.backward()
            d_optimizer.step()

            fakes = generator(torch.randn(len(images), NUM_CODES, device=images.device))
            g_loss = F.softplus(-discriminator(fakes)).mean()
            g_optimizer.zero_grad()
            g_loss.backward()
            g_optimizer.step()

            history += [d_loss.item(), g_loss.item()]
            if len(history) % 20 == 0:
                print(f"step {len(history) // 2}: discriminator {history[-2]:.4f}, generator {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
