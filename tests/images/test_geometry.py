"""Augmentations that move what is on an image refuse the places of objects, which they would leave where they were."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.errors import InputError
from lockstep.images.augment import Augment, HorizontalFlip, RandomShift
from lockstep.images.auto_augment import RandAugment, TrivialAugmentWide
from lockstep.images.colour import ColourDraws
from lockstep.images.crops import CropOrPad, RandomCrop, ShortSideCrop
from lockstep.images.decode import Decoding, EncodedImage
from lockstep.images.erasing import RandomErasing
from lockstep.images.resized_crops import CentralCrop, Decode, DistortedCrop, RandomResizedCrop, Resize
from lockstep.randomness import Draws

CROPS: list[Augment] = [
    DistortedCrop(4),
    RandomResizedCrop(4),
    CentralCrop(4),
    CropOrPad(4),
    RandomCrop(4),
    ShortSideCrop(4, (5, 6)),
]
OTHERS: list[Augment] = [HorizontalFlip(), RandomShift(1), RandAugment(), TrivialAugmentWide()]
STAYING: list[Augment] = [RandomErasing(), ColourDraws()]
BOXES = [torch.tensor([[0.1, 0.2, 0.5, 0.6]])] * 2
OBJECTS: dict[str, Any] = {
    "boxes": BOXES,
    "masks": [object()] * 2,
    "keypoints": [torch.zeros(1, 3, 2)] * 2,
    "keypoint_visibility": [torch.ones(1, 3)] * 2,
    "area": [torch.tensor([40.0])] * 2,
}
WITHOUT_PLACES: dict[str, Any] = {
    "label": torch.arange(2),
    "labels": [torch.tensor([3])] * 2,
    "difficult": [torch.tensor([True])] * 2,
    "is_crowd": [torch.tensor([False])] * 2,
    "class_text": [["cat"]] * 2,
    "source_id": ["5", "6"],
}


def draws(count: int = 2) -> Draws:
    return Draws(0, np.arange(count))


def given_to(augment: Augment, count: int = 2) -> dict[str, Any]:
    """The images that an augmentation takes."""
    if type(augment) not in {Decode, Resize, *map(type, CROPS)}:
        return {"image": torch.full((count, 3, 6, 8), 9, dtype=torch.uint8)}
    written = io.BytesIO()
    Image.new("RGB", (8, 6)).save(written, "PNG")
    return {"image": [EncodedImage(written.getvalue(), "black.png", Decoding("pillow"))] * count}


@pytest.mark.parametrize("field", OBJECTS)
@pytest.mark.parametrize("augment", [*CROPS, *OTHERS], ids=repr)
def test_places_of_objects_are_refused_by_what_moves_them(augment: Augment, field: str) -> None:
    batch = {**given_to(augment), **WITHOUT_PLACES, field: OBJECTS[field]}
    with pytest.raises(InputError, match=f"{type(augment).__name__} would leave {field} where ") as raised:
        augment(batch, draws())
    assert raised.value.expected.startswith("no places of objects on the images, none of boxes, masks, ")
    kept = '["image", "label", "labels", "difficult", "is_crowd", "class_text", "source_id"]'
    assert raised.value.hint == f"read the fields wanted alone: ls.data.OnlyFields(reader, {kept})"


def test_all_of_them_are_named() -> None:
    batch = {"image": torch.zeros(2, 3, 6, 8), **OBJECTS}
    with pytest.raises(InputError, match="would leave boxes, masks, keypoints, keypoint_visibility, area where "):
        HorizontalFlip()(batch, draws())


@pytest.mark.parametrize("augment", [*CROPS, *OTHERS], ids=repr)
def test_what_has_no_place_stays(augment: Augment) -> None:
    found = augment({**given_to(augment), **WITHOUT_PLACES, "area": torch.ones(2)}, draws())
    assert [*found] == ["image", *WITHOUT_PLACES, "area"]
    assert all(found[name] is value for name, value in WITHOUT_PLACES.items())


@pytest.mark.parametrize("augment", [*STAYING, Decode(), Resize(4)], ids=repr)
def test_what_moves_nothing_leaves_them(augment: Augment) -> None:
    """Shares of height and width are right at any size."""
    found = augment({**given_to(augment), **OBJECTS}, draws())
    assert all(found[name] is value for name, value in OBJECTS.items())


def test_the_boxes_that_a_crop_is_drawn_by_are_taken_out_and_the_rest_is_refused() -> None:
    crop = DistortedCrop(4, boxes_field="boxes")
    assert [*crop({**given_to(crop), **WITHOUT_PLACES, "boxes": BOXES}, draws())] == ["image", *WITHOUT_PLACES]
    with pytest.raises(
        InputError, match="Crop would leave masks, keypoints, keypoint_visibility, area where"
    ) as raised:
        crop({**given_to(crop), **OBJECTS}, draws())
    assert raised.value.hint.endswith('OnlyFields(reader, ["image", "boxes"])')


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
