from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from augmented import BOXES, batch_of, draws_of, noise, png

from lockstep.augmentations import (
    RandomImageScale,
    RandomResizeMethod,
    RandomScaleCropAndPadToSquare,
    ResizeImage,
    ResizeToMinDimension,
)
from lockstep.augmentations.augment import Augment
from lockstep.errors import DataError, InputError
from lockstep.images.masks import dense_masks
from lockstep.images.resizing import LEGACY_METHODS, resized


def test_sizes_are_scaled_within_their_range_and_keep_their_aspect() -> None:
    count = 100
    batch = {**batch_of(*[noise(20, 40)] * count), "masks": [noise(20, 40, 2) % 2] * count}
    after = RandomImageScale()(batch, draws_of(count))
    sides = np.array([image.shape[1:] for image in after["image"]])
    assert sides[:, 0].min() == 10
    assert sides[:, 0].max() == 39
    assert (sides[:, 1] - 2 * sides[:, 0]).tolist() == np.clip(sides[:, 1] - 2 * sides[:, 0], 0, 1).tolist()
    assert [tuple(masks.shape[1:]) for masks in after["masks"]] == [tuple(side) for side in sides.tolist()]
    torch.testing.assert_close(after["boxes"].values, BOXES.repeat(count, 1))


def test_an_image_too_small_to_be_scaled_is_named() -> None:
    with pytest.raises(DataError, match=r"photo\.png is too small for RandomImageScale"):
        RandomImageScale(0.1, 0.2)(batch_of(png(noise(3, 9))), draws_of(1))
    with pytest.raises(InputError, match="min_scale_ratio is larger than max_scale_ratio"):
        RandomImageScale(2.0, 1.0)


def test_each_method_is_taken_as_often() -> None:
    image, count = noise(9, 7), 200
    after = RandomResizeMethod(15, 30)(batch_of(*[image] * count), draws_of(count))["image"]
    assert after.shape == (count, 3, 15, 30)
    known = [resized(image, 15, 30, method) for method in LEGACY_METHODS]
    counts = [sum(torch.equal(result, each) for result in after) for each in known]
    assert sum(counts) == count
    assert min(counts) > 30


