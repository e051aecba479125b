"""What holds for every augmentation of images with objects on them, whatever it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.augmentations.augment import Augment, num_partners
from lockstep.augmentations.lists import AUGMENTATIONS
from lockstep.augmentations.random_crops import (
    SsdRandomCrop,
    SsdRandomCropFixedAspectRatio,
    SsdRandomCropFixedAspectRatioOperation,
    SsdRandomCropOperation,
    SsdRandomCropPad,
    SsdRandomCropPadFixedAspectRatio,
    SsdRandomCropPadOperation,
)
from lockstep.images.objects import object_fields
from lockstep.ragged import Ragged
from lockstep.randomness import Draws
from lockstep.recipes.recipe import CLASSES_OF
from lockstep.recipes.toml import FieldPath, read, write

SWAPPED = (1, 0)
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "HorizontalFlip": {"keypoint_flip_permutation": SWAPPED},
    "RandomVerticalFlip": {"keypoint_flip_permutation": SWAPPED},
    "FixedSizeCrop": {"size": (8, 9)},
    "Mosaic": {"size": 12},
    "NormalizeImage": {"original_minval": 0.0, "original_maxval": 255.0},
    "ScaleJitter": {"target_size": (10, 12)},
    "SubtractChannelMean": {"means": (1.0, 2.0, 3.0)},
    "RandomResizeMethod": {"target_height": 9, "target_width": 7},
    "RandomScaleCropAndPadToSquare": {"output_size": 11},
    "ResizeImage": {"new_height": 9, "new_width": 14},
    "ResizeToMinDimension": {"min_dimension": 7},
    "RetainBoxesAboveThreshold": {"threshold": 0.5},
}
"""Of the classes that need arguments, or whose default is a large image."""

OPERATION = {"min_object_covered": 0.2, "min_area": 0.2, "overlap_thresh": 0.5, "random_coef": 0.1}
VALUES: list[Augment] = [
    *(cls(**ARGUMENTS.get(cls.__name__, {})) for cls in AUGMENTATIONS),
    SsdRandomCrop((SsdRandomCropOperation(**OPERATION), SsdRandomCropOperation())),
    SsdRandomCropPad((SsdRandomCropPadOperation(**OPERATION, pad_color_r=9.0), SsdRandomCropPadOperation())),
    SsdRandomCropFixedAspectRatio((SsdRandomCropFixedAspectRatioOperation(**OPERATION),), aspect_ratio=1.5),
    SsdRandomCropPadFixedAspectRatio((SsdRandomCropOperation(**OPERATION),), aspect_ratio=0.7),
]
OF_SHARES = [value for value in VALUES if type(value).__name__ != "ScaleBoxesToPixelCoordinates"]
MOVES_BOXES_ALONE = ("RandomJitterBoxes", "ScaleBoxesToPixelCoordinates")
each_value = pytest.mark.parametrize("augment", VALUES, ids=lambda value: type(value).__name__)
each_of_shares = pytest.mark.parametrize("augment", OF_SHARES, ids=lambda value: type(value).__name__)
OF_BYTES = ("CopyPaste", "FixedSizeCrop", "MixUp", "Mosaic", "RandomIoUCrop", "RandomZoomOut", "ScaleJitter")
"""They take images of uint8 alone."""
OF_SCORES = ("ConvertClassLogitsToSoftmax", "RetainBoxesAboveThreshold")
"""They take objects with scores alone."""
few = settings(max_examples=5)

seeds = st.integers(0, 2**32 - 1)
counts = st.integers(0, 3)


def example(seed: int, kind: torch.dtype = torch.uint8) -> dict[str, Any]:
    """A batch of one image, and of objects whose boxes are those of their masks."""
    random = np.random.default_rng(seed)
    height, width = random.integers(2, 12, 2).tolist()
    count = int(random.integers(0, 4))
    edges = [
        np.sort([random.choice(side + 1, 2, replace=False) for _ in range(count)], axis=-1) for side in (height, width)
    ]
    pairs = np.stack([np.array(each, np.int64).reshape(-1, 2) for each in edges], axis=-1)  # (count, 2, 2)
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    for mask, (first, last) in zip(masks, pairs.tolist(), strict=True):
        mask[first[0] : last[0], first[1] : last[1]] = 1
    boxes = torch.from_numpy(pairs.reshape(-1, 4) / [height, width, height, width]).float()
    points = torch.from_numpy(random.random((count, 2, 2))).float()
    image = torch.from_numpy(random.integers(0, 256, (3, height, width)))
    columns = {
        "boxes": boxes,
        "labels": torch.from_numpy(random.integers(1, 9, count)),
        "weights": torch.from_numpy(random.random(count)).float(),
        "area": masks.sum((1, 2)).float(),
        "keypoints": points,
        "keypoint_visibility": torch.full((count, 2), 2),
        "multiclass_scores": torch.from_numpy(random.random((count, 5))).float(),
        "object_number": torch.arange(count),
    }
    return {"image": [image.to(kind)], "masks": [masks], **{name: Ragged.of([each]) for name, each in columns.items()}}


def joined(examples: list[dict[str, Any]]) -> dict[str, Any]:
    if not examples:
        return {name: value[0:0] for name, value in example(0).items()}
    return {
        name: [item for each in examples for item in each[name]]
        if isinstance(value, list)
        else Ragged.cat([each[name] for each in examples])
        for name, value in examples[0].items()
    }


def apply(augment: Any, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
    if not (count := num_partners(augment)):
        result: dict[str, Any] = augment(batch, draws)
        return result
    wanting = int(augment.needs_partners(draws).sum())
    partners = [joined([example(97 + number)] * wanting) for number in range(count)] if wanting else []
    result = augment(batch, draws, partners)
    return dict(result)


def draws_of(seed: int, count: int) -> Draws:
    return Draws(seed, np.arange(count))


@each_of_shares
@few
@given(seeds, counts)
def test_boxes_stay_boxes_within_the_image_and_columns_stay_in_step(augment: Augment, seed: int, count: int) -> None:
    batch = joined([example(seed + row) for row in range(count)])
    after = apply(augment, batch, draws_of(seed, count))
    boxes: Ragged = after["boxes"]
    assert ((boxes.values >= 0) & (boxes.values <= 1)).all()
    assert (boxes.values[:, 2:] >= boxes.values[:, :2]).all()
    points = after["keypoints"].values
    assert (points.isnan() | ((points >= 0) & (points <= 1))).all()
    for name in object_fields(after):
        lengths = [len(each) for each in after[name]]
        assert lengths == boxes.lengths.tolist(), name
    assert len(after["image"]) == count
    for image, masks in zip(after["image"], after["masks"], strict=True):
        assert masks.shape[1:] == image.shape[1:] if isinstance(masks, Tensor) else (masks.height, masks.width)


@each_value
@few
@given(seeds, counts)
def test_no_objects_come_but_from_partners(augment: Augment, seed: int, count: int) -> None:
    batch = joined([example(seed + row) for row in range(count)])
    after = apply(augment, batch, draws_of(seed, count))
    if not num_partners(augment):
        for before, kept in zip(batch["object_number"], after["object_number"], strict=True):
            assert kept.tolist() == sorted(set(kept.tolist()) & set(before.tolist()))


@each_value
@few
@given(seeds, st.integers(2, 3), st.sampled_from([torch.uint8, torch.float32]))
def test_an_example_depends_on_its_own_row_alone(augment: Augment, seed: int, count: int, kind: torch.dtype) -> None:
    """The same seed and position give the same result again, whatever else is in the batch."""
    kind = torch.uint8 if type(augment).__name__ in OF_BYTES else kind
    examples = [example(seed + row, kind) for row in range(count)]
    together = apply(augment, joined(examples), draws_of(seed, count))
    for row, each in enumerate(examples):
        alone = apply(augment, each, Draws(seed, np.array([row])))
        torch.testing.assert_close(alone["image"][0], together["image"][row], rtol=0, atol=0)
        for name in object_fields(alone):
            if name != "masks":
                torch.testing.assert_close(alone[name][0], together[name][row], rtol=0, atol=0, equal_nan=True)


@each_value
@few
@given(seeds)
def test_the_box_of_a_mask_is_the_box(augment: Augment, seed: int) -> None:
    if type(augment).__name__ in MOVES_BOXES_ALONE or num_partners(augment):
        return
    batch = example(seed)
    after = apply(augment, batch, draws_of(seed, 1))
    (masks,), (image,) = after["masks"], after["image"]
    sides = torch.tensor(image.shape[1:])
    zoom = max(1.0, *(sides / torch.tensor(batch["image"][0].shape[1:])).tolist())
    for mask, box in zip(masks if isinstance(masks, Tensor) else masks.decode(), after["boxes"][0], strict=True):
        places = mask.nonzero()
        if len(places):
            found = torch.cat([places.amin(0), places.amax(0) + 1])
            assert (found - box * sides.repeat(2)).abs().max() <= zoom + 1e-4


@each_value
def test_images_without_objects_and_batches_without_images(augment: Augment) -> None:
    if num_partners(augment) or type(augment).__name__ in OF_SCORES:
        return
    images = [example(row)["image"][0] for row in range(3)]
    assert len(augment({"image": images}, draws_of(0, 3))["image"]) == 3
    assert len(augment({"image": torch.zeros(2, 3, 8, 8, dtype=torch.uint8)}, draws_of(0, 2))["image"]) == 2
    assert len(augment(joined([]), draws_of(0, 0))["image"]) == 0


@each_value
def test_an_augmentation_is_a_value_that_a_recipe_can_hold(augment: Augment) -> None:
    hint, path = tuple[Augment, ...], FieldPath("recipe", "augment")
    written = write(hint, (augment,), path)
    assert read(hint, written, path) == (augment,)
    assert type(augment)(**vars(augment)) == augment
    assert repr(augment).startswith(type(augment).__name__)


def test_recipes_take_them_all() -> None:
    assert CLASSES_OF[Augment] == AUGMENTATIONS
    assert len(set(AUGMENTATIONS)) == len(AUGMENTATIONS)
