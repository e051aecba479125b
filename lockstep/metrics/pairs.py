"""Detections and objects of one class on one image, of all images of a micro-batch at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def groups_of(image: Ints, labels: Ints) -> Ints:
    """Number the classes of the images: those of an image follow one another, in the order of their labels."""
    return image << 32 | labels


def ranks(groups: Ints) -> Ints:
    """Number the members of each group from 0 on; those of a group stand together."""
    starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
    lengths = np.diff(starts, append=len(groups))
    return np.arange(len(groups)) - np.repeat(starts, lengths)


class Pairs(NamedTuple):
    """Detections and objects that may belong together: of one image and one class."""

    detection: Ints
    """Its row among all detections, ascending."""
    truth: Ints
    """The row of the object among all objects."""

    def where(self, mask: Bools) -> Pairs:
        """Keep some of the pairs."""
        return Pairs(self.detection[mask], self.truth[mask])

    def by_object(self) -> Iterator[tuple[int, Ints]]:
        """Yield each object that has pairs, and the places of its pairs."""
        order = np.argsort(self.truth, kind="stable")
        objects, starts = np.unique(self.truth[order], return_index=True)
        for number, start, stop in zip(objects.tolist(), starts, [*starts[1:], len(order)], strict=False):
            yield number, order[start:stop]


def pairs_of_groups(detections: Ints, truths: Ints) -> Pairs:
    """Pair each detection with each object that has the same number; those of the objects ascend."""
    start = np.searchsorted(truths, detections, side="left")
    count = np.searchsorted(truths, detections, side="right") - start
    detection = np.repeat(np.arange(len(detections)), count)
    within = np.arange(len(detection)) - np.repeat(np.cumsum(count) - count, count)
    return Pairs(detection, start[detection] + within)
