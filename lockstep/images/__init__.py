"""Images: decoded on demand, cropped, resized, flipped and coloured by numbers that somebody else draws."""

from lockstep.images.augment import Augment, HorizontalFlip, RandomShift
from lockstep.images.auto_augment import RandAugment, TrivialAugmentWide
from lockstep.images.colour import FAST_ORDERS, INCEPTION_ORDERS, SLIM_ORDERS, ColourDraws, centred, distort, scaled
from lockstep.images.crops import CropOrPad, RandomCrop, ShortSideCrop
from lockstep.images.decode import Decoding, EncodedImage, Region
from lockstep.images.erasing import RandomErasing
from lockstep.images.jitter import GreyDraws, JitterDraws, greyed, jittered
from lockstep.images.masks import DenseMasks, MaskOutlines, PngMasks
from lockstep.images.mixing import MixDraws, mixed
from lockstep.images.normalisation import IMAGENET_MEAN, IMAGENET_STD, normalised, standardised
from lockstep.images.resized_crops import CentralCrop, Decode, DistortedCrop, RandomResizedCrop, Resize
from lockstep.images.slim_presets import Preset, slim_preset

__all__ = [
    "FAST_ORDERS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "INCEPTION_ORDERS",
    "SLIM_ORDERS",
    "Augment",
    "CentralCrop",
    "ColourDraws",
    "CropOrPad",
    "Decode",
    "Decoding",
    "DenseMasks",
    "DistortedCrop",
    "EncodedImage",
    "GreyDraws",
    "HorizontalFlip",
    "JitterDraws",
    "MaskOutlines",
    "MixDraws",
    "PngMasks",
    "Preset",
    "RandAugment",
    "RandomCrop",
    "RandomErasing",
    "RandomResizedCrop",
    "RandomShift",
    "Region",
    "Resize",
    "ShortSideCrop",
    "TrivialAugmentWide",
    "centred",
    "distort",
    "greyed",
    "jittered",
    "mixed",
    "normalised",
    "scaled",
    "slim_preset",
    "standardised",
]
