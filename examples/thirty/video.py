"""Clips of a digit that moves: a 3D convolution says in which direction."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

FRAMES, DIRECTIONS = 4, [(0, 2), (0, -2), (2, 0), (-2, 0)]


class Clips(Dataset):
    def __init__(self):
        self.digits = Digits()

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        image, _ = self.digits[index]
        direction = index % len(DIRECTIONS)
        down, right = DIRECTIONS[direction]
        frames = [image.roll((frame * down, frame * right), (1, 2)) for frame in range(FRAMES)]
        return torch.stack(frames, 1), direction


def network():
    layers = [nn.Conv3d(1, 8, 3, stride=(1, 2, 2), padding=1), nn.ReLU(), nn.Conv3d(8, 16, 3, stride=2, padding=1)]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, len(DIRECTIONS)))


def main(epochs=2):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(Clips(), batch_size=16, shuffle=True)

    history = []
    for _ in range(epochs):
        for clips, directions in loader:
            clips, directions = clips.to(device), directions.to(device)
            loss = F.cross_entropy(model(clips), directions)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
            if len(history) % 10 == 0:
                print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
