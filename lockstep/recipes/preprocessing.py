"""From image files to what a network reads, as parts of a recipe: the published pipelines by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from lockstep.checks import check_all, check_one_of, check_positive, check_range
from lockstep.errors import InputError
from lockstep.images.augment import Augment, HorizontalFlip, check_probability
from lockstep.images.auto_augment import RandAugment, TrivialAugmentWide
from lockstep.images.crops import ShortSideCrop
from lockstep.images.erasing import RandomErasing
from lockstep.images.jitter import JitterDraws, jittered
from lockstep.images.normalisation import IMAGENET_MEAN, IMAGENET_STD, normalised
from lockstep.images.resized_crops import DistortedCrop, RandomResizedCrop
from lockstep.images.slim_presets import Preset, cifarnet_preset, inception_preset, lenet_preset, vgg_preset

_POLICIES: Mapping[str, tuple[Augment, ...]] = {
    "none": (),
    "rand_augment": (RandAugment(),),
    "trivial_augment": (TrivialAugmentWide(),),
}
_SHORT_SIDE = 256 / 224  # of the images that are scored, in sides of their crop
_CHANNELS = 3


@dataclass(frozen=True)
class Inception:
    """A distorted crop, flip and colours; values from -1 to 1. What is scored is the middle, 0.875 of each side.

    Raises:
        InputError: a field is out of range.
    """

    fast: bool = False
    """Resize bilinearly, and change brightness and saturation alone, as slim does by default; else each image is
    resized by one of four methods, and its colours are changed in one of four orders."""
    crop_by_boxes: bool = False
    """A crop shows a part of one of the boxes, where the records have some, as the Inception trainer does."""
    least_area: float = 0.05
    """The share of the image that a crop takes, at least."""

    def __post_init__(self) -> None:
        _check_share("least_area", self.least_area)

    def preset(self, size: int) -> Preset:
        """The augmentations and the network's input, for images of this height and width."""
        boxes = "boxes" if self.crop_by_boxes else None
        made = inception_preset(size, fast=self.fast, boxes_field=boxes)
        first, *rest = made.train
        assert isinstance(first, DistortedCrop), "it comes first"
        return Preset((replace(first, area=(self.least_area, 1.0)), *rest), made.evaluate, made.inputs)


@dataclass(frozen=True)
class Vgg:
    """A crop at a random scale, and flip; less the mean colour. What is scored is the middle at the lower scale."""

    short_side: tuple[int, int] = (256, 512)
    """The least and the most pixels of the image's short side, once it is resized."""

    def preset(self, size: int) -> Preset:
        """The augmentations and the network's input, for images of this height and width.

        Raises:
            InputError: the short side is not given by two numbers, or is below the size.
        """
        return vgg_preset(size, self.short_side)


@dataclass(frozen=True)
class Cifarnet:
    """A crop with 4 black pixels around the image, flip, brightness and contrast; each image standardised."""

    def preset(self, size: int) -> Preset:
        """The augmentations and the network's input, for images of this height and width."""
        return cifarnet_preset(size)


@dataclass(frozen=True)
class Lenet:
    """The middle of an image, or all of it with black around it; values from -1 to just below 1."""

    def preset(self, size: int) -> Preset:
        """The augmentations and the network's input, for images of this height and width."""
        return lenet_preset(size)


@dataclass(frozen=True)
class ResizedCrop:
    """A random part of the image and flip; normalised. What is scored is the middle: how classifiers are trained today.

    Raises:
        InputError: a field is out of range.
    """

    least_area: float = 0.08
    """The share of the image that a crop takes, at least."""
    jitter: float = 0.0
    """Brightness, contrast and saturation change by factors up to this share more or less."""
    policy: Literal["none", "rand_augment", "trivial_augment"] = "none"
    """Operations on the images after the crop."""
    erasing: float = 0.0
    """The share of the images in which a rectangle is painted over."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Taken off the values, which are 0 to 1: of each channel, in the order in which the network has them."""
    std: tuple[float, ...] = IMAGENET_STD
    """What they are divided by then."""
    channel_order: Literal["rgb", "bgr"] = "rgb"
    """How the network has them: weights that come from Caffe have blue first."""

    def __post_init__(self) -> None:
        _check_share("least_area", self.least_area)
        check_range("jitter", self.jitter, 0)
        check_one_of("policy", self.policy, (*_POLICIES,))
        check_probability("erasing", self.erasing)
        check_one_of("channel_order", self.channel_order, ("rgb", "bgr"))
        _check_channels("mean", self.mean)
        _check_channels("std", self.std)
        for each in self.std:
            check_positive("std", each, hint="give the standard deviation of each channel")

    def preset(self, size: int) -> Preset:
        """The augmentations and the network's input, for images of this height and width."""
        draws = JitterDraws(brightness=self.jitter, contrast=self.jitter, saturation=self.jitter)
        train: list[Augment] = [RandomResizedCrop(size, scale=(self.least_area, 1.0)), HorizontalFlip()]
        train += _POLICIES[self.policy]
        train += [RandomErasing(p=self.erasing)] if self.erasing else []
        train += [draws] if self.jitter else []
        side = round(_SHORT_SIDE * size)
        middle = ShortSideCrop(size, (side, side), place="middle")
        return Preset((*train,), (middle,), partial(_normalised_input, self, draws.into))


Preprocessing = Inception | Vgg | Cifarnet | Lenet | ResizedCrop


def _normalised_input(how: ResizedCrop, jitter: str, batch: Mapping[str, Any]) -> Tensor:
    images = batch["image"]
    if jitter in batch:
        images = jittered(images, batch[jitter])
    if how.channel_order == "bgr":
        images = images.flip(1)
    return normalised(images, how.mean, how.std)


def _check_share(name: str, value: float) -> None:
    check_positive(name, value, hint=f"give {name} as a share, such as 0.05")
    check_probability(name, value)


def _check_channels(name: str, values: tuple[float, ...]) -> None:
    hint = f"give {name} one number for each channel, such as [0.5, 0.5, 0.5]"
    check_all(name, values, (int, float), hint=hint)
    if len(values) != _CHANNELS:
        raise InputError(
            f"{name} is not one number for each channel.", given=f"{name}={values}", expected="three numbers", hint=hint
        )
