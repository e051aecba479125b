"""Images: decoded on demand, cropped, flipped and coloured by numbers that the loader draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.images.augment import HorizontalFlip as HorizontalFlip
    from lockstep.images.auto_augment import RandAugment as RandAugment
    from lockstep.images.colour import ColourDraws as ColourDraws
    from lockstep.images.colour import distort as distort
    from lockstep.images.decode import Decoding as Decoding
    from lockstep.images.erasing import RandomErasing as RandomErasing
    from lockstep.images.jitter import JitterDraws as JitterDraws
    from lockstep.images.jitter import jittered as jittered
    from lockstep.images.mixing import MixDraws as MixDraws
    from lockstep.images.mixing import mixed as mixed
    from lockstep.images.normalisation import normalised as normalised
    from lockstep.images.resized_crops import CentralCrop as CentralCrop
    from lockstep.images.resized_crops import DistortedCrop as DistortedCrop
    from lockstep.images.resized_crops import RandomResizedCrop as RandomResizedCrop
    from lockstep.images.resized_crops import Resize as Resize
    from lockstep.images.slim_presets import slim_preset as slim_preset
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
