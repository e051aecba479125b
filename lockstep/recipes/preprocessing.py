"""Preprocessing of images as parts of a recipe: published pipelines of augmentations, crops and normalisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lockstep.augmentations.augment import Augment, Bounds, Deferred, Share
from lockstep.augmentations.auto_augment import RandAugment, TrivialAugmentWide
from lockstep.augmentations.colours import GreyDraws, JitterDraws
from lockstep.augmentations.crops import DistortedCrop, RandomResizedCrop, ShortSideCrop
from lockstep.augmentations.mixing import MixDraws
from lockstep.augmentations.pixels import RandomErasing
from lockstep.augmentations.slim_presets import Preset, cifarnet_preset, inception_preset, lenet_preset, vgg_preset
from lockstep.augmentations.turns import HorizontalFlip, RandomRotation90, RandomVerticalFlip
from lockstep.checks import Checked, FiniteFloat, Hint, NonNegativeFloat, OneOf, PositiveFloat, Probability, check_all
from lockstep.errors import InputError
from lockstep.images.normalisation import IMAGENET_MEAN, IMAGENET_STD, normalize
from lockstep.images.resizing import ANTIALIASED, METHODS

if TYPE_CHECKING:
    from torch import Tensor

_POLICIES: Mapping[str, tuple[Augment, ...]] = {
    "none": (),
    "rand_augment": (RandAugment(),),
    "trivial_augment": (TrivialAugmentWide(),),
}
_SHORT_SIDE = 256 / 224  # of the images that are scored, in sides of their crop
_BY_CHANNEL = Hint("give one number for each channel, such as [0.5, 0.5, 0.5]")
_LeastArea = Annotated[Share, Hint("give least_area as a share, such as 0.05")]
ImageAugmentation = (
    RandomVerticalFlip
    | RandomRotation90
    | RandAugment
    | TrivialAugmentWide
    | RandomErasing
    | JitterDraws
    | GreyDraws
    | MixDraws
)
"""What may follow the crop and the flip of `ResizedCrop`."""


@dataclass(frozen=True)
class Inception(Checked):
    """A distorted crop, flip and colours; values from -1 to 1. Scored is the middle, 0.875 of each side."""

    fast: bool = False
    """Resize bilinearly, and change brightness and saturation alone, as slim does by default; else each image is
    resized by one of four methods, and its colours are changed in one of four orders."""
    crop_by_boxes: bool = False
    """Each crop covers a part of one of the boxes, if the records have some, as in the Inception trainer."""
    least_area: _LeastArea = 0.05
    """Smallest share of the image that a crop takes."""

    def preset(self, size: int) -> Preset:
        """Make the augmentations and the input function for images of this height and width."""
        boxes = "boxes" if self.crop_by_boxes else None
        made = inception_preset(size, fast=self.fast, boxes_field=boxes)
        first, *rest = made.train
        assert isinstance(first, DistortedCrop), "it comes first"
        return Preset((replace(first, area=(self.least_area, 1.0)), *rest), made.evaluate, made.inputs)


@dataclass(frozen=True)
class Vgg:
    """A crop at a random scale, and flip; less the mean colour. Scored is the middle at the smallest scale."""

    short_side: tuple[int, int] = (256, 512)
    """Smallest and largest short side of the resized image, in pixels."""

    def preset(self, size: int) -> Preset:
        """Make the augmentations and the input function for images of this height and width."""
        return vgg_preset(size, self.short_side)


@dataclass(frozen=True)
class Cifarnet:
    """A crop with 4 black pixels around the image, flip, brightness and contrast; each image standardised."""

    def preset(self, size: int) -> Preset:
        """Make the augmentations and the input function for images of this height and width."""
        return cifarnet_preset(size)


@dataclass(frozen=True)
class Lenet:
    """The middle of an image, or all of it with black around it; values from -1 to just below 1."""

    def preset(self, size: int) -> Preset:
        """Make the augmentations and the input function for images of this height and width."""
        return lenet_preset(size)


@dataclass(frozen=True)
class ResizedCrop(Checked):
    """A random part of the image and flip; normalised. Scored is the middle: how classifiers are trained today."""

    least_area: _LeastArea = 0.08
    """Smallest share of the image that a crop takes."""
    jitter: NonNegativeFloat = 0.0
    """Brightness, contrast and saturation change by factors up to this share more or less."""
    policy: Literal["none", "rand_augment", "trivial_augment"] = "none"
    """Operations on the images after the crop."""
    erasing: Probability = 0.0
    """Share of the images in which a rectangle is painted over."""
    mean: Annotated[tuple[FiniteFloat, FiniteFloat, FiniteFloat], _BY_CHANNEL] = IMAGENET_MEAN
    """Subtracted from the values, which are 0 to 1; by channel, in the order of the network."""
    std: Annotated[tuple[PositiveFloat, PositiveFloat, PositiveFloat], _BY_CHANNEL] = IMAGENET_STD
    """Divides the values then, by channel."""
    channel_order: Literal["rgb", "bgr"] = "rgb"
    """Order of the channels in the network; weights from Caffe have blue first."""
    ratio: Bounds = (3 / 4, 4 / 3)
    """Width / height of a crop, at least and at most."""
    resize: Annotated[str, OneOf(METHODS)] = ANTIALIASED
    """How a crop is resized: "antialiased"; or "bilinear", "nearest", "bicubic" or "area" as in TensorFlow 1."""
    horizontal_flip: Probability = 0.5
    """Share of the images whose left and right are exchanged."""
    augment: tuple[ImageAugmentation, ...] = ()
    """Further augmentations, in this order, after the policy. Those whose numbers alone are drawn where images are read
    come after all others, on the device: `JitterDraws`, `GreyDraws`, and `MixDraws`, which is mixup and CutMix. Where
    images are mixed, the labels of the losses are, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_all("augment", self.augment, ImageAugmentation, hint="write augment=(ls.augmentations.MixDraws(0.8),)")
        kinds = [type(each) for each in self._deferred]
        if twice := [kind.__name__ for kind in dict.fromkeys(kinds) if kinds.count(kind) > 1]:
            raise InputError(
                f"{', '.join(twice)} can be computed once for an image, as one set of numbers is kept for it.",
                given=f"augment={self.augment}" + (f", jitter={self.jitter}" if self.jitter else ""),
                expected="it once at most",
                hint="make one of them; or leave jitter out",
            )

    def preset(self, size: int) -> Preset:
        """Make the augmentations and the input function for images of this height and width."""
        train: list[Augment] = [RandomResizedCrop(size, (self.least_area, 1.0), self.ratio, self.resize)]
        train += [HorizontalFlip(self.horizontal_flip)] if self.horizontal_flip else []
        train += [*_POLICIES[self.policy], *(each for each in self.augment if not isinstance(each, Deferred))]
        train += [RandomErasing(p=self.erasing)] if self.erasing else []
        train += self._deferred
        side = round(_SHORT_SIDE * size)
        middle = ShortSideCrop(size, (side, side), place="middle")
        return Preset((*train,), (middle,), partial(_normalized_input, self, self._deferred or (JitterDraws(),)))

    @property
    def _deferred(self) -> Sequence[Deferred]:
        """The augmentations that are computed on the device, in their order."""
        jitter = JitterDraws(brightness=self.jitter, contrast=self.jitter, saturation=self.jitter)
        return [*[jitter][: bool(self.jitter)], *(each for each in self.augment if isinstance(each, Deferred))]

    @property
    def mixing(self) -> MixDraws | None:
        """What mixes the images of a batch, and so their labels."""
        return next((each for each in self.augment if isinstance(each, MixDraws)), None)


Preprocessing = Inception | Vgg | Cifarnet | Lenet | ResizedCrop


def _normalized_input(how: ResizedCrop, deferred: Sequence[Deferred], batch: Mapping[str, Any]) -> Tensor:
    images: Any = batch["image"]
    for each in deferred:
        images = each.apply({**batch, "image": images})
    if how.channel_order == "bgr":
        images = images.flip(1)
    return normalize(images, how.mean, how.std)
