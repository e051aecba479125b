"""Augmentation policies: RandAugment and TrivialAugment draw operations for each image from a table.

Tables and operations are torchvision's. Cubuk et al., RandAugment: Practical automated data augmentation with a reduced
search space, 2019. Müller, Hutter: TrivialAugment: Tuning-free yet state-of-the-art data augmentation, 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import torch

from lockstep.augmentations.augment import check_no_locations
from lockstep.checks import Checked, NonNegativeInt, PositiveInt, Range
from lockstep.errors import InputError
from lockstep.images.colour import grey
from lockstep.images.fields import image_tensor
from lockstep.images.moves import Float64s
from lockstep.randomness import Draws

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RandAugment(Checked):
    """Apply some operations to each image, one after the other, all of one strength.

    The field holds decoded images: uint8 of shape (batch, 3, height, width).
    """

    num_ops: PositiveInt = 2
    """How many operations are drawn for an image; the same one may be drawn twice."""
    magnitude: NonNegativeInt = 9
    """The strength, from 0 to num_bins - 1."""
    num_bins: Annotated[int, Range(ge=2)] = 31
    """The number of strengths."""
    field: str = "image"
    """The field of a batch that holds the images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.magnitude >= self.num_bins:
            raise InputError(
                "magnitude is out of range.",
                given=f"magnitude={self.magnitude}, num_bins={self.num_bins}",
                expected=f"a whole number from 0 to {self.num_bins - 1}",
                hint="give a lower magnitude, or more bins",
            )

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images changed; the images given stay as they are."""
        images = image_tensor(batch, self.field, self, colour=True)
        check_no_locations(batch, self)
        strengths = np.full(len(images), self.magnitude / (self.num_bins - 1))
        for number in range(self.num_ops):
            images = _augmented(images, RANDAUGMENT, strengths, draws, f"RandAugment {self.field} {number}")
        return {**batch, self.field: images}


@dataclass(frozen=True)
class TrivialAugmentWide(Checked):
    """Apply one operation of any strength to each image.

    The field holds decoded images: uint8 of shape (batch, 3, height, width).
    """

    num_bins: Annotated[int, Range(ge=2)] = 31
    """The number of strengths."""
    field: str = "image"
    """The field of a batch that holds the images."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images changed; the images given stay as they are."""
        images = image_tensor(batch, self.field, self, colour=True)
        check_no_locations(batch, self)
        column = f"TrivialAugmentWide {self.field}"
        strengths = draws.integers(f"{column} strength", 0, self.num_bins) / (self.num_bins - 1)
        return {**batch, self.field: _augmented(images, TRIVIALAUGMENT, strengths, draws, column)}


class Operation(NamedTuple):
    """One row of a policy's table."""

    apply: Callable[[Tensor, float], Tensor]
    """Maps an image, uint8 of shape (3, height, width), and an amount to an image, which may be the same one."""
    amount: Callable[[float, int, int], float]
    """Maps a strength from 0 to 1, the height and the width of the image to the amount."""
    signed: bool = False
    """The amount is negated for half of the images."""


def _augmented(images: Tensor, table: dict[str, Operation], strengths: Float64s, draws: Draws, column: str) -> Tensor:
    """Apply one operation to each image.

    One by one: an image stays in its cache, and most operations look at all of an image before they change it.
    """
    rows = [*table.values()]
    chosen = draws.integers(f"{column} operation", 0, len(rows))
    negative = draws.uniform(f"{column} sign") < 0.5
    changed = images.clone()
    for image, number, strength, negate in zip(changed, chosen, strengths.tolist(), negative, strict=True):
        operation = rows[number]
        amount = operation.amount(strength, *image.shape[1:])
        image.copy_(operation.apply(image, -amount if operation.signed and negate else amount))
    return changed


# Operations on shape: each pixel of the result is the nearest one of the image, black outside of it. A place that is as
# near to one pixel as to another may be read from the other one in torchvision.


