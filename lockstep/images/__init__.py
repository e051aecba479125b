"""Images: decoded on demand, cropped, resized, flipped and coloured by numbers that somebody else draws."""

from lockstep.images.augment import Augment, RandomShift
from lockstep.images.colour import FAST_ORDERS, INCEPTION_ORDERS, SLIM_ORDERS, ColourDraws, centred, distort, scaled
from lockstep.images.crops import CentralCrop, DistortedCrop, RandomResizedCrop, Resize
from lockstep.images.decode import Decoding, Region
from lockstep.images.decoded import Decode
from lockstep.images.encoded import EncodedImage
from lockstep.images.erasing import RandomErasing
from lockstep.images.flips import HorizontalFlip
from lockstep.images.grey import GreyDraws, greyed
from lockstep.images.jitter import JitterDraws, jittered
from lockstep.images.mask_outlines import MaskOutlines
from lockstep.images.masks import DenseMasks, PngMasks
from lockstep.images.mixing import MixDraws, mixed
from lockstep.images.normalisation import IMAGENET_MEAN, IMAGENET_STD, normalised, standardised
from lockstep.images.policies import RandAugment, TrivialAugmentWide
from lockstep.images.slim_presets import Preset, slim_preset
from lockstep.images.unscaled_crops import CropOrPad, RandomCrop, ShortSideCrop

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
