"""Augmentation policies: a few operations on each image, drawn from a table, by the laws of torchvision.

Cubuk et al., RandAugment: Practical automated data augmentation with a reduced search space, 2019. Müller, Hutter:
TrivialAugment: Tuning-free yet state-of-the-art data augmentation, 2021.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lockstep.checks import check_whole
from lockstep.errors import InputError
from lockstep.images import affine
from lockstep.images import image_operations as operations
from lockstep.images.arguments import check_no_places, colour_images
from lockstep.randomness import Draws

_Int64s = npt.NDArray[np.int64]


class Operation(NamedTuple):
    """One row of a policy's table."""

    apply: Callable[[Tensor, float], Tensor]
    """From an image, uint8 of shape (3, height, width), and an amount to another image."""
    amount: Callable[[float, int, int], float]
    """From a strength of 0 to 1, the height and the width of the image to the amount."""
    signed: bool = False
    """Whether the amount is negated for half of the images."""


def _table(
    slope: float, shift: Callable[[int], float], degrees: float, factor: float, bits: int
) -> dict[str, Operation]:
    """The operations, by their amounts at full strength; a shift is in pixels, by the length of the side."""

    def factors(change: Callable[[Tensor, float], Tensor]) -> Operation:
        return Operation(lambda image, amount: change(image, 1 + amount), lambda s, h, w: s * factor, signed=True)

    return {
        "Identity": Operation(lambda image, _: image, _nothing),
        "ShearX": Operation(affine.sheared_sideways, lambda s, h, w: s * slope, signed=True),
        "ShearY": Operation(affine.sheared_upwards, lambda s, h, w: s * slope, signed=True),
        "TranslateX": Operation(affine.shifted_right, lambda s, h, w: s * shift(w), signed=True),
        "TranslateY": Operation(affine.shifted_down, lambda s, h, w: s * shift(h), signed=True),
        "Rotate": Operation(affine.turned, lambda s, h, w: s * degrees, signed=True),
        "Brightness": factors(operations.brightened),
        "Color": factors(operations.saturated),
        "Contrast": factors(operations.contrasted),
        "Sharpness": factors(operations.sharpened),
        "Posterize": Operation(operations.posterized, lambda s, h, w: round(8 - s * bits)),
        "Solarize": Operation(operations.solarized, lambda s, h, w: 255 * (1 - s)),
        "AutoContrast": Operation(lambda image, _: operations.autocontrasted(image), _nothing),
        "Equalize": Operation(lambda image, _: operations.equalized(image), _nothing),
    }


def _nothing(strength: float, height: int, width: int) -> float:
    return 0.0


RANDAUGMENT = _table(slope=0.3, shift=lambda side: 150 / 331 * side, degrees=30, factor=0.9, bits=4)
"""By torchvision's names, in its order."""

TRIVIALAUGMENT = _table(slope=0.99, shift=lambda side: 32, degrees=135, factor=0.99, bits=6)
"""The wide one, by torchvision's names, in its order."""


@dataclass(frozen=True)
class RandAugment:
    """Some operations on each image, one after the other, all of one strength.

    The field holds decoded images: uint8 of shape (batch, 3, height, width).

    Raises:
        InputError: a parameter is out of range.
    """

    num_ops: int = 2
    """How many operations are drawn for an image; one may be drawn again."""
    magnitude: int = 9
    """The strength: 0 is the least, num_bins - 1 the most."""
    num_bins: int = 31
    """Into how many steps the strength is divided."""
    field: str = "image"

    def __post_init__(self) -> None:
        check_whole("num_ops", self.num_ops, least=1)
        check_whole("num_bins", self.num_bins, least=2)
        check_whole("magnitude", self.magnitude, least=0)
        if self.magnitude >= self.num_bins:
            raise InputError(
                "magnitude is out of range.",
                given=f"magnitude={self.magnitude}, num_bins={self.num_bins}",
                expected=f"a whole number from 0 to {self.num_bins - 1}",
                hint="give a lower magnitude, or more bins",
            )

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images changed; the images given stay as they are.

        Raises:
            InputError: the field holds no decoded images; or there are places of objects: boxes, masks, keypoints.
        """
        images = colour_images(batch, self.field, self)
        check_no_places(batch, self)
        strengths = np.full(len(images), self.magnitude / (self.num_bins - 1))
        for number in range(self.num_ops):
            images = _changed(images, RANDAUGMENT, strengths, draws, f"RandAugment {self.field} {number}")
        return {**batch, self.field: images}


@dataclass(frozen=True)
class TrivialAugmentWide:
    """One operation on each image, of any strength.

    The field holds decoded images: uint8 of shape (batch, 3, height, width).

    Raises:
        InputError: a parameter is out of range.
    """

    num_bins: int = 31
    """Into how many steps the strength is divided."""
    field: str = "image"

    def __post_init__(self) -> None:
        check_whole("num_bins", self.num_bins, least=2)

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images changed; the images given stay as they are.

        Raises:
            InputError: the field holds no decoded images; or there are places of objects: boxes, masks, keypoints.
        """
        images = colour_images(batch, self.field, self)
        check_no_places(batch, self)
        column = f"TrivialAugmentWide {self.field}"
        strengths = draws.integers(f"{column} strength", 0, self.num_bins) / (self.num_bins - 1)
        return {**batch, self.field: _changed(images, TRIVIALAUGMENT, strengths, draws, column)}


def _changed(
    images: Tensor, table: dict[str, Operation], strengths: npt.NDArray[np.float64], draws: Draws, column: str
) -> Tensor:
    """One operation on each image.

    One by one: an image stays in its cache, and most operations look at all of an image before they change it.
    """
    rows = [*table.values()]
    chosen = draws.integers(f"{column} operation", 0, len(rows))
    negative = draws.uniform(f"{column} sign") < 0.5
    changed = images.clone()
    for image, number, strength, turn in zip(changed, chosen, strengths.tolist(), negative, strict=True):
        operation = rows[number]
        amount = operation.amount(strength, *image.shape[1:])
        image.copy_(operation.apply(image, -amount if operation.signed and turn else amount))
    return changed
