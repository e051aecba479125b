"""Colours: numbers are drawn for each image, and computed where it is read, or on the device of its batch.

`ColourDraws`, `JitterDraws` and `GreyDraws` only draw where images are read; `apply` computes whole batches on their
device. The options of TensorFlow's object detection API may do either: see `lists`. They take images as 0 to 255, and
make float32 in that range: all but `NormalizeImage` and `SubtractChannelMean` end at it, as in the releases of 2018.
Those of 2017 added a brightness meant for a range of 1 to values up to 255, and clipped nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

import numpy as np
import torch

from lockstep.augmentations.augment import Deferred, drawn_between
from lockstep.checks import Checked, FiniteFloat, Hint, NonNegativeFloat, Probability, Range, ordered
from lockstep.errors import InputError
from lockstep.images import colour
from lockstep.images.fields import decoded, images_of
from lockstep.images.normalisation import as_floats
from lockstep.randomness import Draws

if TYPE_CHECKING:
    from torch import Tensor

_Bounds: TypeAlias = Mapping[str, tuple[float, float]]

_Factors = Annotated[tuple[NonNegativeFloat, NonNegativeFloat], ordered]

IMAGE = "image"
WHITE = 255.0


def drawn_numbers(draws: Draws, field: str, bounds: Mapping[str, tuple[float, float]]) -> Tensor:
    """Draw a number within each pair of bounds for each example: float32 (batch, bounds)."""
    columns = [drawn_between(draws, f"{field} {name}", *ends) for name, ends in bounds.items()]
    return torch.from_numpy(np.stack(columns, axis=1)).float()


class _ColourNumbers(Deferred):
    """Base of augmentations that draw numbers for the colours of an image, and one to choose an order by."""

    @property
    @abstractmethod
    def bounds(self) -> _Bounds:
        """The least and the most of each number."""

    def numbers(self, batch: Mapping[str, Any], draws: Draws) -> Tensor:
        """Draw the numbers of each image: float32 (batch, 5)."""
        return drawn_numbers(draws, self.into, {**self.bounds, "order": (0.0, 1.0)})


@dataclass(frozen=True)
class ColourDraws(_ColourNumbers):
    """Colours as the Inception systems distort them: numbers float32 (batch, 5) in the field "image.colour".

    Its columns: the brightness to add (of a range of 1), the factors of contrast and saturation, the turn of the hue
    (1 is all around), and where among the orders to choose one: 0 is the first, just below 1 the last.
    """

    brightness: NonNegativeFloat = 32 / 255
    """The most that is added or taken away."""
    contrast: _Factors = (0.5, 1.5)
    saturation: _Factors = (0.5, 1.5)
    hue: Annotated[float, Range(ge=0, le=0.5)] = 0.2
    """The most that the hue is turned either way."""
    field: str = "image"
    """The images that are coloured; they are not read for the draws."""

    ending: ClassVar[str] = "colour"

    @property
    def bounds(self) -> _Bounds:
        """The least and the most of each number."""
        brightness, hue = (-self.brightness, self.brightness), (-self.hue, self.hue)
        return {"brightness": brightness, "contrast": self.contrast, "saturation": self.saturation, "hue": hue}

    def apply(self, batch: Mapping[str, Any], orders: tuple[colour.Order, ...] = colour.INCEPTION_ORDERS) -> Tensor:
        """Colour each image by its own numbers; float32 in [0, 1] of the same shape.

        Args:
            batch: with images, uint8 of shape (batch, 3, height, width), or floats in [0, 1].
            orders: the operations of each order; all of the same length. See `in_chosen_orders`.
        """
        if self.into not in batch:
            return as_floats(batch[self.field])
        images, numbers = batch[self.field], batch[self.into]
        return colour.in_chosen_orders(images, numbers, orders, colour.OPERATIONS, drawn_by="ColourDraws").clamp_(0, 1)


@dataclass(frozen=True)
class JitterDraws(_ColourNumbers):
    """Torchvision's `ColorJitter`: numbers float32 (batch, 5) in the field "image.jitter".

    Its columns: the factors of brightness, contrast and saturation, the turn of the hue (1 is all around), and where
    among the orders to choose one: 0 is the first, just below 1 the last.
    """

    brightness: NonNegativeFloat = 0.0
    """Factors are drawn from 1 - brightness, but at least 0, to 1 + brightness."""
    contrast: NonNegativeFloat = 0.0
    """As brightness."""
    saturation: NonNegativeFloat = 0.0
    """As brightness."""
    hue: Annotated[float, Range(ge=0, le=0.5)] = 0.0
    """The most that the hue is turned either way."""
    field: str = "image"
    """The images that are coloured; they are not read for the draws."""

    ending: ClassVar[str] = "jitter"

    @property
    def bounds(self) -> _Bounds:
        """The least and the most of each number."""
        most = {"brightness": self.brightness, "contrast": self.contrast, "saturation": self.saturation}
        return {name: (max(0.0, 1 - by), 1 + by) for name, by in most.items()} | {"hue": (-self.hue, self.hue)}

    def apply(self, batch: Mapping[str, Any], orders: tuple[colour.Order, ...] = colour.JITTER_ORDERS) -> Tensor:
        """Colour each image by its own numbers; float32 in [0, 1] of the same shape.

        Args:
            batch: with images, uint8 of shape (batch, 3, height, width), or floats in [0, 1].
            orders: the operations of each order; all of the same length. An accelerator computes each operation once
                a step where all orders agree, as `JITTER_ORDERS[:1]` does, instead of all that stand there in one.
        """
        if self.into not in batch:
            return as_floats(batch[self.field])
        images, numbers = batch[self.field], batch[self.into]
        return colour.in_chosen_orders(images, numbers, orders, colour.JITTER_OPERATIONS, drawn_by="JitterDraws")


@dataclass(frozen=True)
class GreyDraws(Deferred):
    """Torchvision's `RandomGrayscale`: which images become grey, bools of shape (batch,) in the field "image.grey"."""

    p: Probability = 0.1
    """The probability that an image becomes grey."""
    field: str = "image"
    """The images that may become grey; they are not read for the draws."""

    ending: ClassVar[str] = "grey"

    def numbers(self, batch: Mapping[str, Any], draws: Draws) -> Tensor:
        """Choose images: bools of shape (batch,)."""
        return torch.from_numpy(draws.uniform(self.into) < self.p)

    def apply(self, batch: Mapping[str, Any]) -> Tensor:
        """Make the chosen images grey; float32 of the same shape.

        Args:
            batch: with images, uint8 of shape (batch, 3, height, width), taken as [0, 1], or floats.
        """
        images, chosen = batch[self.field], batch.get(self.into)
        if chosen is None:
            return as_floats(images)
        known = images.dtype == torch.uint8 or images.is_floating_point()
        shapes = images.ndim == 4 and images.shape[1] == 3 and chosen.shape == images.shape[:1]
        if not known or not shapes or chosen.dtype != torch.bool:
            raise InputError(
                "These images cannot become grey by this choice.",
                given=f"images of {images.dtype} and shape {tuple(images.shape)}, a choice of {chosen.dtype} and shape "
                f"{tuple(chosen.shape)}",
                expected="images of shape (batch, 3, height, width), uint8 or floats; bools of shape (batch,)",
                hint="add GreyDraws to the augmentations of the loader that gives the batch",
            )
        values = as_floats(images)
        return torch.where(chosen[:, None, None, None], colour.grey(values), values)