def _shear_x(image: Tensor, slope: float) -> Tensor:
    """Move each row to the left by the slope (columns per row) times its distance from the top."""
    rows, columns = _grid(image)
    return _nearest(image, rows, columns + slope * (rows + 0.5))


def _shear_y(image: Tensor, slope: float) -> Tensor:
    """Move each column up by the slope (rows per column) times its distance from the left side."""
    rows, columns = _grid(image)
    return _nearest(image, rows + slope * (columns + 0.5), columns)


def _translate_x(image: Tensor, pixels: float) -> Tensor:
    """Move to the right by whole pixels: the number is rounded towards 0."""
    shifted, by = torch.zeros_like(image), int(pixels)
    width = image.shape[2]
    shifted[:, :, max(by, 0) : max(width + by, 0)] = image[:, :, max(-by, 0) : max(width - by, 0)]
    return shifted


def _translate_y(image: Tensor, pixels: float) -> Tensor:
    """Move down by whole pixels: the number is rounded towards 0."""
    return _translate_x(image.transpose(1, 2), pixels).transpose(1, 2)


def _rotate(image: Tensor, degrees: float) -> Tensor:
    """Turn about the middle, anticlockwise."""
    rows, columns = _grid(image)
    middle_row, middle_column = (image.shape[1] - 1) / 2, (image.shape[2] - 1) / 2
    down, right = rows - middle_row, columns - middle_column
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return _nearest(image, middle_row + sine * right + cosine * down, middle_column + cosine * right - sine * down)


def _grid(image: Tensor) -> tuple[Float64s, Float64s]:
    """Row numbers, shape (height, 1), and column numbers, shape (1, width)."""
    height, width = image.shape[1:]
    return np.arange(height, dtype=np.float64)[:, None], np.arange(width, dtype=np.float64)[None]


def _nearest(image: Tensor, rows: Float64s, columns: Float64s) -> Tensor:
    """Read the pixels nearest to these places, which broadcast to (height, width)."""
    height, width = image.shape[1:]
    row, column = np.rint(rows).astype(np.int64), np.rint(columns).astype(np.int64)
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    places = torch.from_numpy(np.where(inside, row * width + column, 0)).view(1, -1)
    # To gather is several times as fast as to index.
    read = image.reshape(len(image), -1).gather(1, places.expand(len(image), -1)).view_as(image)
    return read.mul_(torch.from_numpy(inside))


# Operations on colours. Results that are not whole are cut off, not rounded: so does torchvision, and its policies were
# tuned with it. Where a result is whole but for the last bit of a float, the two may differ by 1.


def _brightness(image: Tensor, factor: float) -> Tensor:
    return image.mul(factor).clamp_(0, 255).to(torch.uint8)


def _color(image: Tensor, factor: float) -> Tensor:
    """Move away from grey by a factor of 0 or more: 0 is grey, 1 changes nothing."""
    return _blend(image, grey(image).floor_(), factor)


def _contrast(image: Tensor, factor: float) -> Tensor:
    """Move away from the mean grey by a factor of 0 or more."""
    # A sum of whole numbers is exact: the same for any number of threads.
    mean = grey(image).floor_().sum(dtype=torch.float64) / image[0].numel()
    return _blend(image, mean.float(), factor)


def _sharpness(image: Tensor, factor: float) -> Tensor:
    """Move away from a blurred image by a factor of 0 or more: 0 is blurred, 1 changes nothing. The border stays."""
    if min(image.shape[1:]) < 3:
        return image
    values = image.float()
    inner = values[:, 1:-1, 1:-1]
    rows = values[:, :-2] + values[:, 1:-1] + values[:, 2:]
    # The middle pixel counts five times, all 13 of them whole numbers. A convolution takes ten times as long.
    blurred = rows[:, :, :-2].add(rows[:, :, 1:-1]).add_(rows[:, :, 2:]).add_(inner, alpha=4).mul_(1 / 13).round_()
    inner.add_(blurred.sub_(inner), alpha=1 - factor)
    return values.clamp_(0, 255).to(torch.uint8)


