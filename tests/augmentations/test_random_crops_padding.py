from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from augmented import BOXES, batch_of, draws_of, noise, png

from lockstep.augmentations import (
    RandomAbsolutePadImage,
    RandomCropPadImage,
    RandomPadImage,
    RandomPadToAspectRatio,
    RandomSquareCropByScale,
)
from lockstep.errors import DataError, InputError
from lockstep.images.decode import EncodedImage
from lockstep.images.objects import areas_of


def test_images_grow_to_less_than_twice_their_size_and_their_objects_shrink() -> None:
    count = 100
    image = noise(20, 30)
    after = RandomPadImage()(batch_of(*[image] * count), draws_of(count))
    sides = np.array([padded.shape[1:] for padded in after["image"]])
    assert sides.min(0).tolist() == [20, 30]
    assert [38, 57] < sides.max(0).tolist() <= [39, 59]
    mean = image.float().mean((1, 2)).round().to(torch.uint8)
    for padded, boxes in zip(after["image"], after["boxes"], strict=True):
        grown = padded.shape[1] * padded.shape[2] / 600
        torch.testing.assert_close(areas_of(boxes) * grown, areas_of(BOXES))
        top, left = (boxes[1, :2] * torch.tensor(padded.shape[1:]) - torch.tensor([5.0, 15])).round().int().tolist()
        assert torch.equal(padded[:, top : top + 20, left : left + 30], image)
        rest = padded.clone()
        rest[:, top : top + 20, left : left + 30] = mean[:, None, None]
        assert (rest == mean[:, None, None]).all()


def test_the_most_is_never_reached_and_wins_over_the_least() -> None:
    batch = batch_of(*[noise(4, 4)] * 50)
    after = RandomPadImage(6, 9, 8, 7)(batch, draws_of(50))
    assert {image.shape[1] for image in after["image"]} == {6, 7}
    assert {image.shape[2] for image in after["image"]} == {7}


def test_images_grow_by_less_than_so_many_pixels() -> None:
    image = noise(4, 5)
    batch = batch_of(*[image] * 60)
    after = RandomAbsolutePadImage(3, 2, (0.0, 0.0, 9.0))(batch, draws_of(60))
    assert {image.shape[1] for image in after["image"]} == {4, 5, 6}
    assert {image.shape[2] for image in after["image"]} == {5, 6}
    for padded in after["image"]:
        rest = padded.sum((1, 2)) - image.sum((1, 2))
        assert rest.tolist() == [0, 0, 9 * (padded[0].numel() - 20)]
    (same,) = RandomAbsolutePadImage()(batch_of(png(noise(4, 5))), draws_of(1))["image"]
    assert isinstance(same, EncodedImage)


def test_a_size_of_its_own_stays_as_it_is() -> None:
    image = png(noise(4, 4))
    (same,) = RandomPadImage(4, 4, 4, 4)(batch_of(image), draws_of(1))["image"]
    assert same is image


