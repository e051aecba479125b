"""Flips, shifts, turns, and the refusal of locations of objects by whatever moves the pixels."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.augmentations.augment import Augment, turns
from lockstep.augmentations.auto_augment import RandAugment, TrivialAugmentWide
from lockstep.augmentations.colours import ColourDraws
from lockstep.augmentations.crops import (
    CentralCrop,
    CropOrPad,
    Decode,
    DistortedCrop,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ShortSideCrop,
)
from lockstep.augmentations.pixels import RandomErasing
from lockstep.augmentations.turns import HorizontalFlip, RandomShift
from lockstep.errors import InputError
from lockstep.images.decode import Decoding, EncodedImage
from lockstep.ragged import Ragged
from lockstep.randomness import Draws

DTYPES = [torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.int64]


def images(count: int, dtype: torch.dtype = torch.uint8, height: int = 5, width: int = 7) -> torch.Tensor:
    """Images without a zero, so that what moved in shows."""
    values = torch.arange(count * 2 * height * width).reshape(count, 2, height, width) % 250 + 1
    return values.to(dtype)


def shifted(image: torch.Tensor, down: int, right: int) -> torch.Tensor:
    """What a shift is, pixel by pixel."""
    result = torch.zeros_like(image)
    _, height, width = image.shape
    for y in range(height):
        for x in range(width):
            if 0 <= y - down < height and 0 <= x - right < width:
                result[:, y, x] = image[:, y - down, x - right]
    return result


def draws(count: int, start: int = 0, seed: int = 0) -> Draws:
    return Draws(seed, np.arange(start, start + count))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pixels", [1, 6])
def test_each_image_is_shifted_by_whole_pixels_with_zeros(pixels: int, dtype: torch.dtype) -> None:
    before = images(8, dtype)
    after = RandomShift(pixels)({"image": before}, draws(8))["image"]
    shifts = range(-pixels, pixels + 1)
    assert after.dtype == dtype
    for image, moved in zip(before, after, strict=True):
        assert any(torch.equal(moved, shifted(image, down, right)) for down in shifts for right in shifts)


def test_every_shift_occurs_alike() -> None:
    dot = torch.zeros(2000, 1, 3, 3, dtype=torch.uint8)
    dot[:, :, 1, 1] = 1
    moved = RandomShift(1)({"image": dot}, draws(2000))["image"]
    counts = moved.sum(dim=(0, 1)).flatten()
    assert counts.sum() == 2000
    assert counts.min() > 160  # 222 expected, one standard deviation is 14
    assert counts.max() < 285


def test_a_shift_depends_on_its_own_draws_alone() -> None:
    shift = RandomShift(2)
    whole = shift({"image": images(8)}, draws(8))["image"]
    part = shift({"image": images(8)[3:5]}, draws(2, start=3))["image"]
    assert torch.equal(part, whole[3:5])
    assert not torch.equal(shift({"image": images(8)}, draws(8, seed=1))["image"], whole)


def test_a_shift_leaves_other_fields_and_the_given_batch_as_they_are() -> None:
    label = torch.arange(4)
    given = {"image": images(4), "label": label}
    result = RandomShift(3)(given, draws(4))
    assert result["label"] is label
    assert torch.equal(given["image"], images(4))


def test_another_field_to_shift_can_be_named() -> None:
    batch = {"depth": images(4), "image": images(4)}
    result = RandomShift(2, field="depth")(batch, draws(4))
    assert torch.equal(result["image"], images(4))
    assert not torch.equal(result["depth"], images(4))


def test_a_shift_is_a_value() -> None:
    assert RandomShift(2) == RandomShift(2) != RandomShift(3)
    assert repr(RandomShift(2)) == "RandomShift(pixels=2, field='image')"


def test_a_shift_by_nothing_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        RandomShift(0)
    assert str(caught.value) == (
        "pixels is out of range.\n"
        "  given:    pixels=0\n"
        "  expected: 1 or more\n"
        "  hint:     give the largest shift in pixels, or leave the augmentation out"
    )


def test_a_shift_by_a_word_is_refused() -> None:
    with pytest.raises(InputError, match="pixels is of the wrong type"):
        RandomShift("a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "given"),
    [
        ({"pixels": images(2)}, "'image' is missing; the fields are pixels"),
        ({"image": images(2)[0]}, "'image' is a tensor of shape (2, 5, 7), torch.uint8; the fields are image"),
        ({"image": ["a", "b"]}, "'image' is a list of str; the fields are image"),
    ],
)
def test_a_field_without_images_to_shift_is_named(batch: dict[str, object], given: str) -> None:
    with pytest.raises(InputError) as caught:
        RandomShift(2)(batch, draws(2))
    assert str(caught.value) == (
        "RandomShift finds no decoded images in the field 'image'.\n"
        f"  given:    {given}\n"
        "  expected: a tensor of shape (batch, channels, height, width)\n"
        "  hint:     crop or resize encoded images first, or name their field: RandomShift(..., field=...)"
    )


def test_augmentations_of_one_class_and_field_take_turns() -> None:
    flip = HorizontalFlip()
    other = HorizontalFlip(field="mask")
    assert turns([flip, RandomShift(1), HorizontalFlip(), other, HorizontalFlip(0.3), flip]) == [0, 0, 1, 0, 2, 3]


def test_a_function_takes_turns_with_itself() -> None:
    def one(batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        return batch

    def other(batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        return batch

    assert turns([one, other, one]) == [0, 0, 1]


def test_two_flips_of_any_probabilities_are_independent() -> None:
    before = numbered(2000)
    batch: dict[str, Any] = {"image": before}
    for flip, turn in zip(flips := [HorizontalFlip(0.5), HorizontalFlip(0.3)], turns(flips), strict=True):
        batch = flip(batch, draws(2000).again(turn))
    kept = sum(torch.equal(one, other) for one, other in zip(batch["image"], before, strict=True))
    assert 900 < kept < 1100  # one of the two or neither: 0.5 * 0.3 + 0.5 * 0.7


def numbered(count: int) -> torch.Tensor:
    return torch.arange(count * 3 * 2 * 4).reshape(count, 3, 2, 4)


def test_some_images_are_flipped_and_the_rest_are_not() -> None:
    before = numbered(1000)
    given = before.clone()
    after = HorizontalFlip()({"image": before}, draws(1000))["image"]
    flipped = [torch.equal(one, other.flip(-1)) for one, other in zip(after, before, strict=True)]
    kept = [torch.equal(one, other) for one, other in zip(after, before, strict=True)]
    assert all(one != other for one, other in zip(flipped, kept, strict=True))
    assert 430 < sum(flipped) < 570
    assert torch.equal(before, given)


@pytest.mark.parametrize(("p", "flips"), [(0, False), (1, True)])
def test_images_are_flipped_never_or_always(p: float, flips: bool) -> None:
    before = numbered(5)
    after = HorizontalFlip(p)({"image": before, "label": 3}, draws(5))
    assert torch.equal(after["image"], before.flip(-1) if flips else before)
    assert after["label"] == 3


def test_a_flip_depends_on_its_own_draws_alone() -> None:
    whole = HorizontalFlip()({"image": numbered(20)}, draws(20))["image"]
    part = HorizontalFlip()({"image": numbered(20)[5:9]}, draws(4, start=5))["image"]
    assert torch.equal(part, whole[5:9])


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_a_flip_of_no_probability_is_refused(p: float) -> None:
    with pytest.raises(InputError, match="p is out of range"):
        HorizontalFlip(p)


@pytest.mark.parametrize(
    ("batch", "found"),
    [({"label": 0}, "missing"), ({"image": [b""]}, "list"), ({"image": torch.zeros(2, 3)}, r"shape \(2, 3\)")],
)
def test_a_flip_of_no_batch_of_images_is_refused(batch: dict[str, object], found: str) -> None:
    with pytest.raises(InputError, match=f"finds no images in the field 'image'(.|\n)*{found}"):
        HorizontalFlip()(batch, draws(2))


CROPS: list[Augment] = [
    DistortedCrop(4),
    RandomResizedCrop(4),
    CentralCrop(4),
    CropOrPad(4),
    RandomCrop(4),
    ShortSideCrop(4, (5, 6)),
]
MOVING: list[Augment] = [HorizontalFlip(), RandomShift(1)]
BENDING: list[Augment] = [RandAugment(), TrivialAugmentWide()]
OTHERS = [*MOVING, *BENDING]
STAYING: list[Augment] = [RandomErasing(), ColourDraws()]
BOXES = [torch.tensor([[0.1, 0.2, 0.5, 0.6]])] * 2
OBJECTS: dict[str, Any] = {
    "boxes": BOXES,
    "masks": [torch.ones(1, 6, 8, dtype=torch.uint8)] * 2,
    "keypoints": [torch.zeros(1, 3, 2)] * 2,
    "keypoint_visibility": [torch.ones(1, 3)] * 2,
    "area": [torch.tensor([40.0])] * 2,
}
WITHOUT_LOCATIONS: dict[str, Any] = {
    "label": torch.arange(2),
    "labels": [torch.tensor([3])] * 2,
    "difficult": [torch.tensor([True])] * 2,
    "is_crowd": [torch.tensor([False])] * 2,
    "class_text": [["cat"]] * 2,
    "source_id": ["5", "6"],
}


def given_to(augment: Augment, count: int = 2) -> dict[str, Any]:
    """The images that an augmentation takes."""
    if type(augment) not in {Decode, Resize, *map(type, CROPS)}:
        return {"image": torch.full((count, 3, 6, 8), 9, dtype=torch.uint8)}
    written = io.BytesIO()
    Image.new("RGB", (8, 6)).save(written, "PNG")
    return {"image": [EncodedImage(written.getvalue(), "black.png", Decoding("pillow"))] * count}


@pytest.mark.parametrize("field", OBJECTS)
@pytest.mark.parametrize("augment", BENDING, ids=repr)
def test_locations_of_objects_are_refused_by_what_bends_images(augment: Augment, field: str) -> None:
    batch = {**given_to(augment), **WITHOUT_LOCATIONS, field: OBJECTS[field]}
    with pytest.raises(InputError, match=f"{type(augment).__name__} would leave {field} where ") as raised:
        augment(batch, draws(2))
    assert raised.value.expected.startswith("no places of objects on the images, none of boxes, masks, ")
    kept = '["image", "label", "labels", "difficult", "is_crowd", "class_text", "source_id"]'
    assert raised.value.hint == f"read the fields wanted alone: lockstep.readers.combine.OnlyFields(reader, {kept})"


def test_an_operation_that_would_leave_objects_behind_names_their_fields() -> None:
    batch = {"image": torch.zeros(2, 3, 6, 8, dtype=torch.uint8), **OBJECTS}
    with pytest.raises(InputError, match="would leave boxes, masks, keypoints, keypoint_visibility, area where "):
        RandAugment()(batch, draws(2))


@pytest.mark.parametrize("augment", [*CROPS, *MOVING, Resize(4)], ids=repr)
def test_the_objects_move_with_their_images(augment: Augment) -> None:
    """An object that is all that is white on its image: its mask and its box are where the white is then."""
    white = torch.zeros(3, 6, 8, dtype=torch.uint8)
    white[:, 2:4, 3:6] = 255
    objects = {
        "boxes": Ragged.of([torch.tensor([[2 / 6, 3 / 8, 4 / 6, 6 / 8]])] * 8),
        "masks": [white[:1] // 255] * 8,
        "area": Ragged.of([torch.tensor([6.0])] * 8),
        "labels": Ragged.of([torch.tensor([5])] * 8),
    }
    if isinstance(augment, DistortedCrop | RandomResizedCrop | CentralCrop | ShortSideCrop | Resize):
        augment = replace(augment, resize="nearest")  # type: ignore[type-var]
    found = augment({"image": white.expand(8, 3, 6, 8), **objects}, draws(8))
    for row, image in enumerate(found["image"]):
        seen = image[:1] // 255
        if len(found["labels"][row]) == 0:
            assert not seen.any()
            continue
        assert torch.equal(found["masks"][row], seen)
        top, left, bottom, right = found["boxes"][row][0] * torch.tensor([*seen.shape[1:]] * 2)
        rows, columns = seen[0].any(1).nonzero(), seen[0].any(0).nonzero()
        if len(rows):  # sampling may miss what is less than a pixel
            assert abs(float(rows[0] - top)) <= 1 >= abs(float(rows[-1] + 1 - bottom))
            assert abs(float(columns[0] - left)) <= 1 >= abs(float(columns[-1] + 1 - right))
        assert float(found["area"][row]) == pytest.approx(float((bottom - top) * (right - left)), rel=1e-4)


def test_keypoints_are_mirrored_with_left_and_right_exchanged() -> None:
    points = torch.tensor([[[0.25, 0.25], [0.5, 0.5], [math.nan, math.nan]]])
    batch = {
        "image": torch.zeros(1, 3, 4, 4),
        "boxes": [torch.tensor([[0.0, 0, 1, 1]])],
        "keypoints": [points],
        "keypoint_visibility": [torch.tensor([[2, 1, 0]])],
    }
    with pytest.raises(
        InputError, match=r"does not know which keypoint(.|\n)*3 keypoints(.|\n)*each number from 0 to 2"
    ):
        HorizontalFlip(1)(batch, draws(1))
    found = HorizontalFlip(1, keypoint_flip_permutation=(1, 0, 2))(batch, draws(1))
    assert found["keypoints"][0][0].nan_to_num(9).tolist() == [[0.5, 0.5], [0.25, 0.75], [9, 9]]
    assert found["keypoint_visibility"][0].tolist() == [[1, 2, 0]]
    kept = HorizontalFlip(0, keypoint_flip_permutation=(1, 0, 2))(batch, draws(1))
    assert kept["keypoints"][0].nan_to_num(9).tolist() == points.nan_to_num(9).tolist()


@pytest.mark.parametrize("augment", [*CROPS, *OTHERS], ids=repr)
def test_fields_without_locations_stay(augment: Augment) -> None:
    found = augment({**given_to(augment), **WITHOUT_LOCATIONS, "area": torch.ones(2)}, draws(2))
    assert {*found} == {"image", *WITHOUT_LOCATIONS, "area"}
    assert all(found[name] is value for name, value in WITHOUT_LOCATIONS.items())


@pytest.mark.parametrize("augment", [*STAYING, Decode()], ids=repr)
def test_augmentations_that_move_nothing_leave_locations(augment: Augment) -> None:
    found = augment({**given_to(augment), **OBJECTS}, draws(2))
    assert all(found[name] is value for name, value in OBJECTS.items())


def test_the_boxes_that_a_crop_is_drawn_by_are_taken_out() -> None:
    crop = DistortedCrop(4, boxes_field="boxes")
    assert [*crop({**given_to(crop), **WITHOUT_LOCATIONS, "boxes": BOXES}, draws(2))] == ["image", *WITHOUT_LOCATIONS]


@pytest.mark.parametrize("augment", [*CROPS, Resize(4), Decode(), *OTHERS, *STAYING], ids=repr)
def test_a_batch_without_examples_stays_one(augment: Augment) -> None:
    found = augment(given_to(augment, 0), draws(0))["image"]
    assert len(found) == 0
    if isinstance(found, torch.Tensor):
        assert found.dtype == torch.uint8
        assert found.shape[1:] == ((3, 4, 4) if augment in CROPS or isinstance(augment, Resize) else (3, 6, 8))


@pytest.mark.parametrize("augment", [CropOrPad(4), RandomCrop(4), ShortSideCrop(4, (5, 6))], ids=repr)
def test_no_decoded_images_keep_their_channels(augment: Augment) -> None:
    assert augment({"image": torch.zeros(0, 1, 6, 8)}, draws(0))["image"].shape == (0, 1, 4, 4)
