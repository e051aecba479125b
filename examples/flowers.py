"""A classifier of flowers that starts from the features of SqueezeNet, as ImageNet has formed them.

    python examples/flowers.py --data flowers5 --weights squeezenet1_1.safetensors --seeds 3

`flowers5/train` and `flowers5/val` have a folder of images for each class. The weights are those of SqueezeNet 1.1
(Iandola et al., 2016) under torchvision's names. The first layers stay as they are, the last ones learn slowly, a new
head learns faster; what is scored is the moving average of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls

PIXELS, BATCH_SIZE = 192, 30
# These weights come from Caffe: blue first, values from 0 to 255, less the mean colour.
MEAN, STD = (103.939 / 255, 116.779 / 255, 123.68 / 255), (1 / 255,) * 3
# No hue: it is what tells many flowers apart.
COLOURS = (("brightness", "contrast", "saturation"),)


class Fire(nn.Module):
    """A few channels, of which convolutions of two sizes make many."""

    def __init__(self, num_in: int, num_squeezed: int, num_expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(num_in, num_squeezed, 1)
        self.expand1x1 = nn.Conv2d(num_squeezed, num_expanded, 1)
        self.expand3x3 = nn.Conv2d(num_squeezed, num_expanded, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = F.relu(self.squeeze(hidden))
        return F.relu(torch.cat([self.expand1x1(hidden), self.expand3x3(hidden)], dim=1))


class FlowerNet(nn.Module):
    """SqueezeNet 1.1, and a linear head on what its last layers see anywhere in the image."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2),
            Fire(64, 16, 64), Fire(128, 16, 64), nn.MaxPool2d(3, 2),
            Fire(128, 32, 128), Fire(256, 32, 128), nn.MaxPool2d(3, 2),
            Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256),
        )  # fmt: skip
        # The mean of each channel of the last five layers, and the largest value of the last one.
        num_seen = 256 + 384 + 384 + 512 + 512 + 512
        self.norm = nn.BatchNorm1d(num_seen, affine=False)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(num_seen, num_classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.features[:8](images)
        seen = []
        for layer in self.features[8:]:
            hidden = layer(hidden)
            seen.append(hidden.mean((2, 3)))
        seen.append(hidden.amax((2, 3)))
        # The root draws in the long tails of ReLUs; the 1 keeps its slope finite.
        logits: Tensor = self.head(self.dropout(self.norm((torch.cat(seen, dim=1) + 1).sqrt())))
        return logits


def normalised(images: Tensor) -> Tensor:
    return ls.images.normalised(images.flip(1), MEAN, STD)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    images = normalised(ls.images.jittered(batch["image"], batch["image.jitter"], COLOURS))
    return {"cross_entropy": F.cross_entropy(model(images), batch["label"], label_smoothing=0.1)}


def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    images = normalised(batch["image"])
    logits = model(images) + model(images.flip(3))
    return {"top1": ls.metrics.in_top_k(logits, batch["label"], k=1)}


def train(data: Path, weights: Path, seed: int, steps: int) -> ls.Evaluation:
    """Train from the weights, and score the result on the images that were held out."""
    here = ls.join()
    reader, held_out = ls.data.ImageFolder(data / "train"), ls.data.ImageFolder(data / "val")
    augment = [
        ls.images.RandomResizedCrop(PIXELS, scale=(0.35, 1.0)),
        ls.images.HorizontalFlip(),
        ls.images.JitterDraws(brightness=0.3, contrast=0.3, saturation=0.3),
    ]
    loader = ls.data.Loader(reader, batch_size=BATCH_SIZE, seed=seed, augment=augment)
    scored = ls.data.Loader(held_out, batch_size=50, augment=ls.images.CentralCrop(PIXELS))

    torch.manual_seed(seed)
    state = ls.TrainState(
        FlowerNet(len(reader.classes)).to(here.device),
        {
            r"^features\.": ls.optim.SGD(ls.optim.Cosine(0.0005, steps), momentum=0.9),
            r"^head\.": ls.optim.SGD(ls.optim.Cosine(0.002, steps), momentum=0.9, weight_decay=0.01),
        },
        frozen=r"^features\.[0-7]\.",
        gradient_transforms=[ls.optim.ClipGlobalNorm(5.0)],
        average=ls.optim.MovingAverage(0.98),
    )
    report = ls.warm_start(state, weights, ls.weights.WarmStart(skip=r"^(head|norm)\.", require_loaded=0.95))
    if here.is_chief:
        print(f"seed {seed}: {report}")
    towers = ls.Towers(here.num_workers, channels_last=True)
    for step in ls.train_steps(state, losses, loader, towers, until=ls.Steps(steps)):
        if step.step % 50 == 0 and here.is_chief:
            print(f"seed {seed}, step {step.step}: loss {step.total:.4f}, {step.examples_per_second:.0f} examples/s")
    return ls.evaluate(state, score, scored, weights="average")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder with train/ and val/")
    parser.add_argument("--weights", type=Path, required=True, help="features of SqueezeNet 1.1, a file of any kind")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    for path in (arguments.data / "train", arguments.data / "val", arguments.weights):
        if not path.exists():
            parser.error(f"{path} is missing")

    is_chief, accuracies = ls.join().is_chief, []
    for seed in range(arguments.seeds):
        result = train(arguments.data, arguments.weights, seed, arguments.steps)
        accuracies.append(result["top1"])
        if is_chief:
            print(f"seed {seed}: accuracy {result['top1']:.1%} of {result.num_examples} images", flush=True)
    if is_chief:
        mean, least, most = statistics.mean(accuracies), min(accuracies), max(accuracies)
        print(f"{len(accuracies)} seeds: mean {mean:.1%}, from {least:.1%} to {most:.1%}")


if __name__ == "__main__":
    try:
        main()
    except ls.LockstepError as error:
        sys.exit(str(error))
