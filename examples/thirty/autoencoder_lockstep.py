"""A convolutional autoencoder squeezes digits through 32 numbers."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


class Autoencoder(nn.Module):
    def __init__(self, num_codes=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 49, num_codes),
        )
        self.decoder = nn.Sequential(
            nn.Linear(num_codes, 16 * 49),
            nn.Unflatten(1, (16, 7, 7)),
            nn.ConvTranspose2d(16, 8, 2, stride=2),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 2, stride=2),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


def losses(model, batch):
    return {"loss": F.mse_loss(model(batch["image"]), batch["image"])}


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = Autoencoder().to(device)
    state = ls.TrainState(model, ls.optim.Adam(lr=1e-3))
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []
    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
