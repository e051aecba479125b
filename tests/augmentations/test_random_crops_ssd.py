from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from augmented import BOXES, batch_of, draws_of, noise, png

from lockstep.augmentations import (
    RandomCropPadImage,
    SsdRandomCrop,
    SsdRandomCropFixedAspectRatio,
    SsdRandomCropPad,
    SsdRandomCropPadFixedAspectRatio,
)
from lockstep.augmentations.augment import Augment
from lockstep.augmentations.random_crops import (
    SsdRandomCropFixedAspectRatioOperation,
    SsdRandomCropOperation,
    SsdRandomCropPadOperation,
)
from lockstep.errors import InputError
from lockstep.images.decode import EncodedImage

ALL: list[Augment] = [
    SsdRandomCrop(),
    SsdRandomCropPad(),
    SsdRandomCropFixedAspectRatio(),
    SsdRandomCropPadFixedAspectRatio(),
]
COUNT = 64


def many(**columns: Any) -> dict[str, Any]:
    return batch_of(*[noise(40, 60, seed=row) for row in range(COUNT)], **columns)


@pytest.mark.parametrize("augment", ALL, ids=lambda value: type(value).__name__)
def test_all_that_belongs_to_an_object_stays_with_it(augment: Augment) -> None:
    boxes = torch.rand(5, 2, 2).sort(1).values.reshape(5, 4)
    scores = torch.arange(15.0).view(5, 3)
    batch = many(boxes=boxes, multiclass_scores=scores, label_scores=scores[:, 0], keypoints=torch.rand(5, 2, 2))
    after = augment({**batch, "masks": [noise(40, 60, 5) % 2] * COUNT}, draws_of(COUNT))
    assert 0 < len(after["boxes"].values) < 5 * COUNT
    labels = after["labels"].values
    assert torch.equal(after["multiclass_scores"].values, scores[labels])
    assert torch.equal(after["label_scores"].values, scores[labels, 0])
    assert after["keypoints"].values.shape == (len(labels), 2, 2)
    for image, masks, own in zip(after["image"], after["masks"], after["labels"], strict=True):
        assert masks.shape == (len(own), *image.shape[1:])


def test_one_image_in_seven_stays_as_it_is_and_the_others_are_cropped() -> None:
    draws = draws_of(2000)
    images = torch.arange(40 * 60).view(1, 40, 60).expand(2000, 1, 40, 60)
    after = SsdRandomCrop()({**batch_of(*images), "image": images}, draws)
    chosen = draws.integers("SsdRandomCrop image operation", 0, 7)
    assert min(Counter(chosen.tolist()).values()) > 230
    whole = np.array([image.shape == (1, 40, 60) for image in after["image"]])
    # For the smaller shares a window is always found; the larger ones take the whole image more often.
    assert 0.11 < whole[chosen < 3].mean() < 0.19


def test_the_operation_of_an_image_is_as_if_it_were_the_only_one() -> None:
    """Its numbers do not depend on the operation: that is why the crops of two lists can be compared."""
    small = SsdRandomCropOperation(0.1, 0.9, 1.1, 0.1, 0.2)
    large = SsdRandomCropOperation(0.1, 0.9, 1.1, 0.6, 0.9, overlap_thresh=1.0)
    chosen = draws_of(COUNT).integers("SsdRandomCrop image operation", 0, 2)
    both, *each = (
        SsdRandomCrop(operations)(many(), draws_of(COUNT)) for operations in ((small, large), (small,), (large,))
    )
    for row, number in enumerate(chosen.tolist()):
        assert torch.equal(both["image"][row], each[number]["image"][row])
        assert torch.equal(both["boxes"][row], each[number]["boxes"][row])
    areas = [image[0].numel() / 2400 for image in both["image"]]
    assert max(area for area, number in zip(areas, chosen, strict=True) if number == 0) <= 0.2
    assert all(0.6 <= area <= 0.9 or area == 1 for area, number in zip(areas, chosen, strict=True) if number == 1)


def test_crops_of_files_are_not_decoded() -> None:
    images = [png(noise(20, 30, seed=row)) for row in range(8)]
    for augment in (SsdRandomCrop(), SsdRandomCropFixedAspectRatio()):
        assert all(isinstance(image, EncodedImage) for image in augment(batch_of(*images), draws_of(8))["image"])


