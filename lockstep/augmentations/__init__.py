"""Augmentations of images with the objects on them: boxes, masks and keypoints go where the pixels go."""

from __future__ import annotations

from lockstep.augmentations.boxes import (
    ConvertClassLogitsToSoftmax,
    RandomJitterBoxes,
    RetainBoxesAboveThreshold,
    ScaleBoxesToPixelCoordinates,
)
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
from lockstep.augmentations.padding import RandomCropPadImage, RandomPadImage, RandomPadToAspectRatio
from lockstep.augmentations.pixels import RandomBlackPatches, RandomPixelValueScale
from lockstep.augmentations.random_crops import RandomCropImage, RandomCropToAspectRatio
from lockstep.augmentations.scaling import RandomImageScale, RandomResizeMethod, ResizeImage, ResizeToMinDimension
from lockstep.augmentations.ssd_crops import (
    SsdRandomCrop,
    SsdRandomCropFixedAspectRatio,
    SsdRandomCropPad,
    SsdRandomCropPadFixedAspectRatio,
)
from lockstep.augmentations.turns import RandomRotation90, RandomVerticalFlip
from lockstep.augmentations.zoom import FixedSizeCrop, RandomIoUCrop, RandomZoomOut, ScaleJitter
from lockstep.images.augment import HorizontalFlip

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
