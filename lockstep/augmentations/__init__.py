"""Augmentations: all that changes the images of a batch, and the objects on them, by numbers that the loader draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.augmentations.augment import Augment as Augment
    from lockstep.augmentations.augment import NeedsPartners as NeedsPartners
    from lockstep.augmentations.auto_augment import RandAugment as RandAugment
    from lockstep.augmentations.auto_augment import TrivialAugmentWide as TrivialAugmentWide
    from lockstep.augmentations.boxes import ConvertClassLogitsToSoftmax as ConvertClassLogitsToSoftmax
    from lockstep.augmentations.boxes import RandomJitterBoxes as RandomJitterBoxes
    from lockstep.augmentations.boxes import RetainBoxesAboveThreshold as RetainBoxesAboveThreshold
    from lockstep.augmentations.boxes import ScaleBoxesToPixelCoordinates as ScaleBoxesToPixelCoordinates
    from lockstep.augmentations.colours import ColourDraws as ColourDraws
    from lockstep.augmentations.colours import GreyDraws as GreyDraws
    from lockstep.augmentations.colours import JitterDraws as JitterDraws
    from lockstep.augmentations.colours import NormalizeImage as NormalizeImage
    from lockstep.augmentations.colours import RandomAdjustBrightness as RandomAdjustBrightness
    from lockstep.augmentations.colours import RandomAdjustContrast as RandomAdjustContrast
    from lockstep.augmentations.colours import RandomAdjustHue as RandomAdjustHue
    from lockstep.augmentations.colours import RandomAdjustSaturation as RandomAdjustSaturation
    from lockstep.augmentations.colours import RandomDistortColor as RandomDistortColor
    from lockstep.augmentations.colours import RandomRgbToGray as RandomRgbToGray
    from lockstep.augmentations.colours import RgbToGray as RgbToGray
    from lockstep.augmentations.colours import SubtractChannelMean as SubtractChannelMean
    from lockstep.augmentations.copy_paste import CopyPaste as CopyPaste
    from lockstep.augmentations.crops import CentralCrop as CentralCrop
    from lockstep.augmentations.crops import CropOrPad as CropOrPad
    from lockstep.augmentations.crops import Decode as Decode
    from lockstep.augmentations.crops import DistortedCrop as DistortedCrop
    from lockstep.augmentations.crops import RandomCrop as RandomCrop
    from lockstep.augmentations.crops import RandomResizedCrop as RandomResizedCrop
    from lockstep.augmentations.crops import Resize as Resize
    from lockstep.augmentations.crops import ShortSideCrop as ShortSideCrop
    from lockstep.augmentations.lists import deferred as deferred
    from lockstep.augmentations.mixing import MixDraws as MixDraws
    from lockstep.augmentations.mixing import MixUp as MixUp
    from lockstep.augmentations.mixing import Mosaic as Mosaic
    from lockstep.augmentations.on_device import OnDevice as OnDevice
    from lockstep.augmentations.pixels import RandomBlackPatches as RandomBlackPatches
    from lockstep.augmentations.pixels import RandomErasing as RandomErasing
    from lockstep.augmentations.pixels import RandomPixelValueScale as RandomPixelValueScale
    from lockstep.augmentations.random_crops import RandomAbsolutePadImage as RandomAbsolutePadImage
    from lockstep.augmentations.random_crops import RandomCropImage as RandomCropImage
    from lockstep.augmentations.random_crops import RandomCropPadImage as RandomCropPadImage
    from lockstep.augmentations.random_crops import RandomCropToAspectRatio as RandomCropToAspectRatio
    from lockstep.augmentations.random_crops import RandomPadImage as RandomPadImage
    from lockstep.augmentations.random_crops import RandomPadToAspectRatio as RandomPadToAspectRatio
    from lockstep.augmentations.random_crops import RandomSquareCropByScale as RandomSquareCropByScale
    from lockstep.augmentations.random_crops import SsdRandomCrop as SsdRandomCrop
    from lockstep.augmentations.random_crops import SsdRandomCropFixedAspectRatio as SsdRandomCropFixedAspectRatio
    from lockstep.augmentations.random_crops import SsdRandomCropPad as SsdRandomCropPad
    from lockstep.augmentations.random_crops import SsdRandomCropPadFixedAspectRatio as SsdRandomCropPadFixedAspectRatio
    from lockstep.augmentations.resizers import FixedShapeResizer as FixedShapeResizer
    from lockstep.augmentations.resizers import KeepAspectRatioResizer as KeepAspectRatioResizer
    from lockstep.augmentations.resizers import RandomImageScale as RandomImageScale
    from lockstep.augmentations.resizers import RandomResizeMethod as RandomResizeMethod
    from lockstep.augmentations.resizers import RandomScaleCropAndPadToSquare as RandomScaleCropAndPadToSquare
    from lockstep.augmentations.resizers import ResizeImage as ResizeImage
    from lockstep.augmentations.resizers import ResizeToMinDimension as ResizeToMinDimension
    from lockstep.augmentations.slim_presets import slim_preset as slim_preset
    from lockstep.augmentations.turns import HorizontalFlip as HorizontalFlip
    from lockstep.augmentations.turns import RandomRotation90 as RandomRotation90
    from lockstep.augmentations.turns import RandomShift as RandomShift
    from lockstep.augmentations.turns import RandomVerticalFlip as RandomVerticalFlip
    from lockstep.augmentations.zoom import FixedSizeCrop as FixedSizeCrop
    from lockstep.augmentations.zoom import RandomIoUCrop as RandomIoUCrop
    from lockstep.augmentations.zoom import RandomZoomOut as RandomZoomOut
    from lockstep.augmentations.zoom import ScaleJitter as ScaleJitter
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
