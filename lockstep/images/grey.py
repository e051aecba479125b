"""Grey images: the brightness that people see, by torchvision's weights of red, green and blue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import InputError
from lockstep.images.arguments import check_probability
from lockstep.images.colour import as_floats
from lockstep.randomness import Draws


@dataclass(frozen=True)
class GreyDraws:
    """Choose which images become grey: bools of shape (batch,) in the field `into`, for `greyed`.

    Raises:
        InputError: the probability is out of range.
    """

    p: float = 0.1
    """The probability that an image becomes grey, from 0 to 1."""
    field: str = "image"
    """The images that are meant; it is not read."""

    def __post_init__(self) -> None:
        check_probability("p", self.p)

    @property
    def into(self) -> str:
        """The field that the choice is in: "image.grey" for "image"."""
        return f"{self.field}.grey"

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with the choice; the images stay as they are."""
        return {**batch, self.into: torch.from_numpy(draws.uniform(self.into) < self.p)}


def grey(images: Tensor) -> Tensor:
    """0.2989 red + 0.587 green + 0.114 blue: float32 of shape (..., 1, height, width).

    Args:
        images: uint8 or floats of shape (..., 3, height, width).
    """
    red, green, blue = images.unbind(-3)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).unsqueeze_(-3)


def greyed(images: Tensor, chosen: Tensor) -> Tensor:
    """The images with those that were chosen in grey; float32 of the same shape.

    Args:
        images: uint8 of shape (batch, 3, height, width), taken as [0, 1], or floats.
        chosen: as `GreyDraws` draws them, on the same device.

    Raises:
        InputError: the shapes or types do not fit.
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
