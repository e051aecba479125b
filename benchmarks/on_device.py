"""What the host saves where crops are resized and flipped on the device: its CPU time for an image.

    python benchmarks/on_device.py --images FOLDER... [--rounds 7] [--quick]

One process on one thread makes batches of 64 random crops to 224 pixels of JPEGs that lie in memory, as a loader
process does: it decodes the parts; or packs them for the device, too; or resizes and flips them. Then it copies the
batch to the memory through which the trainer gets it. They take turns. The result is printed and appended to
benchmarks/results/on_device.jsonl. What the device computes is not in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measuring import ALLOCATOR, interleave, ratio_of_turns, record

from lockstep.augmentations.crops import RandomResizedCrop
from lockstep.augmentations.on_device import OnDevice
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.data.shared_memory import SentMemories
from lockstep.images.decode import AS_STORED, EncodedImage
from lockstep.images.objects import Fields
from lockstep.randomness import Draws

BATCH_SIZE, SIZE = 64, 224
CROP, FLIP = RandomResizedCrop(SIZE), HorizontalFlip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", nargs="+", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two rounds: does it run?")
    arguments = parser.parse_args()
    if not ALLOCATOR.items() <= os.environ.items():  # as loader processes have it: pages are kept
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})
    torch.set_num_threads(1)
    paths = sorted(path for folder in arguments.images for path in folder.rglob("*.jp*g"))
    images = [EncodedImage(path.read_bytes(), path.name) for path in paths]
    batches = [images[first : first + BATCH_SIZE] for first in range(0, len(images) - BATCH_SIZE + 1, BATCH_SIZE)]
    print(f"{len(batches)} batches of {BATCH_SIZE} of {len(images)} JPEGs, decoded by {AS_STORED.chosen}")
    ways = {"decode alone": decode, "decode, left for the device": leave, "decode, resize, flip": augment}
    readers = {name: partial(read, batches, way, SentMemories()) for name, way in ways.items()}
    times = interleave(readers, 2 if arguments.quick else arguments.rounds, clock=time.process_time)
    per_image = {name: [ms * 1000 / len(batches) / BATCH_SIZE for ms in each] for name, each in times.items()}
    lines = []
    for name, values in per_image.items():
        median = statistics.median(values)
        ratio, low, high = ratio_of_turns(values, per_image["decode, resize, flip"])
        print(f"{name:32} {median:6.0f} us of the processor an image    {ratio:.2f} ({low:.2f} to {high:.2f})")
        lines.append({"way": name, "us": median, "ratio": ratio, "ratio_low": low, "ratio_high": high})
    if not arguments.quick:
        record(__file__, lines)


def read(batches: list[list[EncodedImage]], way: Callable[[Fields, Draws], Fields], memories: SentMemories) -> None:
    """Read all batches as a loader process does, each into memory that is used again."""
    for number, images in enumerate(batches):
        positions = np.arange(number * BATCH_SIZE, (number + 1) * BATCH_SIZE)
        parcel, _ = memories.packed(way({"image": images}, Draws(0, positions)))
        memories.use_again([parcel.memory])


def decode(batch: Fields, draws: Draws) -> Fields:
    for image, region in zip(batch["image"], CROP.windows(batch, draws).regions(), strict=True):
        image.decode(region)
    return {}


def leave(batch: Fields, draws: Draws) -> Fields:
    return OnDevice(CROP, (FLIP,))(batch, draws)


def augment(batch: Fields, draws: Draws) -> Fields:
    return FLIP(CROP(batch, draws), draws)


if __name__ == "__main__":
    main()
