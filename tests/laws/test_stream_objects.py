"""The law of the stream over images with objects that are put together: the same bits, whoever reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from painted_scenes import OBJECT_FIELDS, Scenes, labels_of
from test_stream import rows_of_workers
from torch import Tensor

from lockstep.augmentations import CopyPaste, FixedSizeCrop, MixUp, Mosaic, RandomIoUCrop, RandomZoomOut, ScaleJitter
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.data.loader import Loader

SIZE, BATCH_SIZE, NUM_BATCHES = 13, 4, 3
AUGMENT = [
    HorizontalFlip(keypoint_flip_permutation=(1, 0)),
    CopyPaste(p=0.6),
    Mosaic(size=16, p=0.5),
    MixUp(p=0.5),
    RandomZoomOut(),
    RandomIoUCrop(),
    ScaleJitter((24, 24)),
    FixedSizeCrop((24, 24)),
]


def hashes(batch: dict[str, Any]) -> Iterator[str]:
    """Of each row: every bit of its image and its objects."""
    for row in range(len(batch["image"])):
        digest = hashlib.sha256()
        masks = batch["masks"][row]
        image = batch["image"][row]
        values = [
            image if isinstance(image, Tensor) else image.decode(),
            masks if isinstance(masks, Tensor) else masks.decode(),
            *(batch[name][row] for name in OBJECT_FIELDS),
        ]
        for value in values:
            digest.update(str(tuple(value.shape)).encode() + value.contiguous().numpy().tobytes())
        yield digest.hexdigest() + str(batch["class_text"][row])


def stream(loader: Loader, num_workers: int, num_batches: int) -> list[str]:
    """The rows of so many batches, put together from the workers; 4 towers are dealt to them."""
    bounds = [worker * BATCH_SIZE // num_workers for worker in range(num_workers + 1)]
    return rows_of_workers(loader, num_batches, [range(*each) for each in pairwise(bounds)], hashes)


def make(**crew: int) -> Loader:
    return Loader(Scenes(SIZE), batch_size=BATCH_SIZE, seed=11, augment=AUGMENT, prefetch=1, **crew)


@pytest.mark.process
def test_resumed_at_every_step_by_another_crew() -> None:
    torch.set_num_threads(1)
    whole = stream(make(num_processes=0), 1, NUM_BATCHES)
    assert len(set(whole)) == len(whole)
    crews = [{"num_processes": 3}, {"num_threads": 2}, {"num_processes": 1}]
    for step, (crew, num_workers) in enumerate(zip(crews, (2, 4, 3), strict=True)):
        resumed = make(**crew)
        resumed.load_state({**resumed.state(), "position": step * BATCH_SIZE})
        assert stream(resumed, num_workers, NUM_BATCHES - step) == whole[step * BATCH_SIZE :]


def test_objects_come_from_several_scenes() -> None:
    batches = make(num_processes=0).batches(range(1), 1)
    labels = [row for batch in islice(batches, NUM_BATCHES) for row in labels_of(batch)]
    assert sum(len({label // 10 for label in row}) > 1 for row in labels) > len(labels) / 3
    batches.close()
