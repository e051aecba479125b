"""Pose: heatmaps of the outermost points of a digit, at the top, the bottom, the left and the right."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Extremes(Dataset):
    def __init__(self, sigma=1.5):
        self.digits, self.sigma = Digits(), sigma

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        image, _ = self.digits[index]
        points = (image[0] > 0.5).nonzero()
        rows, columns = points.T
        outermost = points[torch.stack([rows.argmin(), rows.argmax(), columns.argmin(), columns.argmax()])]
        grid = torch.stack(torch.meshgrid(torch.arange(28), torch.arange(28), indexing="ij"), -1)
        squares = (grid - outermost[:, None, None]).square().sum(-1)
        return image, torch.exp(-squares / (2 * self.sigma**2))


def hourglass():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 5, padding=2),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 4, 2, stride=2),
    )


def main(epochs=2):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = hourglass().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Extremes(), batch_size=16, shuffle=True)

    history = []
    for _ in range(epochs):
        for images, heatmaps in loader:
            images, heatmaps = images.to(device), heatmaps.to(device)
            loss = F.mse_loss(model(images), heatmaps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
            if len(history) % 10 == 0:
                print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
