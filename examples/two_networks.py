"""Two networks, two updates a step: a generator and a discriminator of digits (Goodfellow et al., 2014).

    python examples/two_networks.py                               alone: the towers in turn
    lockstep run --workers 2 examples/two_networks.py             on two workers: the same result

The same command again goes on from the last checkpoint, which holds both networks. Ctrl-C under `lockstep run` ends
the run after a whole step, and saves it. `samples.pgm` in the workdir shows what the generator draws.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls

MNIST = Path(__file__).parent.parent / "data" / "mnist"
NUM_CODES = 64


class Generator(nn.Sequential):
    """Codes of shape (batch, NUM_CODES) to images of shape (batch, 784), each pixel from -1 to 1."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(NUM_CODES, 256),
            nn.BatchNorm1d(256),
            nn.ReLU(),
            nn.Linear(256, 512),
            nn.BatchNorm1d(512),
            nn.ReLU(),
            nn.Linear(512, 784),
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    """Images of shape (batch, 784) to one score each, above 0 where it takes them for real."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3),
            nn.Linear(256, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3),
            nn.Linear(128, 1),
        )  # fmt: skip


def real_pixels(batch: ls.Batch) -> Tensor:
    pixels: Tensor = batch["image"].flatten(1) / 127.5 - 1
    return pixels


def codes_for(batch: ls.Batch) -> Tensor:
    # The library seeds torch's own generator by the place in the stream: these draws need no care to be repeatable.
    return torch.randn(len(batch["label"]), NUM_CODES, device=batch["label"].device)


def as_real(scores: Tensor) -> Tensor:
    return F.softplus(-scores).mean()


def as_fake(scores: Tensor) -> Tensor:
    return F.softplus(scores).mean()


def write_samples(generator: nn.Module, path: Path) -> None:
    """Draw a sheet of 8 x 8 digits, always from the same codes."""
    codes = torch.randn(64, NUM_CODES, generator=torch.Generator().manual_seed(0))
    device = next(generator.parameters()).device
    with torch.inference_mode():
        generator.eval()
        images = generator(codes.to(device)).cpu().view(8, 8, 28, 28)
        generator.train()
    sheet = ((images + 1) * 127.5).byte().permute(0, 2, 1, 3).reshape(224, 224)
    path.write_bytes(b"P5 224 224 255\n" + sheet.numpy().tobytes())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--workdir", type=Path, default=Path("runs/two_networks"))
    arguments = parser.parse_args()

    here = ls.join()
    torch.manual_seed(0)
    generator = ls.TrainState(Generator().to(here.device), ls.optim.SGD(0.05, momentum=0.5), name="generator")
    discriminator = ls.TrainState(
        Discriminator().to(here.device), ls.optim.SGD(0.05, momentum=0.5), name="discriminator"
    )
    states = {"generator": generator, "discriminator": discriminator}
    towers = ls.Towers(arguments.towers)
    loader = ls.data.Loader(ls.data.mnist_reader("train", MNIST), batch_size=128)

    def tell_apart(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            fakes = generator.model(codes_for(batch))
        return {"real": as_real(model(real_pixels(batch))), "fake": as_fake(model(fakes))}

    def fool(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"fool": as_real(discriminator.model(model(codes_for(batch))))}

    ls.resume(states, loader, arguments.workdir)
    for batch in ls.batches(loader, towers, until=ls.Steps(arguments.steps)):
        judged = ls.train_step(discriminator, tell_apart, batch, towers)
        report = ls.train_step(generator, fool, batch, towers)
        if report.step % 20 == 0 and here.is_chief:
            print(f"step {report.step}: discriminator {judged.total:.3f}, generator {report.total:.3f}")
        if report.step % 500 == 0:
            ls.save(states, loader, arguments.workdir)
    ls.save(states, loader, arguments.workdir)
    if here.is_chief:
        write_samples(generator.model, arguments.workdir / "samples.pgm")


if __name__ == "__main__":
    main()
