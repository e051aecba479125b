"""Crops that keep the scale of an image, or its aspect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from preset_images import GOLDEN, draws, encoded, first_channels, some_images

from lockstep.augmentations.augment import Augment
from lockstep.augmentations.crops import CropOrPad, RandomCrop, ShortSideCrop, scaled_sides
from lockstep.errors import DataError, InputError
from lockstep.images.decode import Decoding
from lockstep.images.resizing import resized

PARTS = [name for name in GOLDEN if name.startswith("part")]


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("is_encoded", [True, False])
def test_crop_or_pad_takes_the_middle_as_tensorflow_does(name: str, is_encoded: bool) -> None:
    height, width, size = map(int, name.split()[1:])
    image = GOLDEN["image"][:height, :width]
    given = [encoded(image)] if is_encoded else first_channels(image)[None]
    found = CropOrPad(size)({"image": given, "label": 3}, draws(1))
    assert torch.equal(found["image"][0], first_channels(GOLDEN[name]).to(torch.uint8))
    assert found["label"] == 3


def test_sides_are_scaled_as_in_slim() -> None:
    rows = GOLDEN["sides"]
    assert np.array_equal(scaled_sides(rows[:, :2], rows[:, 2]), rows[:, 3:])
    assert np.array_equal(rows[:, 3:].min(1), rows[:, 2])


def test_a_random_crop_is_anywhere_within_the_image_and_the_black_around_it() -> None:
    pixels = torch.arange(1, 6 * 7 + 1, dtype=torch.uint8).reshape(1, 1, 6, 7)
    found = RandomCrop(5, padding=2)({"image": pixels.expand(3000, -1, -1, -1)}, draws(3000))["image"]
    padded = torch.nn.functional.pad(pixels[0, 0], [2] * 4)
    windows = padded.unfold(0, 5, 1).unfold(1, 5, 1).flatten(0, 1)
    counts = (found[:, 0, None] == windows[None]).flatten(2).all(2).sum(0)
    assert counts.sum() == 3000
    assert counts.shape == (42,)
    assert counts.min() > 3000 / 42 * 0.5
    assert counts.max() < 3000 / 42 * 1.5


def test_a_random_crop_may_lie_in_the_black_alone() -> None:
    pixels = torch.full((300, 1, 3, 4), 7, dtype=torch.uint8)
    found = RandomCrop(2, padding=5)({"image": pixels}, draws(300))["image"]
    assert {*found.flatten(1).sum(1).tolist()} == {0, 7, 14, 28}


def test_a_short_side_crop_draws_the_side_and_then_the_place() -> None:
    """The image is a slope: a pixel tells where it was, the difference of two the scale."""
    slope = np.broadcast_to(np.arange(0, 200, 10, dtype=np.uint8)[None, :, None], (10, 20, 3))
    batch = {"image": [encoded(slope)] * 600}
    found = ShortSideCrop(8, (10, 12))(batch, draws(600))["image"]
    assert found.shape == (600, 3, 8, 8)
    lengths = draws(600).integers("ShortSideCrop image side", 10, 13)
    assert {*lengths.tolist()} == {10, 11, 12}
    image = batch["image"][0].decode()
    for row, length in list(zip(found, lengths.tolist(), strict=True))[:50]:
        whole = resized(image, length, 2 * length)
        windows = whole.unfold(1, 8, 1).unfold(2, 8, 1).movedim(0, 2).flatten(0, 1)
        assert (windows == row).flatten(1).all(1).any()


def test_a_short_side_crop_may_take_the_middle() -> None:
    image = some_images(1)[0]
    found = ShortSideCrop(7, (12, 12), place="middle", resize="bilinear")({"image": [image]}, draws(1))["image"]
    assert torch.equal(found[0], resized(image.decode(), 12, 36, "bilinear")[:, 2:9, 14:21])


@pytest.mark.parametrize("resize", ["antialiased", "nearest"])
@pytest.mark.parametrize("shape", [(3000, 1, 3), (1, 3000, 3)])
def test_an_image_whose_other_side_would_become_too_long_is_refused(shape: tuple[int, ...], resize: str) -> None:
    """A small file may ask for gigabytes: 1 x 3000 pixels become 224 x 672000."""
    images = [encoded(GOLDEN["image"], "usual.png"), encoded(np.zeros(shape, np.uint8), "thin.png")]
    crop = ShortSideCrop(224, (224, 224), resize=resize)
    with pytest.raises(DataError, match=r"thin\.png is too thin to be resized") as raised:
        crop({"image": images}, draws(2))
    assert raised.value.given == f"{shape[0]} rows and {shape[1]} columns, for a short side of 224 pixels"
    assert raised.value.expected == "at most 100000000 pixels once it is resized"
    assert crop({"image": images[:1]}, draws(1))["image"].shape == (1, 3, 224, 224)
    with pytest.raises(DataError, match="An image is too thin"):
        crop({"image": torch.zeros(2, 1, 1, 3000)}, draws(2))


def test_the_limit_of_pixels_once_resized_is_that_of_decoding() -> None:
    image = replace(some_images(1)[0], decoding=Decoding("pillow", max_pixels=12 * 36 - 1))
    with pytest.raises(DataError, match="at most 431 pixels once it is resized"):
        ShortSideCrop(7, (12, 12))({"image": [image]}, draws(1))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 20))
def test_cropping_and_padding_keeps_the_middle(height: int, width: int, size: int) -> None:
    image = torch.randint(1, 255, (1, 1, height, width), generator=torch.Generator().manual_seed(0))
    found = CropOrPad(size)({"image": image}, draws(1))["image"]
    assert found.shape == (1, 1, size, size)
    assert (found > 0).sum() == min(height, size) * min(width, size)
    wide = CropOrPad(max(height, width) + 3)({"image": image}, draws(1))["image"]
    if height % 2 == width % 2 == size % 2 == wide.shape[2] % 2:
        assert torch.equal(CropOrPad(size)({"image": wide}, draws(1))["image"], found)


@pytest.mark.parametrize("padding", [0, 3])
def test_an_image_too_small_for_a_crop_is_named(padding: int) -> None:
    images = [encoded(GOLDEN["image"], "large.png"), encoded(GOLDEN["image"][:3], "small.png")]
    with pytest.raises(DataError, match=r"small\.png is too small") as raised:
        RandomCrop(10, padding=padding)({"image": images}, draws(2))
    assert f"3 rows and 14 columns, with {padding} more at each side" in str(raised.value)
    with pytest.raises(DataError, match="An image is too small"):
        RandomCrop(10)({"image": torch.zeros(2, 1, 12, 4)}, draws(2))


@pytest.mark.parametrize("augment", [CropOrPad(4), RandomCrop(4), ShortSideCrop(4, (4, 5))], ids=repr)
def test_crops_refuse_fields_without_images(augment: Augment) -> None:
    with pytest.raises(InputError, match=f"{type(augment).__name__} finds no images"):
        augment({"image": torch.zeros(3, 8, 8)}, draws(3))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CropOrPad(0), "size is out of range"),
        (lambda: CropOrPad(8.5), "size is of the wrong type"),  # type: ignore[arg-type]
        (lambda: RandomCrop(0), "size is out of range"),
        (lambda: RandomCrop(8, padding=-1), "padding is out of range"),
        (lambda: ShortSideCrop(8, (7, 9)), "short_side is out of range"),
        (lambda: ShortSideCrop(8, (9, 8)), "short_side is out of range"),
        (lambda: ShortSideCrop(8, (8.5, 9)), r"short_side\[0\] is of the wrong type"),  # type: ignore[arg-type]
        (lambda: ShortSideCrop(8, place="left"), "place cannot be 'left'"),
        (lambda: ShortSideCrop(8, resize="random"), "resize cannot be 'random'"),
        (lambda: ShortSideCrop(224, 256), "short_side is of the wrong type"),  # type: ignore[arg-type]
        (lambda: ShortSideCrop(224, (256,)), "short_side is of the wrong length"),  # type: ignore[arg-type]
    ],
)
def test_parameters_of_crops_out_of_range_are_refused(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()