def test_padding_has_the_mean_of_the_crop_but_the_colour_of_an_operation() -> None:
    white = [torch.full((3, 20, 20), 250, dtype=torch.uint8)] * COUNT
    by_mean = SsdRandomCropPad()(batch_of(*white), draws_of(COUNT))["image"]
    assert {int(value) for image in by_mean for value in image.unique()} == {250}
    operation = SsdRandomCropPadOperation(0.1, pad_color_g=9.0, min_padded_size_ratio=(1.5, 1.5))
    for image in SsdRandomCropPad((operation,))(batch_of(*white), draws_of(COUNT))["image"]:
        assert min(image.shape[1:]) >= 30
        assert [set(channel.unique().tolist()) for channel in image] == [{0, 250}, {9, 250}, {0, 250}]


def test_one_operation_is_the_option_with_its_limits() -> None:
    limits: dict[str, Any] = {"min_object_covered": 0.3, "max_area": 0.6, "overlap_thresh": 0.2, "random_coef": 0.0}
    crop = RandomCropPadImage(**limits, min_aspect_ratio=0.5, max_aspect_ratio=2.0, pad_color=(0.0, 0.0, 0.0))
    one = SsdRandomCropPad((SsdRandomCropPadOperation(**limits),))
    draws = draws_of(COUNT)

    class Renamed(type(draws)):  # type: ignore[misc]
        def uniform(self, column: str) -> Any:
            return super().uniform(column.replace("SsdRandomCropPad", "RandomCropPadImage"))

        def columns(self, names: Any) -> Any:
            return super().columns([name.replace("SsdRandomCropPad", "RandomCropPadImage") for name in names])

    found, expected = one(many(), Renamed(0, draws.positions)), crop(many(), draws)
    assert all(map(torch.equal, found["image"], expected["image"]))
    assert torch.equal(found["boxes"].values, expected["boxes"].values)


def aspects(augment: Augment, boxes: torch.Tensor = BOXES) -> np.ndarray:
    images = augment(batch_of(*[noise(40, 60)] * COUNT, boxes=boxes), draws_of(COUNT))["image"]
    return np.array([image.shape[2] / image.shape[1] for image in images])


def test_crops_of_one_aspect_also_where_the_first_crop_was_left_out() -> None:
    operation = SsdRandomCropFixedAspectRatioOperation(random_coef=0.5)
    assert abs(aspects(SsdRandomCropFixedAspectRatio((operation,), 0.5)) - 0.5).max() < 0.03
    assert (aspects(SsdRandomCropFixedAspectRatio()) == 1).all()


def test_without_operations_the_aspect_is_1_whatever_is_given() -> None:
    assert (aspects(SsdRandomCropFixedAspectRatio(aspect_ratio=2.0)) == 1).all()
    assert abs(aspects(SsdRandomCropPadFixedAspectRatio(aspect_ratio=2.0)) - 2).max() < 0.2


def test_crops_are_padded_to_an_aspect_in_proportion_to_the_crop() -> None:
    operation = SsdRandomCropOperation(min_area=0.5, max_area=0.6)
    augment = SsdRandomCropPadFixedAspectRatio((operation,), 1.0, (2.0, 2.0), (2.0, 2.0))
    images = augment(many(), draws_of(COUNT))["image"]
    crops = SsdRandomCropPadFixedAspectRatio((operation,), 1.0, (1.0, 1.0), (1.0, 1.0))(many(), draws_of(COUNT))[
        "image"
    ]
    for image, crop in zip(images, crops, strict=True):
        assert image.shape[1] == image.shape[2] >= crop.shape[1]
        assert image.sum() == crop.sum()


def test_operations_are_checked() -> None:
    with pytest.raises(InputError, match="min_area is larger than max_area"):
        SsdRandomCropFixedAspectRatioOperation(min_area=0.5, max_area=0.1)
    with pytest.raises(InputError, match="min_padded_size_ratio is of the wrong length"):
        SsdRandomCropPadOperation(min_padded_size_ratio=(1.0,))  # type: ignore[arg-type]
