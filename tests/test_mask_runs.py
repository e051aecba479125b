"""Masks as runs: joined, measured and intersected like the pixels that they stand for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lockstep.mask_runs import area_of, flips_of_pixels, intersections, joined, lengths_in, pixels_in, runs_text

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
MASKS = SHAPES.flatmap(lambda shape: arrays.arrays(np.uint8, shape, elements=st.integers(0, 2)))


def pixels_of(flips: np.ndarray, size: int) -> np.ndarray:
    changes = np.zeros(size + 1, int)
    np.add.at(changes, flips[0::2], 1)
    np.add.at(changes, flips[1::2], -1)
    return changes.cumsum()[:-1] > 0


@given(MASKS)
def test_flips_are_where_the_pixels_change_column_by_column(masks: np.ndarray) -> None:
    flips = flips_of_pixels(masks)
    assert len(flips) == len(masks)
    for mask, own in zip(masks, flips, strict=True):
        assert np.array_equal(pixels_of(own, mask.size), mask.T.ravel() > 0)
        assert (np.diff(own) > 0).all()


@given(MASKS)
def test_a_joined_mask_has_the_pixels_of_any_part(masks: np.ndarray) -> None:
    (union,) = flips_of_pixels(masks.max(0)[None])
    assert joined(flips_of_pixels(masks)).tolist() == union.tolist()


@given(MASKS)
def test_areas_and_intersections_are_numbers_of_pixels(masks: np.ndarray) -> None:
    flips = flips_of_pixels(masks)
    assert [area_of(one) for one in flips] == (masks > 0).sum((1, 2)).tolist()
    common = ((masks > 0) & (masks[:1] > 0)).sum((1, 2))
    assert intersections(flips, flips[0]).tolist() == common.tolist()


def test_no_masks_and_empty_ones() -> None:
    assert flips_of_pixels(np.zeros((0, 3, 3), np.uint8)) == []
    empty = joined([])
    assert area_of(empty) == 0
    (whole,) = flips_of_pixels(np.ones((1, 3, 3), np.uint8))
    assert intersections([empty, whole], empty).tolist() == [0, 0]
    assert intersections([], whole).tolist() == []
    assert joined([whole, empty]).tolist() == whole.tolist() == [0, 9]


def reference_text(lengths: list[int]) -> str:
    """Write runs as rleToString of maskApi.c does, character by character."""
    text = ""
    for place, length in enumerate(lengths):
        value, more = length - lengths[place - 2] if place > 2 else length, True
        while more:
            code = value & 0x1F
            value >>= 5
            more = value != -1 if code & 0x10 else value != 0
            text += chr((code | 0x20 if more else code) + 48)
    return text


@given(MASKS)
def test_the_text_of_runs_is_that_of_the_coco_api_and_is_read_back(masks: np.ndarray) -> None:
    for mask, flips in zip(masks, flips_of_pixels(masks), strict=True):
        lengths = lengths_in(runs_text(flips, mask.size))
        assert runs_text(flips, mask.size) == reference_text(lengths.tolist())
        assert np.array_equal(pixels_in(runs_text(flips, mask.size), *mask.shape), mask > 0)
        assert lengths.sum() == mask.size
        assert lengths.cumsum()[: len(flips)].tolist() == flips.tolist()


@given(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=9))
def test_long_runs_are_written_as_short_ones(lengths: list[int]) -> None:
    ends = np.cumsum(lengths)
    flips = ends[: (len(ends) - 1) // 2 * 2]
    assert lengths_in(runs_text(flips, int(ends[len(flips)]))).tolist() == lengths[: len(flips) + 1]
