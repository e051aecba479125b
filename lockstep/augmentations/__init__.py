"""Augmentations of images with the objects on them: boxes, masks and keypoints go where the pixels go."""

from __future__ import annotations

from lockstep.augmentations.class_scores import ConvertClassLogitsToSoftmax
from lockstep.augmentations.colours import (
    NormalizeImage,
    RandomAdjustBrightness,
    RandomAdjustContrast,
    RandomAdjustHue,
    RandomAdjustSaturation,
    RandomDistortColor,
    RandomRgbToGray,
    RgbToGray,
    SubtractChannelMean,
)
from lockstep.augmentations.copy_paste import CopyPaste
from lockstep.augmentations.mixup import MixUp
from lockstep.augmentations.mosaic import Mosaic
from lockstep.augmentations.pixels import RandomBlackPatches, RandomPixelValueScale
from lockstep.augmentations.zoom import FixedSizeCrop, RandomIoUCrop, RandomZoomOut, ScaleJitter
from lockstep.images.augment import HorizontalFlip

AUGMENTATIONS: tuple[type, ...] = (
    HorizontalFlip,
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
