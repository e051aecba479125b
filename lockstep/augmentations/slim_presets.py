"""Preprocessing of tf-slim's networks as values: one part for the loader, one for the device of the batch.

Pixels are whole numbers from 0 to 255 until they are on their device: a resize is rounded there, where slim keeps
fractions. All that comes after it is computed in floats, as in slim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lockstep.augmentations.augment import Augment
from lockstep.augmentations.colours import ColourDraws
from lockstep.augmentations.crops import RANDOM, CentralCrop, CropOrPad, DistortedCrop, RandomCrop, ShortSideCrop
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.checks import check_one_of
from lockstep.images.colour import FAST_ORDERS, SLIM_ORDERS, Order
from lockstep.images.normalisation import centred, normalize, standardize

if TYPE_CHECKING:
    from torch import Tensor

_IMAGE, _COLOUR = "image", "image.colour"
_INCEPTION_COLOURS = ColourDraws()
_VGG_MEANS = (123.68, 116.78, 103.94)  # of red, green and blue


@dataclass(frozen=True)
class Preset:
    """The way from the images in the field "image" to the input of a network."""

    train: tuple[Augment, ...]
    """The augmentations of a training loader: from encoded images to uint8, and the numbers of their colours."""
    evaluate: tuple[Augment, ...]
    """The augmentations of a loader that evaluates; nothing is drawn."""
    inputs: Callable[[Mapping[str, Any]], Tensor]
    """Maps a batch of either loader to the network's input, on the batch's device: float32 of the images' shape.

    Images are coloured by the numbers that a training loader has drawn."""


def lenet_preset(size: int = 28) -> Preset:
    """Take the middle of an image, or all of it with black around it; values from -1 to just below 1."""
    crop = (CropOrPad(size),)
    return Preset(crop, crop, _lenet_inputs)


def cifarnet_preset(size: int = 32) -> Preset:
    """Crop from the image with 4 black pixels around it, flip, vary brightness and contrast, standardise each image.

    Evaluation takes the middle.
    """
    colours = ColourDraws(brightness=63 / 255, contrast=(0.2, 1.8), saturation=(1.0, 1.0), hue=0.0)
    return Preset((RandomCrop(size, padding=4), HorizontalFlip(), colours), (CropOrPad(size),), _cifarnet_inputs)


def vgg_preset(size: int = 224, short_side: tuple[int, int] = (256, 512)) -> Preset:
    """Crop from the image at a random scale, flip, subtract the mean colour; values from -123.68 to 151.06.

    `size` is the crop's height and width, `short_side` the least and the most of the image's short side once it is
    resized, all in pixels. Evaluation takes the middle at the lower scale.
    """
    crop = ShortSideCrop(size, short_side, resize="bilinear")
    middle = replace(crop, short_side=(short_side[0], short_side[0]), place="middle")
    return Preset((crop, HorizontalFlip()), (middle,), _vgg_inputs)


def inception_preset(size: int = 299, *, fast: bool = True, boxes_field: str | None = None) -> Preset:
    """Crop by `DistortedCrop`, flip, distort colours; values from -1 to 1. Evaluation takes 0.875 of each side.

    Args:
        size: height and width of the crop, in pixels.
        fast: resize bilinearly, and change brightness and saturation alone; else each image is resized by one of four
            methods, and its colours are changed in one of four orders.
        boxes_field: as in `DistortedCrop`.
    """
    crop = DistortedCrop(size, resize="bilinear" if fast else RANDOM, boxes_field=boxes_field)
    inputs = partial(_inception_inputs, orders=FAST_ORDERS if fast else SLIM_ORDERS)
    return Preset((crop, HorizontalFlip(), _INCEPTION_COLOURS), (CentralCrop(size, resize="bilinear"),), inputs)


SLIM_PRESETS: dict[str, Callable[..., Preset]] = {
    "lenet": lenet_preset,
    "cifarnet": cifarnet_preset,
    "vgg": vgg_preset,
    "inception": inception_preset,
}

_NETWORKS = {
    "inception": "inception_v1 inception_v2 inception_v3 inception_v4 inception_resnet_v2 mobilenet_v1 mobilenet_v2 "
    "mobilenet_v2_035 mobilenet_v2_140 mobilenet_v3_small mobilenet_v3_large mobilenet_v3_small_minimalistic "
    "mobilenet_v3_large_minimalistic mobilenet_edgetpu mobilenet_edgetpu_075 nasnet_mobile nasnet_large "
    "pnasnet_mobile pnasnet_large",
    "vgg": "vgg_a vgg_16 vgg_19 resnet_v1_50 resnet_v1_101 resnet_v1_152 resnet_v1_200 resnet_v2_50 resnet_v2_101 "
    "resnet_v2_152 resnet_v2_200",
}

PRESET_OF_NETWORK = {name: name for name in SLIM_PRESETS} | {
    network: preset for preset, networks in _NETWORKS.items() for network in networks.split()
}
"""The preset of each network that slim has one for, and of each preset's own name."""


def slim_preset(name: str, size: int) -> Preset:
    """Look up the preset of this name, or of slim's network of this name, for images of this height and width."""
    check_one_of("preset", name, [*PRESET_OF_NETWORK])
    return SLIM_PRESETS[PRESET_OF_NETWORK[name]](size)


def _lenet_inputs(batch: Mapping[str, Any]) -> Tensor:
    images: Tensor = batch[_IMAGE]
    return (images.float() - 128) / 128


def _cifarnet_inputs(batch: Mapping[str, Any]) -> Tensor:
    values: Tensor = batch[_IMAGE].float()
    if _COLOUR in batch:
        brightness, contrast = batch[_COLOUR][:, :2, None, None, None].unbind(1)
        # `ColourDraws.apply` would clip: these values may leave the range of pixels.
        values = values + 255 * brightness
        values = torch.lerp(values.mean(dim=(2, 3), keepdim=True), values, contrast)
    return standardize(values)


def _vgg_inputs(batch: Mapping[str, Any]) -> Tensor:
    return normalize(batch[_IMAGE].float(), _VGG_MEANS, (1.0, 1.0, 1.0))


def _inception_inputs(batch: Mapping[str, Any], orders: tuple[Order, ...]) -> Tensor:
    return centred(_INCEPTION_COLOURS.apply(batch, orders))
