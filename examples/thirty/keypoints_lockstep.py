"""Pose: heatmaps of the outermost points of a digit, at the top, the bottom, the left and the right."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import Dataset

import lockstep as ls


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


def losses(model, batch):
    return {"loss": F.mse_loss(model(batch["image"]), batch["heatmaps"])}


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = hourglass().to(device)
    state = ls.TrainState(model, ls.optim.Adam(lr=1e-3))
    loader = ls.data.Loader(ls.data.TorchDataset(Extremes(), ("image", "heatmaps")), batch_size=16)

    history = []
    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
