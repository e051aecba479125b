from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.errors import InputError
from lockstep.images.augment import HorizontalFlip, RandomShift, turns
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


def test_a_row_depends_on_its_own_draws_alone() -> None:
    shift = RandomShift(2)
    whole = shift({"image": images(8)}, draws(8))["image"]
    part = shift({"image": images(8)[3:5]}, draws(2, start=3))["image"]
    assert torch.equal(part, whole[3:5])
    assert not torch.equal(shift({"image": images(8)}, draws(8, seed=1))["image"], whole)


def test_other_fields_and_the_given_batch_stay() -> None:
    label = torch.arange(4)
    given = {"image": images(4), "label": label}
    result = RandomShift(3)(given, draws(4))
    assert result["label"] is label
    assert torch.equal(given["image"], images(4))


def test_another_field_can_be_named() -> None:
    batch = {"depth": images(4), "image": images(4)}
    result = RandomShift(2, field="depth")(batch, draws(4))
    assert torch.equal(result["image"], images(4))
    assert not torch.equal(result["depth"], images(4))


def test_it_is_a_value() -> None:
    assert RandomShift(2) == RandomShift(2) != RandomShift(3)
    assert repr(RandomShift(2)) == "RandomShift(pixels=2, field='image')"


def test_a_shift_by_nothing_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        RandomShift(0)
    assert str(caught.value) == (
        "A shift by up to 0 pixels shifts nothing.\n"
        "  given:    pixels=0\n"
        "  expected: a whole number above 0\n"
        "  hint:     give the largest shift in pixels, or leave the augmentation out"
    )


def test_a_shift_by_a_word_is_refused() -> None:
    with pytest.raises(InputError, match="pixels is of the wrong type"):
        RandomShift("a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "given"),
    [
        ({"pixels": images(2)}, "'image' is missing; the fields are pixels"),
        ({"image": images(2)[0]}, "'image' is a tensor of shape (2, 5, 7); the fields are image"),
        ({"image": ["a", "b"]}, "'image' is list; the fields are image"),
    ],
)
def test_a_field_without_images_is_named(batch: dict[str, object], given: str) -> None:
    with pytest.raises(InputError) as caught:
        RandomShift(2)(batch, draws(2))
    assert str(caught.value) == (
        "RandomShift finds no images in the field 'image'.\n"
        f"  given:    {given}\n"
        "  expected: a tensor of shape (batch, channels, height, width)\n"
        "  hint:     name the field of the images: RandomShift(pixels, field=...)"
    )


def test_an_equal_augmentation_has_turns_of_its_own() -> None:
    flip = HorizontalFlip()
    assert turns([flip, RandomShift(1), HorizontalFlip(), HorizontalFlip(0.3), flip]) == [0, 0, 1, 0, 2]


def test_augmentations_that_cannot_be_compared_are_no_repeats() -> None:
    @dataclass(frozen=True)
    class Scaled:
        factors: np.ndarray[Any, Any]

        def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
            return batch

    one, other = Scaled(np.ones(2)), Scaled(np.ones(2))
    assert turns([one, other, one]) == [0, 0, 1]
