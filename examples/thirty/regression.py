"""By what angle was a digit turned? Its sine and cosine, by a loss that forgives outliers."""

import math

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Turned(Dataset):
    def __init__(self):
        self.digits = Digits()

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        image, _ = self.digits[index]
        angle = (2 * torch.rand(()) - 1) * math.pi / 2
        sine, cosine, zero = angle.sin(), angle.cos(), torch.zeros(())
        turn = torch.stack([cosine, -sine, zero, sine, cosine, zero]).view(1, 2, 3)
        grid = F.affine_grid(turn, [1, 1, 28, 28], align_corners=False)
        return F.grid_sample(image[None], grid, align_corners=False)[0], torch.stack([sine, cosine])


def network():
    layers = [nn.Conv2d(1, 8, 5, stride=2), nn.GELU(), nn.Conv2d(8, 16, 5, stride=2), nn.GELU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 16, 2))


def main(epochs=2):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    loader = DataLoader(Turned(), batch_size=16, shuffle=True)

    history = []
    for _ in range(epochs):
        for images, angles in loader:
            images, angles = images.to(device), angles.to(device)
            loss = F.huber_loss(model(images), angles, delta=0.5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
            if len(history) % 10 == 0:
                print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
