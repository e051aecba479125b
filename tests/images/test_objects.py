"""Fields with a value for each object stay in step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.images.masks import dense_masks
from lockstep.images.moves import MIRRORED, Region, move
from lockstep.images.objects import move_objects, select_objects, shares_seen
from lockstep.ragged import Ragged

COUNTS = (2, 0, 3)


def batch_of(*, lists: bool = False) -> dict[str, Any]:
    """Three images with two, no and three objects, numbered in all fields."""
    generator = torch.Generator().manual_seed(3)
    corners = [torch.rand(count, 2, 2, generator=generator).sort(1).values.view(count, 4) for count in COUNTS]
    numbers = [torch.arange(count) + 10 * row for row, count in enumerate(COUNTS)]
    own = {
        "boxes": corners,
        "labels": numbers,
        "area": [torch.ones(count) for count in COUNTS],
        "keypoints": [each.view(-1, 2, 2) for each in corners],
        "keypoint_visibility": [torch.full((count, 2), 2) for count in COUNTS],
        "object_colour": numbers,
    }
    return {
        **{name: values if lists else Ragged.of(values) for name, values in own.items()},
        "class_text": [[str(number) for number in each.tolist()] for each in numbers],
        "masks": [dense_masks(np.arange(count * 6).reshape(count, 2, 3) % 2, 2, 3) for count in COUNTS],
        "truth_labels": Ragged.of(numbers),
        "area_of_image": torch.ones(3),
    }


def numbers_in(batch: dict[str, Any]) -> list[list[int]]:
    """The objects that are left, which all fields agree on."""
    left = [each.tolist() for each in batch["labels"]]
    assert [each.tolist() for each in batch["object_colour"]] == left
    assert [[int(text) for text in texts] for texts in batch["class_text"]] == left
    for name in ("boxes", "masks", "area", "keypoints", "keypoint_visibility"):
        assert [len(each) for each in batch[name]] == [len(each) for each in left], name
    assert [len(each) for each in batch["truth_labels"]] == [*COUNTS]
    return left


@given(st.lists(st.booleans(), min_size=5, max_size=5), st.booleans())
def test_what_is_dropped_is_dropped_from_all_fields(keep: list[bool], lists: bool) -> None:
    kept = iter(keep)
    expected = [[number for number in numbers.tolist() if next(kept)] for numbers in batch_of()["labels"]]
    assert numbers_in(select_objects(batch_of(lists=lists), torch.tensor(keep))) == expected


def test_of_an_image_that_stays_whole_nothing_is_dropped_or_clipped() -> None:
    batch = batch_of()
    batch["boxes"].values[0] = torch.tensor([0.5, 0.5, 0.5, 0.5])  # without area
    found = move_objects(batch, [move((2, 3), turn=MIRRORED)] * 3)
    assert numbers_in(found) == numbers_in(batch)


def test_objects_that_are_not_seen_any_more_are_dropped_and_the_rest_is_clipped() -> None:
    boxes = torch.tensor([[0, 0, 0.5, 1], [0.5, 0, 1, 1], [0.4, 0, 1, 0.5], [0, 0, 0.25, 0.1]])
    points = torch.tensor([[[0.25, 0.5], [0.75, 0.5]], *[[[math.nan] * 2] * 2] * 3])
    batch = {
        "boxes": [boxes],
        "labels": [torch.arange(4)],
        "area": [torch.full((4,), 100.0)],
        "keypoints": [points],
        "keypoint_visibility": [torch.tensor([[1, 2], *[[0, 0]] * 3])],
    }
    by = [move((10, 10), Region(0, 0, 5, 10), to=(10, 10))]
    found = move_objects(batch, by)
    assert found["labels"][0].tolist() == [0, 2, 3]
    torch.testing.assert_close(found["boxes"][0], torch.tensor([[0, 0, 1, 1.0], [0.8, 0, 1, 0.5], [0, 0, 0.5, 0.1]]))
    torch.testing.assert_close(found["area"][0], torch.tensor([200, 200 / 6, 200]))
    assert found["keypoints"][0][0].nan_to_num(9).tolist() == [[0.5, 0.5], [9, 9]]
    assert found["keypoint_visibility"][0][0].tolist() == [1, 0]
    assert move_objects(batch, by, min_overlap=0.2)["labels"][0].tolist() == [0, 3]
    assert move_objects(batch, by, min_overlap=torch.tensor([1.0]))["labels"][0].tolist() == [0, 3]


def test_a_box_without_area_is_not_seen() -> None:
    boxes = torch.tensor([[0.5, 0.5, 0.5, 0.9], [-1, 0, 1, 1], [2, 2, 3, 3], [0, 0, 1, 1]])
    assert shares_seen(boxes, torch.tensor([[0, 0, 1, 1.0]]).expand(4, 4)).tolist() == [0, 0.5, 0, 1]


@given(st.integers(0, 200), st.integers(1, 200), st.integers(0, 99))
def test_a_box_that_ends_where_its_part_does_is_all_in_it(top: int, rows: int, below: int) -> None:
    height = top + rows + below
    batch = {"boxes": Ragged.of([torch.tensor([[top, 0, top + rows, 1]]) / torch.tensor([height, 1, height, 1])])}
    by = move((height, 1), Region(top, 0, rows, 1))
    assert move_objects(batch, [by], min_overlap=1.0)["boxes"].lengths.tolist() == [1]


@given(st.integers(1, 99), st.integers(1, 99), st.integers(1, 50), st.integers(1, 50))
def test_a_box_that_ends_where_a_part_begins_is_dropped_however_it_was_moved(
    rows: int, below: int, first: int, second: int
) -> None:
    height = rows + below
    batch = {"boxes": Ragged.of([torch.tensor([[0, 0, rows / height, 1]])])}
    for top in (first, second):
        batch = move_objects(batch, [move((height, 1), Region(-top, 0, height + top, 1))])
        height += top
    by = move((height, 1), Region(height - below, 0, below, 1))
    assert not len(move_objects(batch, [by])["boxes"].values)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("object_speed", Ragged.of([torch.ones(1), torch.ones(2)])),
        ("labels", [torch.ones(2), torch.ones(3)]),
        ("class_text", ["ox", "dog"]),
        ("masks", [torch.ones(2, 3, 3), torch.ones(3, 3, 3)]),
    ],
)
def test_a_field_without_a_value_for_each_object_is_refused(name: str, values: Any) -> None:
    boxes = Ragged.of([torch.ones(2, 4), torch.ones(1, 4)])
    with pytest.raises(DataError, match=f"{name!r} has not one value for each object"):
        select_objects({"boxes": boxes, name: values}, torch.tensor([True, False, True]))


def test_keypoints_of_no_object_are_refused() -> None:
    with pytest.raises(DataError, match=r"'keypoints' of shape \(10, 2\)"):
        move_objects({"keypoints": torch.rand(2, 5, 2)}, [move((4, 4))] * 2)


def test_a_batch_without_objects_stays_as_it_is() -> None:
    batch = {"image": torch.zeros(1, 3, 2, 2), "area": torch.ones(1)}
    assert move_objects(batch, [move((2, 2), Region(0, 0, 1, 1))]) is batch


def test_objects_may_be_dropped_from_an_image_that_stays_whole() -> None:
    boxes = Ragged.of([torch.tensor([[0.0, 0, 0.5, 0.5], [0.2, 0.2, 0.2, 0.9]])] * 2)
    moved = move_objects({"boxes": boxes}, [move((4, 4))] * 2, is_cut=torch.tensor([False, True]))
    assert moved["boxes"].lengths.tolist() == [2, 1]