def test_colours_are_rounded_in_bytes_and_kept_in_floats() -> None:
    image = noise(2, 2)
    for kind, expected in ((torch.uint8, [8, 0, 255]), (torch.float32, [7.6, 0, 255])):
        (after,) = RandomPadImage(5, 5, 5, 5, (7.6, 0, 255))(batch_of(image.to(kind)), draws_of(1))["image"]
        assert after.dtype == kind
        torch.testing.assert_close(after[:, -1, -1], torch.tensor(expected, dtype=kind))
    grey = noise(2, 2, 1).float()
    (after,) = RandomPadImage(5, 5, 5, 5)(batch_of(grey), draws_of(1))["image"]
    assert after[0, -1, -1] == grey.mean()
    with pytest.raises(InputError, match="another number of channels than pad_color"):
        RandomPadImage(5, 5, 5, 5, (1, 2, 3))(batch_of(grey), draws_of(1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_image_height": 9}, "min_image_height and min_image_width go together"),
        ({"max_image_width": 9}, "max_image_height and max_image_width go together"),
        ({"pad_color": (1.0, 2.0)}, "pad_color is of the wrong length"),
        ({"pad_color": (1.0, 2.0, 256.0)}, "out of range"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RandomPadImage(**fields)


@pytest.mark.parametrize("field", ["min_padded_size_ratio", "max_padded_size_ratio", "pad_color"])
def test_lists_have_their_lengths(field: str) -> None:
    with pytest.raises(InputError, match=f"{field} is of the wrong length"):
        RandomCropPadImage(**{field: (1.0,)})


def test_a_crop_is_padded_in_proportion_to_the_image_before() -> None:
    count = 60
    crop_pad = RandomCropPadImage(0.1, max_area=0.3, min_padded_size_ratio=(1.0, 1.5), max_padded_size_ratio=(1.5, 2.0))
    after = crop_pad(batch_of(*[noise(20, 30)] * count), draws_of(count))
    sides = np.array([image.shape[1:] for image in after["image"]])
    assert sides.min(0).tolist() == [20, 45]
    assert sides.max(0).tolist() == [29, 59]
    assert (areas_of(after["boxes"].values) < 0.4).all()


def test_a_crop_is_padded_with_its_own_mean() -> None:
    image = torch.zeros(1, 20, 20, dtype=torch.uint8)
    image[:, :, 14:] = 200
    after = RandomCropPadImage(0.1, max_area=0.5)(batch_of(*[image] * 20), draws_of(20))["image"]
    is_crop = [(pixels == 0) | (pixels == 200) for pixels in after]
    means = [pixels[inside].float().mean().round() for pixels, inside in zip(after, is_crop, strict=True)]
    assert len({float(mean) for mean in means}) > 5
    for pixels, inside, mean in zip(after, is_crop, means, strict=True):
        assert (pixels[~inside] == mean).all()


def test_an_image_that_is_not_cropped_is_padded() -> None:
    batch = batch_of(*[noise(20, 30)] * 20)
    after = RandomCropPadImage(random_coef=1.0)(batch, draws_of(20))
    assert after["labels"].values.tolist() == [0, 1] * 20
    assert all((20, 30) <= tuple(image.shape[1:]) < (40, 60) for image in after["image"])
    assert any(tuple(image.shape[1:]) > (25, 35) for image in after["image"])


@pytest.mark.parametrize(
    ("augment", "sides", "size", "expected"),
    [
        (RandomPadToAspectRatio(2.0, max_padded_size_ratio=(1.0, 1.0)), (200, 200), (200, 400), None),
        (
            RandomPadToAspectRatio(1.0, max_padded_size_ratio=(1.0, 1.0)),
            (200, 400),
            (400, 400),
            [[0, 0.25, 0.375, 1], [0.125, 0.5, 0.375, 1]],
        ),
        (
            RandomPadToAspectRatio(1.0, (4.0, 4.0), (4.0, 4.0)),
            (200, 400),
            (800, 800),
            [[0, 0.125, 0.1875, 0.5], [0.0625, 0.25, 0.1875, 0.5]],
        ),
    ],
)
def test_black_is_added_below_and_at_the_right_to_an_aspect(
    augment: RandomPadToAspectRatio, sides: tuple[int, int], size: tuple[int, int], expected: list[list[float]] | None
) -> None:
    points = torch.tensor([[[0.5, 0.5]], [[torch.nan, torch.nan]]])
    batch = {**batch_of(png(noise(*sides)), keypoints=points), "masks": [noise(*sides, 2) % 2]}
    after = augment(batch, draws_of(1))
    (image,), (masks,) = after["image"], after["masks"]
    assert image.shape == (3, *size)
    assert torch.equal(image[:, : sides[0], : sides[1]], noise(*sides))
    assert image.sum() == noise(*sides).sum()
    assert torch.equal(masks[:, : sides[0], : sides[1]], noise(*sides, 2) % 2)
    assert masks.shape[1:] == size
    if expected:
        torch.testing.assert_close(after["boxes"].values, torch.tensor(expected))
    share = torch.tensor(sides) / torch.tensor(size) * 0.5
    torch.testing.assert_close(after["keypoints"].values[0, 0], share)


def test_a_thin_image_that_would_take_too_much_memory_is_named() -> None:
    thin = png(noise(1, 20_000))
    assert isinstance(thin, EncodedImage)
    with pytest.raises(DataError, match=r"photo\.png is too large for RandomPadToAspectRatio") as caught:
        RandomPadToAspectRatio()(batch_of(thin), draws_of(1))
    assert "1 rows and 20000 columns, which would become" in str(caught.value)


def square_crop(image: torch.Tensor, boxes: torch.Tensor, scale: float, y: int, x: int) -> tuple[Any, Any]:
    """`random_square_crop_by_scale` of the reference's core/preprocessor.py, after its numbers are drawn."""
    _, height, width = image.shape
    size = int(np.float32(scale) * np.float32(max(height, width)))
    top, left = y - size // 2, x - size // 2
    ymin, xmin = max(top, 0), max(left, 0)
    ymax, xmax = min(y + size // 2, height - 1), min(x + size // 2, width - 1)
    canvas = torch.zeros(3, size, size, dtype=image.dtype)
    part = image[:, ymin:ymax, xmin:xmax]
    canvas[:, ymin - top :, xmin - left :][:, : part.shape[1], : part.shape[2]] = part
    frame = (boxes * torch.tensor([height, width] * 2) - torch.tensor([top, left] * 2)) / size
    is_outside = (frame[:, :2] >= 1).any(1) | (frame[:, 2:] <= 0).any(1)
    return canvas, frame[~is_outside].clamp(0, 1)


def test_square_crops_are_those_of_the_reference() -> None:
    count, image = 300, noise(21, 30)
    boxes = torch.tensor([[0.1, 0.1, 0.4, 0.3], [0.5, 0.6, 0.9, 0.95], [0.0, 0.0, 1.0, 1.0]])
    files = [png(image) if number % 2 else image for number in range(count)]
    after = RandomSquareCropByScale(max_border=8)(batch_of(*files, boxes=boxes), draws_of(count))
    # A border of 8 is less than half of both sides; so the centres are those that the reference can draw.
    allowed = {
        (scale, y, x)
        for scale in np.linspace(0.6, 1.3, 8, dtype=np.float32)
        for y in range(8, 14)
        for x in range(8, 23)
    }
    known = {key: square_crop(image, boxes, *key) for key in allowed}
    drawn = set()
    for pixels, objects in zip(after["image"], after["boxes"], strict=True):
        (key,) = {
            key for key, (canvas, _) in known.items() if canvas.shape == pixels.shape and torch.equal(canvas, pixels)
        }
        torch.testing.assert_close(objects, known[key][1], atol=1e-6, rtol=0)
        drawn.add(key)
    assert [{key[axis] for key in drawn} for axis in range(3)] == [{key[axis] for key in allowed} for axis in range(3)]


@pytest.mark.parametrize(("side", "border"), [(300, 128), (256, 128), (255, 64), (128, 64), (100, 32), (2, 1), (1, 1)])
def test_the_border_of_square_crops_is_halved_until_a_centre_is_left(side: int, border: int) -> None:
    assert RandomSquareCropByScale()._border(np.array([[side, 300]])).tolist() == [[border, 128]]
    (after,) = RandomSquareCropByScale()(batch_of(noise(side, 4), boxes=BOXES[:0]), draws_of(1))["image"]
    assert after.shape[1] == after.shape[2]
