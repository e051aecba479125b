"""SqueezeNet learns to tell flowers apart from what it has seen of ImageNet: one run for each seed, and their spread.

    python examples/flowers.py --data flowers5 --weights squeezenet1_1.safetensors --seeds 3

`flowers5/train` and `flowers5/val` have a folder of images for each class. The weights are those of SqueezeNet 1.1 as
Caffe has trained it, under torchvision's names. Started again, a run that was stopped goes on. The same for one seed:

    lockstep train flowers_small --set data.train=flowers5/train --set data.test=flowers5/val \
        --set warm_start.path=squeezenet1_1.safetensors --set seed=0
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import lockstep as ls


def train(data: Path, weights: Path, seed: int, workdir: Path) -> ls.Result:
    """Train from the weights; the images that were held out are scored once, at the end."""
    recipe = ls.recipes.find("flowers_small")
    recipe = replace(
        recipe,
        seed=seed,
        data=replace(recipe.data, train=str(data / "train"), test=str(data / "val")),
        warm_start=replace(recipe.warm_start, path=str(weights)),
    )
    return ls.run(recipe, workdir / f"seed-{seed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder with train/ and val/")
    parser.add_argument("--weights", type=Path, required=True, help="features of SqueezeNet 1.1, a file of any kind")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workdir", type=Path, default=Path("runs/flowers"), help="gets a folder for each run")
    arguments = parser.parse_args()

    is_chief, accuracies = ls.join().is_chief, []
    for seed in range(arguments.seeds):
        result = train(arguments.data, arguments.weights, seed, arguments.workdir)
        if result.evaluation is None:
            sys.exit("stopped; start it again to go on")
        accuracies.append(result.evaluation["top1"])
        if is_chief:
            print(f"seed {seed}: accuracy {accuracies[-1]:.1%} of {result.evaluation.num_examples} images", flush=True)
    if is_chief:
        mean, least, most = statistics.mean(accuracies), min(accuracies), max(accuracies)
        print(f"{len(accuracies)} seeds: mean {mean:.1%}, from {least:.1%} to {most:.1%}")


if __name__ == "__main__":
    try:
        main()
    except ls.LockstepError as error:
        sys.exit(str(error))
