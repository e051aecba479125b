"""A variational autoencoder of digits."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


class VAE(nn.Module):
    def __init__(self, num_codes=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 2 * num_codes))
        self.decoder = nn.Sequential(nn.Linear(num_codes, 128), nn.ReLU(), nn.Linear(128, 784))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        codes = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(codes), mean, log_variance


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = VAE().to(device)
    state = ls.TrainState(model, ls.optim.Adam(lr=1e-3))
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []

    def losses(model, batch):
        images = batch["image"]
        logits, mean, log_variance = model(images)
        pixels = F.binary_cross_entropy_with_logits(logits, images.flatten(1), reduction="none").sum(1).mean()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        loss = pixels + divergence
        return {"loss": loss}

    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
