"""Lists of augmentations: what a recipe's list may name, and which of its colours wait for the device.

A colour that waits is split in two: its numbers are drawn where images are read, and applied on the device to the whole
batch. Nothing but rounding changes where all that comes after the colour leaves it the same: flips and turns leave any,
cuts those that look at a pixel alone. What fills in, resizes or joins images does not, so such a colour is computed in
its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lockstep.augmentations import boxes, colours, random_crops
from lockstep.augmentations.augment import Augment, Deferred, turns
from lockstep.augmentations.copy_paste import CopyPaste
from lockstep.augmentations.mixing import MixUp, Mosaic
from lockstep.augmentations.pixels import RandomBlackPatches, RandomPixelValueScale
from lockstep.augmentations.resizers import (
    RandomImageScale,
    RandomResizeMethod,
    RandomScaleCropAndPadToSquare,
    ResizeImage,
    ResizeToMinDimension,
)
from lockstep.augmentations.turns import HorizontalFlip, RandomRotation90, RandomVerticalFlip
from lockstep.augmentations.zoom import FixedSizeCrop, RandomIoUCrop, RandomZoomOut, ScaleJitter

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.randomness import Draws

AUGMENTATIONS: tuple[type, ...] = (
    HorizontalFlip,
    RandomVerticalFlip,
    RandomRotation90,
    RandomImageScale,
    boxes.RandomJitterBoxes,
    random_crops.RandomCropImage,
    random_crops.RandomPadImage,
    random_crops.RandomAbsolutePadImage,
    random_crops.RandomCropPadImage,
    random_crops.RandomCropToAspectRatio,
    random_crops.RandomPadToAspectRatio,
    random_crops.RandomSquareCropByScale,
    RandomResizeMethod,
    RandomScaleCropAndPadToSquare,
    ResizeImage,
    ResizeToMinDimension,
    boxes.ScaleBoxesToPixelCoordinates,
    boxes.RetainBoxesAboveThreshold,
    random_crops.SsdRandomCrop,
    random_crops.SsdRandomCropPad,
    random_crops.SsdRandomCropFixedAspectRatio,
    random_crops.SsdRandomCropPadFixedAspectRatio,
    colours.NormalizeImage,
    colours.SubtractChannelMean,
    colours.RgbToGray,
    colours.RandomRgbToGray,
    colours.RandomAdjustBrightness,
    colours.RandomAdjustContrast,
    colours.RandomAdjustHue,
    colours.RandomAdjustSaturation,
    colours.RandomDistortColor,
    RandomPixelValueScale,
    RandomBlackPatches,
    boxes.ConvertClassLogitsToSoftmax,
    CopyPaste,
    FixedSizeCrop,
    MixUp,
    Mosaic,
    RandomIoUCrop,
    RandomZoomOut,
    ScaleJitter,
)
"""All that the data of a detector may name in `augment`."""

_KEEP_THE_PIXELS = (
    HorizontalFlip,
    RandomVerticalFlip,
    RandomRotation90,
    boxes.RandomJitterBoxes,
    boxes.RetainBoxesAboveThreshold,
    boxes.ScaleBoxesToPixelCoordinates,
    boxes.ConvertClassLogitsToSoftmax,
)
"""They move each pixel to another place at most."""

_CUT = (
    random_crops.RandomCropImage,
    random_crops.RandomCropToAspectRatio,
    random_crops.SsdRandomCrop,
    random_crops.SsdRandomCropFixedAspectRatio,
    RandomIoUCrop,
)
"""They leave pixels out."""


@dataclass(frozen=True)
class DeferredColours(Deferred):
    """The last augmentation of a list: draws the numbers of the colours that wait, and computes these on the device."""

    options: tuple[colours.ColourOption, ...] = ()
    """The colours that wait, in their order."""
    repeats: tuple[int, ...] = ()
    """How many equal ones are before each of them in the list."""

    into: ClassVar[str] = f"{colours.IMAGE}.colours"
    """The field that the numbers are in: float32 (batch, numbers)."""

    def numbers(self, batch: Mapping[str, Any], draws: Draws) -> Tensor:
        """Draw the numbers of all options, side by side."""
        numbers = [option.numbers(draws.again(turn)) for option, turn in zip(self.options, self.repeats, strict=True)]
        return torch.cat(numbers, dim=1)

    def apply(self, batch: Mapping[str, Any]) -> Tensor | list[Tensor]:
        """Compute the colours of a batch on its device: float32 in the form of its images.

        These are decoded, 0 to 255: one tensor of shape (batch, channels, height, width), or a list. They stay as they
        are if the batch has no numbers: it was not augmented.
        """
        images: Tensor | list[Tensor] = batch[colours.IMAGE]
        numbers = batch.get(self.into)
        if numbers is None or not len(images):
            return images
        if isinstance(images, torch.Tensor) and images.device.type != "cpu":
            return colours.apply_colours(images, self.options, numbers)
        # One by one: on a CPU an image stays in its cache.
        rows = [
            colours.apply_colours(image[None], self.options, row[None])
            for image, row in zip(images, numbers, strict=True)
        ]
        return torch.cat(rows) if isinstance(images, torch.Tensor) else [row[0] for row in rows]


def deferred(augmentations: Sequence[Augment]) -> tuple[list[Augment], DeferredColours]:
    """Split a list of augmentations into what a loader does and the colours that wait.

        in_loader, colours = deferred(augmentations)
        loader = Loader(reader, augment=in_loader)
        images = colours.apply(batch)

    Returns:
        what the loader does, which ends with the drawing of numbers if a colour waits, and what is left to do.
    """
    kept: list[Augment] = []
    waiting: list[tuple[colours.ColourOption, int]] = []
    for augment, turn in reversed([*zip(augmentations, turns(augmentations), strict=True)]):
        if isinstance(augment, colours.ColourOption) and all(_leaves_the_same(augment, later) for later in kept):
            waiting.insert(0, (augment, turn))
        else:
            kept.insert(0, augment)
    last = DeferredColours(tuple(option for option, _ in waiting), tuple(turn for _, turn in waiting))
    return ([*kept, last] if waiting else kept), last


def _leaves_the_same(colour: colours.ColourOption, later: Augment) -> bool:
    return isinstance(later, _KEEP_THE_PIXELS) or (isinstance(later, _CUT) and not colour.looks_at_the_whole)