def _posterize(image: Tensor, bits: float) -> Tensor:
    """Keep the upper bits of each value; a whole number from 0 to 8."""
    return image & (0xFF & 0xFF << (8 - int(bits)))


def _solarize(image: Tensor, threshold: float) -> Tensor:
    """Invert each value that is not below a threshold from 0 to 255, which is rounded to 32 bits."""
    # By numpy, which compares bytes many times as fast.
    chosen = image.numpy() >= math.ceil(np.float32(threshold))
    return image ^ torch.from_numpy(chosen.view(np.uint8) * np.uint8(255))


def _autocontrast(image: Tensor, _: float) -> Tensor:
    """Stretch each channel to all of 0 to 255; one that has a single value stays."""
    low, high = image.amin((1, 2), keepdim=True).float(), image.amax((1, 2), keepdim=True).float()
    flat = low == high
    scale = torch.where(flat, 1, (high - low) * (1 / 255))
    return image.sub(torch.where(flat, 0, low)).div_(scale).clamp_(0, 255).to(torch.uint8)


def _equalize(image: Tensor, _: float) -> Tensor:
    """Make the histogram of each channel as flat as can be, by the rule of Pillow's `ImageOps.equalize`."""
    return torch.stack([_equalized_channel(channel) for channel in image])


def _equalized_channel(channel: Tensor) -> Tensor:
    counts = torch.bincount(channel.flatten(), minlength=256)
    step = (channel.numel() - int(counts[int(channel.max())])) // 255
    if step == 0:
        return channel
    below = counts.cumsum(0) - counts
    table = ((below + step // 2) // step).clamp_(max=255).to(torch.uint8)
    return torch.from_numpy(table.numpy().take(channel.numpy()))


def _blend(image: Tensor, other: Tensor, ratio: float) -> Tensor:
    return image.mul(ratio).add_(other, alpha=1 - ratio).clamp_(0, 255).to(torch.uint8)


def _table(
    slope: float, shift: Callable[[int], float], degrees: float, factor: float, bits: int
) -> dict[str, Operation]:
    """List torchvision's operations, in its order, by their amounts at full strength.

    A shift is in pixels, by the length of the side.
    """

    def factors(change: Callable[[Tensor, float], Tensor]) -> Operation:
        return Operation(lambda image, amount: change(image, 1 + amount), lambda s, h, w: s * factor, signed=True)

    return {
        "Identity": Operation(lambda image, _: image, _no_amount),
        "ShearX": Operation(_shear_x, lambda s, h, w: s * slope, signed=True),
        "ShearY": Operation(_shear_y, lambda s, h, w: s * slope, signed=True),
        "TranslateX": Operation(_translate_x, lambda s, h, w: s * shift(w), signed=True),
        "TranslateY": Operation(_translate_y, lambda s, h, w: s * shift(h), signed=True),
        "Rotate": Operation(_rotate, lambda s, h, w: s * degrees, signed=True),
        "Brightness": factors(_brightness),
        "Color": factors(_color),
        "Contrast": factors(_contrast),
        "Sharpness": factors(_sharpness),
        "Posterize": Operation(_posterize, lambda s, h, w: round(8 - s * bits)),
        "Solarize": Operation(_solarize, lambda s, h, w: 255 * (1 - s)),
        "AutoContrast": Operation(_autocontrast, _no_amount),
        "Equalize": Operation(_equalize, _no_amount),
    }


def _no_amount(strength: float, height: int, width: int) -> float:
    return 0.0


RANDAUGMENT = _table(slope=0.3, shift=lambda side: 150 / 331 * side, degrees=30, factor=0.9, bits=4)
TRIVIALAUGMENT = _table(slope=0.99, shift=lambda side: 32, degrees=135, factor=0.99, bits=6)
