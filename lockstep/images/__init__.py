"""Images: decoded on demand, cropped, flipped and coloured by numbers that the loader draws."""

from lockstep.images.augment import HorizontalFlip
from lockstep.images.auto_augment import RandAugment
from lockstep.images.colour import ColourDraws, distort
from lockstep.images.decode import Decoding
from lockstep.images.erasing import RandomErasing
from lockstep.images.jitter import JitterDraws, jittered
from lockstep.images.mixing import MixDraws, mixed
from lockstep.images.normalisation import normalised
from lockstep.images.resized_crops import CentralCrop, DistortedCrop, RandomResizedCrop, Resize
from lockstep.images.slim_presets import slim_preset

__all__ = [
    "CentralCrop",
    "ColourDraws",
    "Decoding",
    "DistortedCrop",
    "HorizontalFlip",
    "JitterDraws",
    "MixDraws",
    "RandAugment",
    "RandomErasing",
    "RandomResizedCrop",
    "Resize",
    "distort",
    "jittered",
    "mixed",
    "normalised",
    "slim_preset",
]
