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

from lockstep.augmentations.augment import Augment, Deferred, turns
from lockstep.augmentations.boxes import (
    ConvertClassLogitsToSoftmax,
    RandomJitterBoxes,
    RetainBoxesAboveThreshold,
    ScaleBoxesToPixelCoordinates,
)
from lockstep.augmentations.colours import (
    IMAGE,
    ColourOption,
    NormalizeImage,
    RandomAdjustBrightness,
    RandomAdjustContrast,
    RandomAdjustHue,
    RandomAdjustSaturation,
    RandomDistortColor,
    RandomRgbToGray,
    RgbToGray,
    SubtractChannelMean,
    apply_colours,
)
from lockstep.augmentations.copy_paste import CopyPaste
from lockstep.augmentations.mixing import MixUp, Mosaic
from lockstep.augmentations.pixels import RandomBlackPatches, RandomPixelValueScale
from lockstep.augmentations.random_crops import (
    RandomCropImage,
    RandomCropPadImage,
    RandomCropToAspectRatio,
    RandomPadImage,
    RandomPadToAspectRatio,
    SsdRandomCrop,
    SsdRandomCropFixedAspectRatio,
    SsdRandomCropPad,
    SsdRandomCropPadFixedAspectRatio,
)
from lockstep.augmentations.resizers import RandomImageScale, RandomResizeMethod, ResizeImage, ResizeToMinDimension
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
    RandomJitterBoxes,
    RandomCropImage,
    RandomPadImage,
    RandomCropPadImage,
    RandomCropToAspectRatio,
    RandomPadToAspectRatio,
    RandomResizeMethod,
    ResizeImage,
    ResizeToMinDimension,
    ScaleBoxesToPixelCoordinates,
    RetainBoxesAboveThreshold,
    SsdRandomCrop,
    SsdRandomCropPad,
    SsdRandomCropFixedAspectRatio,
    SsdRandomCropPadFixedAspectRatio,
    NormalizeImage,
    SubtractChannelMean,
    RgbToGray,
    RandomRgbToGray,
    RandomAdjustBrightness,
    RandomAdjustContrast,
    RandomAdjustHue,
    RandomAdjustSaturation,
    RandomDistortColor,
    RandomPixelValueScale,
    RandomBlackPatches,
    ConvertClassLogitsToSoftmax,
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
    RandomJitterBoxes,
    RetainBoxesAboveThreshold,
    ScaleBoxesToPixelCoordinates,
    ConvertClassLogitsToSoftmax,
)
"""They move each pixel to another place at most."""

_CUT = (RandomCropImage, RandomCropToAspectRatio, SsdRandomCrop, SsdRandomCropFixedAspectRatio, RandomIoUCrop)
"""They leave pixels out."""


@dataclass(frozen=True)
class DeferredColours(Deferred):
    """The last augmentation of a list: draws the numbers of the colours that wait, and computes these on the device."""

    options: tuple[ColourOption, ...] = ()
    """The colours that wait, in their order."""
    repeats: tuple[int, ...] = ()
    """How many equal ones are before each of them in the list."""

    into: ClassVar[str] = f"{IMAGE}.colours"
    """The field that the numbers are in: float32 (batch, numbers)."""

    def numbers(self, batch: Mapping[str, Any], draws: Draws) -> Tensor:
        """Draw the numbers of all options, side by side."""
        numbers = [option.numbers(draws.again(turn)) for option, turn in zip(self.options, self.repeats, strict=True)]
        return torch.cat(numbers, dim=1)

    def apply(self, batch: Mapping[str, Any]) -> Tensor | list[Tensor]:
        """Compute the colours of a batch on its device.

        Args:
            batch: with decoded images, 0 to 255: one tensor of shape (batch, channels, height, width), or a list.

        Returns:
            float32 of the same form; the images as they are if the batch has no numbers: it was not augmented.
        """
        images: Tensor | list[Tensor] = batch[IMAGE]
        numbers = batch.get(self.into)
        if numbers is None or not len(images):
            return images
        if isinstance(images, torch.Tensor) and images.device.type != "cpu":
            return apply_colours(images, self.options, numbers)
        # One by one: on a CPU an image stays in its cache.
        rows = [apply_colours(image[None], self.options, row[None]) for image, row in zip(images, numbers, strict=True)]
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
    waiting: list[tuple[ColourOption, int]] = []
    for augment, turn in reversed([*zip(augmentations, turns(augmentations), strict=True)]):
        if isinstance(augment, ColourOption) and all(_leaves_the_same(augment, later) for later in kept):
            waiting.insert(0, (augment, turn))
        else:
            kept.insert(0, augment)
    colours = DeferredColours(tuple(option for option, _ in waiting), tuple(turn for _, turn in waiting))
    return ([*kept, colours] if waiting else kept), colours


def _leaves_the_same(colour: ColourOption, later: Augment) -> bool:
    """Whether a colour computed after another augmentation is the same as one computed before it."""
    return isinstance(later, _KEEP_THE_PIXELS) or (isinstance(later, _CUT) and not colour.looks_at_the_whole)
