"""The pairs of `examples/thirty`: both scripts trained on one stream, and what differs in their text.

Run by `lockstep run` it trains those with Lockstep, and the chief prints their losses.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, RandomSampler, default_collate

import lockstep as ls
from lockstep.data.order import Shuffled
from lockstep.data.seeding import seed_global_generators
from lockstep.randomness import key_of, mix

FOLDER = Path(__file__).parent.parent.parent / "examples" / "thirty"
STEPS, BATCH_SIZE, SEED = 3, 16, 0
NORM, DRAWS, PAIRS = "its own batch norm", "random numbers of its own", "examples of its own to compare"


@dataclass(frozen=True)
class Pair:
    """A plain script, and the same with Lockstep.

    Args:
        name: of the plain script.
        epochs: one of three steps; or several, of one step each.
        networks: the names of its states, in the order in which they are trained.
        of_slices: what a worker's slice of the batch has of its own, for which two workers have other losses than one.
    """

    name: str
    epochs: int = 1
    networks: tuple[str, ...] = ("model",)
    of_slices: str = ""

    def texts(self) -> tuple[str, str]:
        return (FOLDER / f"{self.name}.py").read_text(), (FOLDER / f"{self.name}_lockstep.py").read_text()

    def num_lines(self) -> tuple[int, int, int]:
        """The lines of the plain script, those written for Lockstep, and those gone, as `num_changed` counts them."""
        plain, ours = self.texts()
        return len(_lines(plain)), *num_changed(plain, ours)

    def diff(self) -> str:
        """What differs from `main` on."""
        plain, ours = ("def main" + text.partition("def main")[2] for text in self.texts())
        files = f"{self.name}.py", f"{self.name}_lockstep.py"
        return "".join(difflib.unified_diff(*(text.splitlines(keepends=True) for text in (plain, ours)), *files, n=9))


THIRTY = [
    Pair("classifier"),
    Pair("cosine_schedule", of_slices=NORM),
    Pair("epoch_schedule", epochs=3, of_slices=DRAWS),
    Pair("plateau", epochs=6),
    Pair("fine_tune"),
    Pair("frozen_backbone"),
    Pair("accumulation"),
    Pair("bfloat16"),
    Pair("row_rnn"),
    Pair("vit", of_slices=DRAWS),
    Pair("mixup", of_slices=DRAWS),
    Pair("weighted_classes"),
    Pair("distillation"),
    Pair("multi_task"),
    Pair("regression"),
    Pair("tabular", of_slices=NORM),
    Pair("segmentation", of_slices=NORM),
    Pair("keypoints"),
    Pair("detector"),
    Pair("video"),
    Pair("autoencoder"),
    Pair("denoising", of_slices=DRAWS),
    Pair("super_resolution"),
    Pair("vae", of_slices=DRAWS),
    Pair("gan", networks=("discriminator", "generator"), of_slices=DRAWS),
    Pair("wgan", networks=("critic", "generator"), of_slices=DRAWS),
    Pair("triplet"),
    Pair("simclr", of_slices=PAIRS),
    Pair("byol", of_slices=DRAWS),
    Pair("rotation"),
]


def num_changed(before: str, after: str) -> tuple[int, int]:
    """The lines that are new and those that are gone; empty ones and the width of the margin do not count."""
    matcher = difflib.SequenceMatcher(None, _lines(before), _lines(after), autojunk=False)
    changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
    return sum(end - start for *_, start, end in changes), sum(end - start for _, start, end, *_ in changes)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def train(name: str, pair: Pair) -> list[float]:
    """Train a few steps by one of the two scripts; returns its losses."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        common = _load("common")
        vars(common)["EXAMPLES"] = BATCH_SIZE * (STEPS if pair.epochs == 1 else 1)
        patch.setitem(sys.modules, "common", common)
        patch.setattr("lockstep.data.prefetch.default_num_processes", lambda num_workers: 0)
        losses: list[float] = _load(name).main(epochs=pair.epochs)
    return losses


def train_plainly(pair: Pair) -> list[float]:
    """Train by the plain script, on the examples and the random numbers that Lockstep has.

    Lockstep makes both from the seed and the place in the stream: its order of examples, its draws for each of them,
    and its draws for the model, which are others for each network.
    """
    stream = Stream(pair.networks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataLoader, "__iter__", lambda loader: stream.batches(loader))
        handle = register_optimizer_step_post_hook(lambda *_: stream.seed_next_network())
        try:
            return train(pair.name, pair)
        finally:
            handle.remove()


class Stream:
    """The batches of a DataLoader in Lockstep's order, with torch's generator seeded as Lockstep seeds it."""

    def __init__(self, networks: tuple[str, ...]) -> None:
        self._networks, self._turn = networks, 0
        self._next = self._position = 0
        """Where the next batch starts in the stream, and where the last one did."""

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        size, count = loader.batch_size or 1, len(loader.dataset)  # type: ignore[arg-type]
        if not isinstance(loader.sampler, RandomSampler):  # to validate
            for first in range(0, count, size):
                yield default_collate([loader.dataset[index] for index in range(first, min(first + size, count))])
            return
        for _ in range(count // size):
            places = np.arange(self._next, self._next + size)
            items = []
            for place, index in zip(places.tolist(), Shuffled().indices(places, count, SEED).tolist(), strict=True):
                seed_global_generators(SEED, place)
                items.append(loader.dataset[index])
            self._turn, self._position, self._next = -1, self._next, self._next + size
            self.seed_next_network()
            yield default_collate(items)

    def seed_next_network(self) -> None:
        self._turn += 1
        network = self._networks[self._turn % len(self._networks)]
        torch.manual_seed(mix(SEED, key_of(network), self._position, 0))


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    found = {pair.name: train(f"{pair.name}_lockstep", pair) for pair in THIRTY}
    if ls.join().is_chief:
        print(json.dumps(found))
