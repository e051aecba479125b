"""A generator draws digits, and a discriminator tells them from real ones."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls

NUM_CODES = 32


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    generator = nn.Sequential(nn.Linear(NUM_CODES, 128), nn.ReLU(), nn.Linear(128, 784), nn.Sigmoid()).to(device)
    discriminator = nn.Sequential(nn.Linear(784, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)).to(device)
    g_state = ls.TrainState(generator, ls.optim.Adam(lr=2e-4, betas=(0.5, 0.999)), name="generator")
    d_state = ls.TrainState(discriminator, ls.optim.Adam(lr=2e-4, betas=(0.5, 0.999)), name="discriminator")
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []

    def d_losses(discriminator, batch):
        images = batch["image"]

        fakes = generator(torch.randn(len(images), NUM_CODES, device=images.device)).detach()
        real_loss = F.softplus(-discriminator(images.flatten(1))).mean()
        fake_loss = F.softplus(discriminator(fakes)).mean()
        return {"real": real_loss, "fake": fake_loss}

    def g_losses(generator, batch):
        images = batch["image"]
        fakes = generator(torch.randn(len(images), NUM_CODES, device=images.device))
        g_loss = F.softplus(-discriminator(fakes)).mean()
        return {"loss": g_loss}

    for batch in ls.batches(loader, until=ls.Epochs(epochs)):
        d_report = ls.train_step(d_state, d_losses, batch)
        g_report = ls.train_step(g_state, g_losses, batch)

        history += [d_report.total, g_report.total]
        if len(history) % 20 == 0:
            print(f"step {len(history) // 2}: discriminator {history[-2]:.4f}, generator {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