class ColourOption(Checked, ABC):
    """Base of the options that change colours: what is drawn for an image, and what is computed with it."""

    @property
    def bounds(self) -> _Bounds:
        """The least and the most of each number that is drawn for an image."""
        return {}

    @property
    def num_channels(self) -> int | None:
        """How many channels an image must have; None: any number."""
        return None

    @property
    def looks_at_the_whole(self) -> bool:
        """Whether what a pixel becomes depends on the others."""
        return "contrast" in self.bounds

    def numbers(self, draws: Draws) -> Tensor:
        """Draw the numbers of each image: float32 (batch, numbers)."""
        if not self.bounds:
            return torch.empty(len(draws.positions), 0)
        return drawn_numbers(draws, f"{type(self).__name__} {IMAGE}", self.bounds)

    @abstractmethod
    def coloured(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Compute images, float32 (batch, channels, height, width), by their numbers; those given stay as they are.

        The numbers are as `numbers` draws them, on the same device.
        """

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded and coloured: float32 of the same size."""
        images = zip(images_of(batch, IMAGE, self), self.numbers(draws), strict=True)
        return with_images(batch, [apply_colours(decoded(image)[None], [self], row[None])[0] for image, row in images])


def apply_colours(images: Tensor, options: Sequence[ColourOption], numbers: Tensor) -> Tensor:
    """Compute options one after the other: float32 of shape (batch, channels, height, width).

    Images are uint8 or floats, 0 to 255; the numbers are those of all options side by side, on the same device.
    """
    # Planes, however the decoder has left the pixels: sums over them are rounded alike then.
    values = images.to(torch.float32, memory_format=torch.contiguous_format)
    columns = torch.split(numbers, [len(option.bounds) for option in options], dim=1)
    for option, of_option in zip(options, columns, strict=True):
        if option.num_channels not in (None, values.shape[1]):
            raise InputError(
                f"{type(option).__name__} cannot take these images.",
                given=f"images of {values.shape[1]} channels",
                expected=f"images of {option.num_channels} channels",
                hint="leave it out, or put it before an augmentation that takes colours away",
            )
        values = option.coloured(values, of_option)
    return values


def with_images(batch: dict[str, Any], images: Sequence[Tensor]) -> dict[str, Any]:
    """Return the batch with other images: one tensor if it had one, else a list."""
    if not images:
        return batch
    return {**batch, IMAGE: torch.stack([*images]) if isinstance(batch[IMAGE], torch.Tensor) else [*images]}


@dataclass(frozen=True)
class NormalizeImage(ColourOption):
    """Map values from one range to another, linearly: normalize_image. Nothing is clipped."""

    original_minval: FiniteFloat
    """The value that becomes `target_minval`."""
    original_maxval: FiniteFloat
    """The value that becomes `target_maxval`."""
    target_minval: FiniteFloat = 0.0
    """The least value of the new range."""
    target_maxval: FiniteFloat = 1.0
    """The largest value of the new range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_minval == self.original_maxval:
            raise InputError(
                "The range of the pixels is empty.",
                given=f"original_minval={self.original_minval}, original_maxval={self.original_maxval}",
                expected="two numbers that differ",
                hint="pixels are 0 to 255: give original_minval=0, original_maxval=255",
            )

    def coloured(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Compute them; nothing is drawn."""
        scale = (self.target_maxval - self.target_minval) / (self.original_maxval - self.original_minval)
        return (images - self.original_minval).mul_(scale).add_(self.target_minval)


@dataclass(frozen=True)
class SubtractChannelMean(ColourOption):
    """Subtract a number from each channel: subtract_channel_mean. Nothing is clipped."""

    means: Annotated[
        tuple[FiniteFloat, ...], Hint("give a mean for each channel, such as means=(123.68, 116.78, 103.94)")
    ]
    """A number for each channel, as large as the values are."""

    @property
    def num_channels(self) -> int:
        """As many as there are means."""
        return len(self.means)

    def coloured(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Compute them; nothing is drawn."""
        # Numbers, not a tensor of them: nothing has to be copied to the device.
        channels = zip(images.unbind(1), self.means, strict=True)
        return torch.stack([channel - mean for channel, mean in channels], dim=1)


@dataclass(frozen=True)
class RgbToGray(ColourOption):
    """Make images grey, of one channel: rgb_to_gray."""

    num_channels: ClassVar[int] = 3

    def coloured(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Compute 0.2989 red + 0.587 green + 0.114 blue; nothing is drawn."""
        return colour.grey(images)


@dataclass(frozen=True)
class RandomRgbToGray(ColourOption):
    """Make some of the images grey, of three equal channels: random_rgb_to_gray."""

    probability: Probability = 0.1
    """The probability that an image becomes grey."""

    bounds: ClassVar[_Bounds] = {"choice": (0.0, 1.0)}
    num_channels: ClassVar[int] = 3

    def coloured(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Compute 0.2989 red + 0.587 green + 0.114 blue of the images whose number is at most the probability."""
        return torch.where(numbers[:, :, None, None] <= self.probability, colour.grey(images), images)


class _Adjustments(ColourOption):
    """Base of those that are operations of `lockstep.images.colour`, each clipped to 0 to 255, in their order."""

    @property
    def num_channels(self) -> int | None:
        """Three for hue and saturation."""
        return 3 if {"hue", "saturation"} & {*self.bounds} else None

    def coloured(self, images: Tensor, numbers: Tensor) -> Tensor:
        for name, number in zip(self.bounds, numbers[..., None, None, None].unbind(1), strict=True):
            # Brightness is said for a range of 1; the others are the same for any range.
            by = number * WHITE if name == "brightness" else number
            images = colour.OPERATIONS[name](images, by).clamp_(0, WHITE)
        return images


@dataclass(frozen=True)
class RandomAdjustBrightness(_Adjustments):
    """Add one number to all of an image: random_adjust_brightness."""

    max_delta: NonNegativeFloat = 0.2
    """The most that is added or taken away, as a share of 255."""

    @property
    def bounds(self) -> _Bounds:
        """What is added, as a share of 255."""
        return {"brightness": (-self.max_delta, self.max_delta)}


@dataclass(frozen=True)
class _Factor(_Adjustments):
    """Base of those that draw a factor."""

    min_delta: NonNegativeFloat = 0.8
    """The least factor."""
    max_delta: NonNegativeFloat = 1.25
    """The largest factor."""

    operation: ClassVar[str]
    """What the factor is of."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ordered("(min_delta, max_delta)", (self.min_delta, self.max_delta))

    @property
    def bounds(self) -> _Bounds:
        """The factor."""
        return {self.operation: (self.min_delta, self.max_delta)}


@dataclass(frozen=True)
class RandomAdjustContrast(_Factor):
    """Scale the distance of the pixels from the mean of their channel: random_adjust_contrast."""

    operation: ClassVar[str] = "contrast"


@dataclass(frozen=True)
class RandomAdjustHue(_Adjustments):
    """Turn the hue of HSV of all of an image: random_adjust_hue."""

    max_delta: Annotated[float, Range(ge=0, le=1)] = 0.02
    """The most that it is turned either way; 1 is all around."""

    @property
    def bounds(self) -> _Bounds:
        """The turn."""
        return {"hue": (-self.max_delta, self.max_delta)}


@dataclass(frozen=True)
class RandomAdjustSaturation(_Factor):
    """Scale the saturation of HSV, up to 1: random_adjust_saturation."""

    operation: ClassVar[str] = "saturation"


_DISTORTIONS: _Bounds = {
    "brightness": (-32 / 255, 32 / 255),
    "saturation": (0.5, 1.5),
    "hue": (-0.2, 0.2),
    "contrast": (0.5, 1.5),
}


@dataclass(frozen=True)
class RandomDistortColor(_Adjustments):
    """Change brightness, saturation, hue and contrast of an image: random_distort_color."""

    color_ordering: Annotated[int, Range(ge=0, le=1)] = 0
    """0: brightness, saturation, hue, contrast; 1: brightness, contrast, saturation, hue."""

    @property
    def bounds(self) -> _Bounds:
        """The least and the most number of each operation, in their order."""
        return {name: _DISTORTIONS[name] for name in colour.INCEPTION_ORDERS[self.color_ordering]}
