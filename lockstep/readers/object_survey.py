"""What a run learns of the objects of its data before it begins: from annotations, or from its first examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.errors import DataError
from lockstep.images.objects import as_ragged
from lockstep.ragged import Ragged
from lockstep.readers.detection import LEFT_OUT, DetectionReader
from lockstep.readers.reader import Int64s

NUM_IMAGES = 256
"""So many of the first examples are read, without their pixels."""
_AT_ONCE = 32


@dataclass(frozen=True, eq=False)
class ObjectSurvey:
    """The images and objects of a reader, as far as they are known."""

    boxes: Ragged
    """float32 (n, 4) of the first images: top, left, bottom and right as shares of height and width."""
    box_sizes: Int64s
    num_left_out: int
    """Objects on these images that had no area, were bad, or too many."""
    sizes: Int64s
    """Height and width of all images that are known, (images, 2)."""
    most_objects: int
    labels: frozenset[int]
    """Labels of all objects that are known."""
    is_complete: bool
    """Whether these are all images of the reader."""


def survey_objects(reader: DetectionReader, *, num_images: int = NUM_IMAGES, skip_bad: bool = False) -> ObjectSurvey:
    """Look at the objects of a reader: of all images where it knows them from annotations, else of the first ones.

    `num_images` of these are read, not decoded; with `skip_bad` without those that cannot be read.

    Raises:
        DataError: an example cannot be read, or none can.
    """
    read: list[dict[str, Any]] = []
    for first in range(0, min(num_images, len(reader)), _AT_ONCE):
        indices = np.arange(first, min(first + _AT_ONCE, num_images, len(reader)))
        read += _read(reader, indices, skip_bad=skip_bad)
    if not read:
        raise DataError(
            "None of the first examples to train on can be read.",
            given=f"{min(num_images, len(reader))} of {len(reader)} examples, and none without errors",
            expected="images with objects on them",
            hint='set feed.bad_examples="raise", and the error of the first one is told',
        )
    boxes = Ragged.cat([as_ragged(batch["boxes"]) for batch in read])
    sizes = torch.cat([batch["original_size"] for batch in read]).numpy()
    labels = np.concatenate([as_ragged(batch["labels"]).values.numpy() for batch in read])
    known = reader.known_objects()
    return ObjectSurvey(
        boxes,
        sizes,
        sum(int(batch[LEFT_OUT].sum()) for batch in read),
        sizes if known is None else known.sizes,
        int(boxes.lengths.max()) if known is None else int(known.counts.max()),
        frozenset(np.unique(labels if known is None else known.labels).tolist()),
        known is not None or len(reader) <= num_images,
    )


def _read(reader: DetectionReader, indices: Int64s, *, skip_bad: bool) -> list[dict[str, Any]]:
    """Read examples together; one by one where some cannot be read, and are to be left out."""
    try:
        return [reader.read_batch(indices)]
    except DataError:
        if not skip_bad:
            raise
        if len(indices) == 1:
            return []
    return [batch for index in indices for batch in _read(reader, np.array([index]), skip_bad=True)]
