"""The colour options of TensorFlow's object detection API: what a pixel becomes depends on numbers of its image.

Images are taken as 0 to 255, and become float32 in that range: all but `NormalizeImage` and `SubtractChannelMean` end
at it, as in the releases of 2018. Those of 2017 added a brightness meant for a range of 1 to values up to 255, and
clipped nothing. Where nothing after them in a list depends on it, they can wait for the device: see `deferring`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

import torch

from lockstep.checks import Checked, FiniteFloat, Hint, NonNegativeFloat, Probability, Range, ordered
from lockstep.errors import InputError
from lockstep.images.augment import decoded, images_of
from lockstep.images.colour import INCEPTION_ORDERS, OPERATIONS, drawn_numbers
from lockstep.images.jitter import grey

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.randomness import Draws

_Bounds: TypeAlias = Mapping[str, tuple[float, float]]

IMAGE = "image"
WHITE = 255.0


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
        """Compute the images with their numbers; those given stay as they are.

        Args:
            images: float32 of shape (batch, channels, height, width).
            numbers: as `numbers` draws them, on the same device.
        """

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded and coloured: float32 of the same size."""
        images = zip(images_of(batch, IMAGE, self), self.numbers(draws), strict=True)
        return with_images(batch, [apply_colours(decoded(image)[None], [self], row[None])[0] for image, row in images])


def apply_colours(images: Tensor, options: Sequence[ColourOption], numbers: Tensor) -> Tensor:
    """Compute options one after the other: float32 of shape (batch, channels, height, width).

    Args:
        images: uint8 or floats, 0 to 255.
        options: in their order.
        numbers: of all options side by side, on the same device.
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
    original_maxval: FiniteFloat
    target_minval: FiniteFloat = 0.0
    target_maxval: FiniteFloat = 1.0

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
        return grey(images)


@dataclass(frozen=True)
class RandomRgbToGray(ColourOption):
    """Make some of the images grey, of three equal channels: random_rgb_to_gray."""

    probability: Probability = 0.1
    """The probability that an image becomes grey."""

    bounds: ClassVar[_Bounds] = {"choice": (0.0, 1.0)}
    num_channels: ClassVar[int] = 3

    def coloured(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Compute 0.2989 red + 0.587 green + 0.114 blue of the images whose number is at most the probability."""
        return torch.where(numbers[:, :, None, None] <= self.probability, grey(images), images)


class _Adjustments(ColourOption):
    """Base of those that are operations of `lockstep.images.colour`, each clipped to 0 to 255, in their order."""

    @property
    def num_channels(self) -> int | None:
        """Three for hue and saturation."""
        return 3 if {"hue", "saturation"} & {*self.bounds} else None

    def coloured(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Compute them one after the other."""
        for name, number in zip(self.bounds, numbers[..., None, None, None].unbind(1), strict=True):
            # Brightness is said for a range of 1; the others are the same for any range.
            by = number * WHITE if name == "brightness" else number
            images = OPERATIONS[name](images, by).clamp_(0, WHITE)
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
        """Those of each operation, in their order."""
        return {name: _DISTORTIONS[name] for name in INCEPTION_ORDERS[self.color_ordering]}
