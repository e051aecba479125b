"""A network predicts the noise on an image, of another strength for each."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


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
    device = ls.join().device
    model = denoiser().to(device)
    state = ls.TrainState(model, ls.optim.Adam(lr=1e-3))
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []

    def losses(model, batch):
        images = batch["image"]
        noise = torch.randn_like(images) * torch.rand(len(images), 1, 1, 1, device=images.device)
        loss = F.mse_loss(model(images + noise), noise)
        return {"loss": loss}

    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
