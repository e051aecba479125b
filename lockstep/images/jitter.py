"""Torchvision's `ColorJitter` and `RandomGrayscale`: numbers are drawn where images are read, applied on any device.

Brightness and contrast are factors, contrast is about the mean grey, saturation is away from grey; values are clipped
after each of them. `colour` has those of the Inception systems, which differ in all of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Annotated, Any

import torch

from lockstep.checks import Checked, NonNegativeFloat, Probability, Range
from lockstep.errors import InputError
from lockstep.images.colour import Operations, Order, drawn_numbers, in_chosen_orders, turned_hue
from lockstep.images.normalisation import as_floats, mean_in_steps
from lockstep.randomness import Draws

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class JitterDraws(Checked):
    """Add the numbers that `jittered` needs to a batch: float32 (batch, 5) in the field `into`.

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
    """The images that are coloured; it is not read."""

    @property
    def into(self) -> str:
        """The field that the numbers are in: "image.jitter" for "image"."""
        return f"{self.field}.jitter"

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its numbers; the images stay as they are."""
        bounds = {
            name: (max(0.0, 1 - getattr(self, name)), 1 + getattr(self, name))
            for name in ("brightness", "contrast", "saturation")
        }
        bounds |= {"hue": (-self.hue, self.hue), "order": (0.0, 1.0)}
        return {**batch, self.into: drawn_numbers(draws, self.into, bounds)}


def _blended(values: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(other, values, factor).clamp_(0, 1)


def _brightened(values: Tensor, factor: Tensor) -> Tensor:
    return (values * factor).clamp_(0, 1)


def _contrasted(values: Tensor, factor: Tensor) -> Tensor:
    return _blended(values, mean_in_steps(grey(values)), factor)


def _saturated(values: Tensor, factor: Tensor) -> Tensor:
    return _blended(values, grey(values), factor)


_OPERATIONS: Operations = {
    "brightness": _brightened,
    "contrast": _contrasted,
    "saturation": _saturated,
    "hue": turned_hue,
}

JITTER_ORDERS: tuple[Order, ...] = (*permutations(_OPERATIONS),)
"""All orders of the four operations: torchvision draws one of them for each image."""


def jittered(images: Tensor, numbers: Tensor, orders: tuple[Order, ...] = JITTER_ORDERS) -> Tensor:
    """Colour each image by its own numbers; float32 in [0, 1] of the same shape.

    Args:
        images: uint8 of shape (batch, 3, height, width), or floats in [0, 1].
        numbers: as `JitterDraws` draws them, on the same device.
        orders: the operations of each order; all of the same length. An accelerator computes each operation once a
            step where all orders agree, as `JITTER_ORDERS[:1]` does, instead of all that stand there in one of them.
    """
    return in_chosen_orders(images, numbers, orders, _OPERATIONS, drawn_by="JitterDraws")


@dataclass(frozen=True)
class GreyDraws(Checked):
    """Choose which images become grey: bools of shape (batch,) in the field `into`, for `greyed`."""

    p: Probability = 0.1
    """The probability that an image becomes grey."""
    field: str = "image"
    """The images that may become grey; it is not read."""

    @property
    def into(self) -> str:
        """The field that the choice is in: "image.grey" for "image"."""
        return f"{self.field}.grey"

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with the choice; the images stay as they are."""
        return {**batch, self.into: torch.from_numpy(draws.uniform(self.into) < self.p)}


def grey(images: Tensor) -> Tensor:
    """Compute 0.2989 red + 0.587 green + 0.114 blue: float32 of shape (..., 1, height, width).

    Args:
        images: uint8 or floats of shape (..., 3, height, width).
    """
    red, green, blue = images.unbind(-3)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).unsqueeze_(-3)


def greyed(images: Tensor, chosen: Tensor) -> Tensor:
    """Make the chosen images grey; float32 of the same shape.

    Args:
        images: uint8 of shape (batch, 3, height, width), taken as [0, 1], or floats.
        chosen: as `GreyDraws` draws them, on the same device.
    """
    known = images.dtype == torch.uint8 or images.is_floating_point()
    shapes = images.ndim == 4 and images.shape[1] == 3 and chosen.shape == images.shape[:1]
    if not known or not shapes or chosen.dtype != torch.bool:
        raise InputError(
            "These images cannot become grey by this choice.",
            given=f"images of {images.dtype} and shape {tuple(images.shape)}, a choice of {chosen.dtype} and shape "
            f"{tuple(chosen.shape)}",
            expected="images of shape (batch, 3, height, width), uint8 or floats; bools of shape (batch,)",
            hint="add GreyDraws to the augmentations, and pass the field that it names",
        )
    values = as_floats(images)
    return torch.where(chosen[:, None, None, None], grey(values), values)
