from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pixels_golden import IMAGES, some_draws

from lockstep.augmentations.augment import Augment, turns
from lockstep.augmentations.boxes import RandomJitterBoxes
from lockstep.augmentations.colours import (
    NormalizeImage,
    RandomAdjustBrightness,
    RandomAdjustContrast,
    RandomAdjustHue,
    RandomAdjustSaturation,
    RandomDistortColor,
    RandomRgbToGray,
    SubtractChannelMean,
)
from lockstep.augmentations.lists import DeferredColours, deferred
from lockstep.augmentations.pixels import RandomBlackPatches, RandomPixelValueScale
from lockstep.augmentations.random_crops import RandomCropImage, RandomCropToAspectRatio, RandomPadImage, SsdRandomCrop
from lockstep.augmentations.turns import HorizontalFlip, RandomRotation90
from lockstep.augmentations.zoom import RandomIoUCrop, ScaleJitter
from lockstep.ragged import Ragged

BRIGHTNESS, CONTRAST = RandomAdjustBrightness(), RandomAdjustContrast()
FLIP, PATCHES, NOISE, CROP = HorizontalFlip(), RandomBlackPatches(), RandomPixelValueScale(), RandomCropImage()
COLOURS: list[Augment] = [
    BRIGHTNESS,
    CONTRAST,
    RandomAdjustHue(),
    RandomAdjustSaturation(),
    RandomDistortColor(),
    RandomRgbToGray(probability=0.5),
    NormalizeImage(0, 255, 0, 200),
    SubtractChannelMean((3.0, 2.0, 1.0)),
]
OTHERS: list[Augment] = [
    FLIP,
    PATCHES,
    NOISE,
    CROP,
    RandomRotation90(),
    RandomCropToAspectRatio(aspect_ratio=0.7),
    SsdRandomCrop(),
    RandomIoUCrop(),
    RandomPadImage(pad_color=(7, 7, 7)),
    RandomJitterBoxes(),
    ScaleJitter(target_size=(9, 9)),
]


def with_objects(images: Any) -> dict[str, Any]:
    boxes = torch.tensor([[[0.2, 0.1, 0.8, 0.9]]]).repeat(len(images), 1, 1)
    return {"image": images, "boxes": Ragged.of([*boxes]), "labels": Ragged.of([torch.tensor([1])] * len(images))}


def augmented(augmentations: Sequence[Augment], batch: dict[str, Any]) -> dict[str, Any]:
    """As a loader does it."""
    for augment, turn in zip(augmentations, turns(augmentations), strict=True):
        batch = augment(batch, some_draws(len(batch["image"])).again(turn))
    return batch


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*COLOURS, *OTHERS]), max_size=6), st.booleans())
def test_a_list_that_is_split_gives_the_same_images(augmentations: list[Augment], one_size: bool) -> None:
    images = IMAGES if one_size else [IMAGES[0], IMAGES[3, :, :5, :7], IMAGES[4]]
    expected = augmented(augmentations, with_objects(images))["image"]
    in_loader, colours = deferred(augmentations)
    result = colours.apply(augmented(in_loader, with_objects(images)))
    assert isinstance(result, torch.Tensor) == isinstance(expected, torch.Tensor)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("augmentations", "kept", "waiting"),
    [
        ([], [], ()),
        ([PATCHES], [PATCHES], ()),
        ([BRIGHTNESS, FLIP], [FLIP], (BRIGHTNESS,)),
        ([CONTRAST, FLIP, BRIGHTNESS], [FLIP], (CONTRAST, BRIGHTNESS)),
        ([BRIGHTNESS, CROP, FLIP], [CROP, FLIP], (BRIGHTNESS,)),
        ([BRIGHTNESS, CONTRAST, CROP], [BRIGHTNESS, CONTRAST, CROP], ()),
        ([BRIGHTNESS, PATCHES], [BRIGHTNESS, PATCHES], ()),
        ([BRIGHTNESS, PATCHES, BRIGHTNESS], [BRIGHTNESS, PATCHES], (BRIGHTNESS,)),
        ([BRIGHTNESS, NOISE, FLIP, CONTRAST, CONTRAST], [BRIGHTNESS, NOISE, FLIP], (CONTRAST, CONTRAST)),
    ],
)
def test_a_colour_waits_if_all_that_follows_leaves_it_the_same(
    augmentations: list[Augment], kept: list[Augment], waiting: tuple[Augment, ...]
) -> None:
    in_loader, colours = deferred(augmentations)
    assert colours.options == waiting
    assert in_loader == kept + [colours] * bool(waiting)


def test_an_equal_colour_that_waits_draws_its_own_numbers() -> None:
    _, colours = deferred([BRIGHTNESS, PATCHES, BRIGHTNESS])
    assert colours.repeats == (1,)
    drawn = colours({"image": IMAGES}, some_draws(6))[colours.into]
    assert torch.equal(drawn, BRIGHTNESS.numbers(some_draws(6).again(1)))


def test_images_that_were_not_augmented_stay_as_they_are() -> None:
    assert DeferredColours((CONTRAST,), (0,)).apply({"image": IMAGES}) is IMAGES


def test_a_batch_is_coloured_as_its_images_are() -> None:
    _, colours = deferred(COLOURS)
    batch = colours({"image": IMAGES}, some_draws(6))
    one_by_one = colours.apply({**batch, "image": [*IMAGES]})
    assert torch.equal(torch.as_tensor(colours.apply(batch)), torch.stack([*one_by_one]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_the_same_colours() -> None:
    _, colours = deferred(COLOURS)
    batch = colours({"image": IMAGES}, some_draws(6))
    on_gpu = colours.apply({name: value.cuda() for name, value in batch.items()})
    assert isinstance(on_gpu, torch.Tensor)
    torch.testing.assert_close(on_gpu.cpu(), colours.apply(batch), rtol=0, atol=1e-2)
