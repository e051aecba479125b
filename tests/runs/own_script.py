"""A script of a user's own: its function gives the images, and it trains by a recipe.

python own_script.py WORKDIR STEPS; or lockstep run --workers 2 own_script.py WORKDIR STEPS
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import torch

import lockstep as ls
from lockstep.metrics.metric import Metric

TRAIN, TEST = 40, 12


def stripes(split: str) -> ls.data.Reader | None:
    """Grey images: dark with a bright upper or lower half."""
    counts = {"train": TRAIN, "test": TEST}
    if split not in counts:
        return None
    labels = torch.arange(counts[split]) % 2
    images = torch.zeros(counts[split], 1, 28, 28, dtype=torch.uint8)
    images[labels == 0, :, :14] = 200
    images[labels == 1, :, 14:] = 200
    return ls.data.Arrays({"image": images, "label": labels})


class Margin:
    """The least distance of the logit of the right class from that of the other."""

    def reset(self) -> None:
        self.least = math.inf

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        distances = logits.gather(1, labels[:, None]) - logits.gather(1, 1 - labels[:, None])
        self.least = min(self.least, float(distances.min()))

    def compute(self) -> float:
        return self.least


def main() -> None:
    metrics: dict[str, Metric] = {"margin": Margin()}
    recipe = replace(
        ls.recipes.find("mnist"),
        name="stripes",
        model=ls.models.LeNet(num_classes=2),
        data=ls.recipes.ImageData(image_size=28, preprocessing=ls.recipes.preprocessing.Lenet()),
        optimizer=ls.optim.SGD(0.01, momentum=0.9),
        batch_size=8,
        num_towers=2,
        exchange=ls.AllReduce(exact=True),
        end=ls.Steps(int(sys.argv[2])),
        device="cpu",
    )
    result = ls.run(recipe, sys.argv[1], reader=stripes, metrics=metrics)
    scores = result.evaluation
    assert scores is not None
    if ls.join().is_chief:
        print(result.reason, result.step, result.split, scores.num_examples, scores["top1"], scores["margin"])


if __name__ == "__main__":
    main()
