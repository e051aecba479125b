"""The resizers before a detector, with the sizes of the object detection API's own tests."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.errors import InputError
from lockstep.images.decode import EncodedImage
from lockstep.images.masks import dense_masks
from lockstep.images.resizing import resized
from lockstep.ragged import Ragged
from lockstep.randomness import Draws

DRAWS = Draws(0, np.arange(2))


def batch_of(*sizes: tuple[int, int], dtype: torch.dtype = torch.uint8) -> dict[str, Any]:
    """Images of these heights and widths, each with an object in its lower half."""
    torch.manual_seed(0)
    masks = [np.concatenate([np.zeros((1, h // 2, w)), np.ones((1, h - h // 2, w))], axis=1) for h, w in sizes]
    boxes = [torch.tensor([[0.5, 0.0, 1.0, 1.0]]) for _ in sizes]
    return {
        "image": [torch.randint(0, 256, (3, *size)).to(dtype) for size in sizes],
        "boxes": Ragged.of(boxes),
        "labels": Ragged.of([torch.tensor([1])] * len(sizes)),
        "area": Ragged.of([torch.tensor([h * w / 2]) for h, w in sizes]),
        "masks": [dense_masks(each.astype(np.float32), *size) for each, size in zip(masks, sizes, strict=True)],
    }


@pytest.mark.parametrize("method", ["bilinear", "nearest", "antialiased"])
def test_images_of_any_size_become_those_of_one_and_objects_follow(method: str) -> None:
    given = batch_of((4, 10), (8, 6))
    made = FixedShapeResizer(12, 20, method)(given, DRAWS)
    assert made["image"].shape == (2, 3, 12, 20)
    for image, before in zip(made["image"], given["image"], strict=True):
        assert torch.equal(image, resized(before, 12, 20, method))
    assert torch.equal(made["boxes"].values, given["boxes"].values)
    assert made["area"].values.tolist() == [120, 120]
    for masks in made["masks"]:
        assert masks.decode().sum(dim=(1, 2)).tolist() == [120]
        assert masks.decode()[0, 6:].all()


def test_image_files_are_decoded() -> None:
    file = BytesIO()
    Image.new("RGB", (6, 4), (255, 0, 0)).save(file, "PNG")
    made = FixedShapeResizer(2, 3)({"image": [EncodedImage(file.getvalue(), "a.png")]}, DRAWS)
    assert made["image"][0, :, 0, 0].tolist() == [255, 0, 0]
    assert made["image"].shape == (1, 3, 2, 3)


@pytest.mark.parametrize("method", ["bicubic", "antialiased"])
def test_fractions_stay_fractions(method: str) -> None:
    made = FixedShapeResizer(5, 7, method)(batch_of((4, 10), dtype=torch.float32), DRAWS)["image"]
    assert made.dtype == torch.float32
    assert not torch.equal(made, made.round())


@pytest.mark.parametrize(
    ("size", "expected"), [((60, 40), (75, 50)), ((15, 30), (50, 100)), ((15, 50), (30, 100)), ((50, 50), (50, 50))]
)
def test_the_short_side_decides_unless_the_long_one_grows_too_long(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    made = KeepAspectRatioResizer(50, 100)(batch_of(size), DRAWS)
    assert [image.shape for image in made["image"]] == [(3, *expected)]
    assert torch.equal(made["boxes"][0], torch.tensor([[0.5, 0, 1, 1]]))


@pytest.mark.parametrize("side", [312, 299])
def test_both_sides_may_be_one(side: int) -> None:
    assert KeepAspectRatioResizer(320, 320).size_of(side, side) == (320, 320)


def test_a_padded_image_is_in_the_upper_left_corner_and_its_objects_with_it() -> None:
    resizer = KeepAspectRatioResizer(5, 10, pad_to_max_dimension=True, per_channel_pad_value=(1, 2, 3))
    given = batch_of((4, 8), (6, 6))
    made = resizer(given, DRAWS)
    assert made["image"].shape == (2, 3, 10, 10)
    assert torch.equal(made["image"][0, :, :5], resized(given["image"][0], 5, 10, "bilinear"))
    assert made["image"][0, :, 5:].flatten(1).unique(dim=1).tolist() == [[1], [2], [3]]
    assert made["image"][1, :, 9, 9].tolist() == [1, 2, 3]
    torch.testing.assert_close(made["boxes"][0], torch.tensor([[0.25, 0, 0.5, 1]]))
    torch.testing.assert_close(made["boxes"][1], torch.tensor([[0.25, 0, 0.5, 0.5]]))
    assert made["masks"][1].decode().shape == (1, 10, 10)
    assert not made["masks"][1].decode()[0, 5:].any()


def test_a_short_side_beyond_the_long_one_is_refused() -> None:
    with pytest.raises(InputError, match="larger than its long side"):
        KeepAspectRatioResizer(200, 100)