@pytest.mark.parametrize(
    ("augment", "size"),
    [
        (ResizeImage(50, 100), (50, 100)),
        (ResizeToMinDimension(50), (50, 100)),
        (RandomResizeMethod(50, 100), (50, 100)),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("count", [0, 2])
def test_masks_are_resized_with_their_images(augment: Augment, size: tuple[int, int], count: int) -> None:
    masks = noise(15, 30, count) % 2
    for given in (masks, dense_masks(masks.numpy().astype(np.float32), 15, 30)):
        batch = {**batch_of(noise(15, 30), boxes=BOXES[:count]), "masks": [given]}
        after = augment(batch, draws_of(1))
        (image,), (found,) = after["image"], after["masks"]
        assert image.shape == (3, *size)
        pixels = found if isinstance(found, torch.Tensor) else found.decode()
        assert pixels.shape == (count, *size)
        if count:
            assert set(pixels.unique().tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("sides", "size"), [((60, 55), (60, 55)), ((15, 30), (50, 100)), ((30, 15), (100, 50)), ((50, 7), (357, 50))]
)
def test_the_short_side_is_enlarged_to_the_least(sides: tuple[int, int], size: tuple[int, int]) -> None:
    (image,) = ResizeToMinDimension(50)(batch_of(png(noise(*sides))), draws_of(1))["image"]
    assert image.shape == (3, *size)


@pytest.mark.parametrize(
    "augment", [ResizeImage(5, 6), ResizeToMinDimension(9)], ids=lambda value: type(value).__name__
)
def test_bytes_are_rounded_and_floats_are_not(augment: Augment) -> None:
    image = noise(4, 7)
    (floats,) = augment(batch_of(image.float()), draws_of(1))["image"]
    (rounded,) = augment(batch_of(image), draws_of(1))["image"]
    assert (floats != floats.round()).any()
    assert rounded.dtype == torch.uint8
    torch.testing.assert_close(rounded, floats.round().clamp(0, 255).to(torch.uint8))


def test_an_image_that_would_take_too_much_memory_is_named() -> None:
    with pytest.raises(DataError, match=r"photo\.png is too large for ResizeToMinDimension") as caught:
        ResizeToMinDimension()(batch_of(png(noise(1, 900))), draws_of(1))
    assert "1 rows and 900 columns, which would become 600 and 540000" in str(caught.value)


@pytest.mark.parametrize("fields", [{"new_height": 0}, {"method": "lanczos"}])
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        ResizeImage(**fields)


def scaled_square(image: Any, boxes: Any, masks: Any, size: int, scale: float, u: float, v: float) -> tuple[Any, ...]:
    """`random_scale_crop_and_pad_to_square` of the reference's core/preprocessor.py, after its numbers are drawn."""
    _, height, width = image.shape
    longest = np.float32(max(height, width))
    rows = int(np.float32(np.float32(scale) * np.float32(size)) * (np.float32(height) / longest))
    columns = int(np.float32(np.float32(scale) * np.float32(size)) * (np.float32(width) / longest))
    top, left = int(max(0.0, rows - size) * u), int(max(0.0, columns - size) * v)
    canvas = torch.zeros(3, size, size, dtype=image.dtype)
    part = resized(image, rows, columns, "bilinear")[:, top : top + size, left : left + size]
    canvas[:, : part.shape[1], : part.shape[2]] = part
    seen = (masks * 255).expand(3, -1, -1) if len(masks) == 1 else masks
    nearest = resized(seen.to(torch.uint8), rows, columns, "nearest")[:1, top : top + size, left : left + size]
    mask = torch.zeros(1, size, size, dtype=torch.uint8)
    mask[:, : nearest.shape[1], : nearest.shape[2]] = nearest // 255
    frame = (boxes * torch.tensor([rows, columns] * 2) - torch.tensor([top, left] * 2)) / size
    is_outside = (frame[:, :2] >= 1).any(1) | (frame[:, 2:] <= 0).any(1)
    return canvas, frame[~is_outside].clamp(0, 1), mask[: int((~is_outside).sum())]


@pytest.mark.parametrize("sides", [(20, 33), (40, 25)])
def test_scaled_squares_are_those_of_the_reference(sides: tuple[int, int]) -> None:
    count, image, boxes = 60, noise(*sides), torch.tensor([[0.1, 0.15, 0.6, 0.55]])
    masks = torch.zeros(1, *sides, dtype=torch.uint8)
    masks[:, sides[0] // 10 : 6 * sides[0] // 10, 2:9] = 1
    batch = {**batch_of(*[image] * count, boxes=boxes), "masks": [masks] * count}
    after = RandomScaleCropAndPadToSquare(24, 0.3, 2.5)(batch, draws_of(count))
    assert after["image"].shape == (count, 3, 24, 24)
    column, draws = "RandomScaleCropAndPadToSquare image", draws_of(count)
    scales = 0.3 + draws.uniform(f"{column} scale") * 2.2
    offsets = [draws.uniform(f"{column} offset {axis}") for axis in ("rows", "columns")]
    for row, (scale, u, v) in enumerate(zip(scales, *offsets, strict=True)):
        pixels, objects, mask = scaled_square(image, boxes, masks, 24, scale, u, v)
        assert torch.equal(after["image"][row], pixels)
        torch.testing.assert_close(after["boxes"][row], objects, atol=1e-6, rtol=0)
        assert torch.equal(after["masks"][row], mask)
    assert scales.min() < 0.5 < 2 < scales.max()


def test_a_thin_image_keeps_a_pixel_and_a_huge_square_is_refused() -> None:
    (after,) = RandomScaleCropAndPadToSquare(8, 0.1, 0.2)(batch_of(noise(1, 90)), draws_of(1))["image"]
    assert after.shape == (3, 8, 8)
    with pytest.raises(InputError, match="scale_min is larger than scale_max"):
        RandomScaleCropAndPadToSquare(8, 2.0, 1.0)
