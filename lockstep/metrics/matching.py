"""Match detections to objects as COCO's evaluation does, for all thresholds and area ranges at once.

Each detection, the one with the highest score first, takes the object of its class that it covers most: of those that
count if one is left, else of those to be ignored. That is the loop of `evaluateImg` in pycocotools
(https://github.com/cocodataset/cocoapi), which runs it for each of 10 thresholds and 4 area ranges by itself. Here each
of these 40 runs is a bit of an integer: what a detection may take, and what is taken, is found for all by `&` and `~`.
Few detections cover an object by half or more, and only these are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lockstep.metrics.pairs import Bools, Floats, Ints, Pairs, ranks

_ALMOST_1 = 1 - 1e-10  # a threshold of 1 is met, however the division is rounded

AreaRange = tuple[float, float]
"""Least and greatest area in pixels, both included."""


@dataclass(frozen=True)
class Runs:
    """The bit of each run of the matching.

    The lowest bits are those of the first area range, of which the first is that of the lowest threshold.
    """

    thresholds: tuple[float, ...]
    area_ranges: tuple[AreaRange, ...]

    def reached(self, overlaps: Floats) -> Ints:
        """Return for each overlap the runs whose threshold it reaches."""
        number = np.searchsorted(np.minimum(self.thresholds, _ALMOST_1), overlaps, side="right")
        width = len(self.thresholds)
        in_all_ranges = sum(1 << place * width for place in range(len(self.area_ranges)))
        reached: Ints = (np.left_shift(1, number) - 1) * in_all_ranges
        return reached

    def within(self, areas: Floats) -> Ints:
        """Return for each area the runs whose range it is in."""
        width = len(self.thresholds)
        bits = np.zeros(len(areas), np.int64)
        for number, (least, most) in enumerate(self.area_ranges):
            bits |= np.where((areas >= least) & (areas <= most), ((1 << width) - 1) << number * width, 0)
        return bits

    def unpacked(self, bits: Ints, area_range: int) -> Bools:
        """Return the bits of one area range as bool of shape (values, thresholds)."""
        width = len(self.thresholds)
        unpacked: Bools = (bits[:, None] >> np.arange(area_range * width, (area_range + 1) * width) & 1).astype(bool)
        return unpacked


class Matches(NamedTuple):
    """What has become of detections and objects, by runs."""

    taken: Ints
    """For each detection: whether it has taken an object."""
    ignored: Ints
    """For each detection: whether it has taken an object to be ignored."""
    found: Ints
    """For each object: whether a detection has taken it; never of crowds."""


def matched_to_objects(
    num_detections: int, pairs: Pairs, overlaps: Floats, counted: Ints, is_crowd: Bools, runs: Runs
) -> Matches:
    """Match the detections of any number of images and classes, within these in the order in which they may choose.

    Pairs are of one image and class, by their rows among all detections and all objects. An object counts in some of
    the runs, which are bits, and is ignored in the others; any number of detections may take a crowd.
    """
    reached = runs.reached(overlaps)
    pairs, overlaps, reached = pairs.where(reached > 0), overlaps[reached > 0], reached[reached > 0]
    # Each pair stands for two choices, of which the second comes after all first ones of the detection: the object is
    # one that counts, or one to be ignored.
    detection, truth = np.tile(pairs.detection, 2), np.tile(pairs.truth, 2)
    choices = np.concatenate([reached & counted[pairs.truth], reached & ~counted[pairs.truth]])
    is_second = np.arange(len(choices)) >= len(reached)
    # Of objects covered alike, the last one is taken.
    order = np.lexsort((-truth, -np.tile(overlaps, 2), is_second, detection))
    order = order[choices[order] > 0]
    columns: Sequence[list[int]] = [
        column[order].tolist() for column in (detection, truth, choices, is_second, is_crowd[truth])
    ]

    taken, ignored = [0] * num_detections, [0] * num_detections
    found = [0] * len(counted)
    for chooser, number, runs_left, to_be_ignored, stays in zip(*columns, strict=True):
        new = runs_left & ~found[number] & ~taken[chooser]
        taken[chooser] |= new
        if to_be_ignored:
            ignored[chooser] |= new
        if not stays:
            found[number] |= new
    return Matches(*(np.array(bits, np.int64) for bits in (taken, ignored, found)))


class Assigned(NamedTuple):
    """What has become of detections in an order of their own, and of groups."""

    right: Bools
    """For each detection whether it is right, shape (detections,)."""
    ignored: Bools
    """Whether a detection is of a difficult object, or in a group."""
    groups: Pairs
    """Each group in which a detection lies, with the best such detection."""


def assigned_to_objects(
    num_detections: int, pairs: Pairs, overlaps: Floats, is_group: Bools, is_difficult: Bools, threshold: float
) -> Assigned:
    """Assign each detection to the object that it overlaps most, as PASCAL VOC does; what is left may lie in a group.

    An object belongs to the first detection assigned to it. Of objects overlapped alike, the first one is taken.

    Args:
        num_detections: of all images; within an image and a class, the best first.
        pairs: detections and objects of one image and class; their rows among all detections and all objects.
        overlaps: of the pairs; with a group, the share of the detection that lies in it.
        is_group: of each object: it stands for many.
        is_difficult: of each object: detections assigned to it do not count.
        threshold: what an overlap must reach.
    """
    right, ignored = np.zeros(num_detections, bool), np.zeros(num_detections, bool)
    with_group = is_group[pairs.truth]
    best = _best_of_each(pairs.where(~with_group), overlaps[~with_group], threshold)
    difficult = is_difficult[best.truth]
    ignored[best.detection[difficult]] = True
    _, first = np.unique(best.truth[~difficult], return_index=True)
    right[best.detection[~difficult][first]] = True

    with_group &= ~(right | ignored)[pairs.detection]
    inside = _best_of_each(pairs.where(with_group), overlaps[with_group], threshold)
    ignored[inside.detection] = True
    groups, first = np.unique(inside.truth, return_index=True)
    return Assigned(right, ignored, Pairs(inside.detection[first], groups))


def _best_of_each(pairs: Pairs, overlaps: Floats, threshold: float) -> Pairs:
    """Keep for each detection the pair of the largest overlap, if it reaches the threshold."""
    order = np.lexsort((pairs.truth, -overlaps, pairs.detection))
    order = order[(ranks(pairs.detection[order]) == 0) & (overlaps[order] >= threshold)]
    return Pairs(pairs.detection[order], pairs.truth[order])
