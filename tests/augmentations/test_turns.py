from __future__ import annotations

from typing import Any

import pytest
import torch
from augmented import BOXES, batch_of, draws_of, noise, png
from hypothesis import given
from hypothesis import strategies as st

from lockstep.augmentations import RandomRotation90, RandomVerticalFlip
from lockstep.augmentations.augment import Augment
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.errors import InputError
from lockstep.images.decode import EncodedImage

SWAPPED = (1, 0)
LEFT_RIGHT = HorizontalFlip(1, keypoint_flip_permutation=SWAPPED)
UP_DOWN = RandomVerticalFlip(1, keypoint_flip_permutation=SWAPPED)
ROT90 = RandomRotation90(1)
EXPECTED: list[tuple[Augment, list[list[float]]]] = [
    (LEFT_RIGHT, [[0, 0, 0.75, 0.75], [0.25, 0, 0.75, 0.5]]),
    (UP_DOWN, [[0.25, 0.25, 1, 1], [0.25, 0.5, 0.75, 1]]),
    (ROT90, [[0, 0, 0.75, 0.75], [0, 0.25, 0.5, 0.75]]),
]


def everything(seed: int = 0, count: int = 3) -> dict[str, Any]:
    """Encoded images of several sizes with two objects each."""
    points = torch.tensor([[[0.1, 0.2], [torch.nan, torch.nan]], [[0.3, 0.4], [0.5, 0.75]]])
    images = [png(noise(4 + row, 8 - row, seed=seed + row)) for row in range(count)]
    batch = batch_of(*images, keypoints=points, keypoint_visibility=torch.tensor([[2, 0], [1, 2]]))
    masks = [noise(4 + row, 8 - row, 2, seed) % 2 for row in range(count)]
    return {**batch, "masks": masks}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for first, second in zip(one["image"], other["image"], strict=True):
        assert torch.equal(first.decode(), second.decode())
    for first, second in zip(one["masks"], other["masks"], strict=True):
        assert torch.equal(first, second)
    for name in ("boxes", "labels", "keypoints", "keypoint_visibility"):
        torch.testing.assert_close(one[name].values, other[name].values, equal_nan=True)


@pytest.mark.parametrize(("augment", "expected"), EXPECTED, ids=lambda value: type(value).__name__)
def test_boxes_are_turned_as_in_the_reference(augment: Augment, expected: list[list[float]]) -> None:
    after = augment(everything(), draws_of(3))
    for boxes in after["boxes"]:
        torch.testing.assert_close(boxes, torch.tensor(expected))


@given(st.integers(0, 1000))
def test_flips_twice_and_quarter_turns_four_times_change_nothing(seed: int) -> None:
    before = everything(seed)
    for augment, times in ((LEFT_RIGHT, 2), (UP_DOWN, 2), (ROT90, 4)):
        after = before
        for _ in range(times):
            after = augment(after, draws_of(3))
        assert_same(before, after)
    half = UP_DOWN(LEFT_RIGHT(before, draws_of(3)), draws_of(3))
    assert_same(half, ROT90(ROT90(before, draws_of(3)), draws_of(3)))


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_some_are_turned_with_all_that_is_on_them(p: float) -> None:
    count = 40
    before = batch_of(*[noise(5, 5, seed=row) for row in range(count)])
    for cls, expected in ((RandomVerticalFlip, EXPECTED[1][1]), (RandomRotation90, EXPECTED[2][1])):
        after = cls(p)(before, draws_of(count))
        turned = [not torch.equal(*pair) for pair in zip(after["image"], before["image"], strict=True)]
        assert (5 < sum(turned) < 35) if p else not any(turned)
        for boxes, is_turned in zip(after["boxes"], turned, strict=True):
            torch.testing.assert_close(boxes, torch.tensor(expected) if is_turned else BOXES)


def test_files_are_turned_when_they_are_decoded() -> None:
    image = noise(4, 6)
    (turned,) = ROT90(batch_of(png(image)), draws_of(1))["image"]
    assert isinstance(turned, EncodedImage)
    assert turned.size == (4, 6)
    assert torch.equal(turned.decode(), torch.rot90(image, dims=(1, 2)))


def test_images_in_one_tensor_become_a_list_unless_they_stay_of_one_size() -> None:
    images = torch.stack([noise(4, 4, seed=row) for row in range(2)])
    square = ROT90({"image": images}, draws_of(2))["image"]
    assert torch.equal(square, torch.rot90(images, dims=(2, 3)))
    wide = RandomRotation90()({"image": torch.zeros(9, 3, 4, 6)}, draws_of(9))["image"]
    assert {tuple(image.shape[1:]) for image in wide} == {(4, 6), (6, 4)}


def test_keypoints_are_not_flipped_without_knowing_left_from_right() -> None:
    with pytest.raises(InputError, match="RandomVerticalFlip does not know which keypoint") as caught:
        RandomVerticalFlip(1)(everything(), draws_of(3))
    assert "keypoint_flip_permutation=()" in str(caught.value)
    assert RandomRotation90(1)(everything(), draws_of(3))["keypoints"].lengths.tolist() == [2, 2, 2]
