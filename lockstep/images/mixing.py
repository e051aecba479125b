"""Mixup and cutmix: each image is mixed with another one, by numbers drawn where images are read.

The other one stands at the mirrored place of the tower's slice (the last for the first): what a tower mixes depends on
its own examples, not on who hosts it. In a slice of odd length the one in the middle is mixed with itself.

Zhang et al., mixup: Beyond empirical risk minimization, 2018. Yun et al., CutMix, 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from lockstep.checks import Checked, NonNegativeFloat, Probability
from lockstep.errors import InputError
from lockstep.images.augment import image_tensor
from lockstep.images.normalisation import as_floats
from lockstep.randomness import Draws

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

_Floats: TypeAlias = "npt.NDArray[np.float64]"


@dataclass(frozen=True)
class MixDraws(Checked):
    """Add the numbers that `mixed` needs to a batch: float32 (batch, 5) in the field `into`.

    Its columns: the share of an image that stays, and the top, left, bottom and right, in pixels, of the part that the
    other image takes all of. Where both alphas are above 0, an even chance decides how an image is mixed.

    The field holds decoded images: any tensor of shape (batch, channels, height, width).
    """

    mixup: NonNegativeFloat = 0.2
    """The share of an image is drawn from Beta(alpha, alpha) with this alpha; 0 is never."""
    cutmix: NonNegativeFloat = 0.0
    """The share of its area that an image keeps is drawn in the same way; 0 is never."""
    p: Probability = 1.0
    """The probability that an image is mixed."""
    field: str = "image"
    """The images that are mixed; their size alone is read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixup == self.cutmix == 0:
            raise InputError(
                "Nothing is mixed.",
                given="mixup=0, cutmix=0",
                expected="one of them above 0",
                hint="give the alpha of one or of both, or leave the augmentation out",
            )

    @property
    def into(self) -> str:
        """The field that the numbers are in: "image.mix" for "image"."""
        return f"{self.field}.mix"

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its numbers; the images stay as they are."""
        images = image_tensor(batch, self.field, self)
        is_mixed = draws.uniform(f"{self.into} p") < self.p
        is_cut = draws.uniform(f"{self.into} which") < (0.0 if not self.cutmix else 0.5 if self.mixup else 1.0)
        share = np.where(is_mixed & ~is_cut, self._shares(self.mixup, draws), 1.0)
        area = np.where(is_mixed & is_cut, 1 - self._shares(self.cutmix, draws), 0.0)
        top, bottom = self._span("row", images.shape[2], area, draws)
        left, right = self._span("column", images.shape[3], area, draws)
        return {**batch, self.into: torch.from_numpy(np.stack([share, top, left, bottom, right], axis=1)).float()}

    def _shares(self, alpha: float, draws: Draws) -> _Floats:
        """Draw from Beta(alpha, alpha), shape (batch,); 1 if alpha is 0."""
        uniform, angle = draws.uniform(f"{self.into} share"), draws.uniform(f"{self.into} angle")
        return symmetric_beta(uniform, angle, alpha) if alpha else np.ones_like(uniform)

    def _span(self, axis: str, length: int, area: _Floats, draws: Draws) -> tuple[_Floats, _Floats]:
        """Draw where a square of this share of the area begins and ends: about any pixel, and clipped to the image."""
        middle = np.floor(draws.uniform(f"{self.into} {axis}") * length)
        half = np.floor(np.sqrt(area) / 2 * length)
        return np.maximum(middle - half, 0), np.minimum(middle + half, length)


def symmetric_beta(uniform: _Floats, angle: _Floats, alpha: float) -> _Floats:
    """Turn two arrays of uniform numbers in [0, 1) into one of numbers distributed exactly as Beta(alpha, alpha).

    sqrt(nu * (u ** (-2 / nu) - 1)) * cos(2 pi v) has Student's t distribution with nu degrees of freedom (Bailey,
    Polar generation of random variates with the t-distribution, 1994), and (1 + t / sqrt(nu + t ** 2)) / 2 is then of
    Beta(nu / 2, nu / 2).
    """
    cosine = np.cos(2 * np.pi * angle)
    with np.errstate(over="ignore", divide="ignore"):
        square = np.expm1(-np.log1p(-uniform) / alpha) * cosine**2  # t ** 2 / nu; 1 - u is as uniform as u
        beta: _Floats = 0.5 + 0.5 * np.copysign(np.sqrt(1 / (1 + 1 / square)), cosine)
    return beta


def mixed(images: Tensor, labels: Tensor, numbers: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Mix each image with the mirrored one, and its label likewise: to probabilities, which cross entropy takes.

    Args:
        images: of a tower's slice, shape (batch, channels, height, width); uint8, taken as [0, 1], or floats.
        labels: the right classes, whole numbers from 0 to num_classes - 1, shape (batch,).
        numbers: as `MixDraws` draws them, on the same device.
        num_classes: how many classes there are.

    Returns:
        float32 of the shape of the images, and float32 (batch, num_classes).
    """
    _check(images, labels, numbers, num_classes)
    values = as_floats(images)
    others = values.flip(0)
    share, top, left, bottom, right = numbers[:, :, None, None, None].unbind(1)
    height, width = images.shape[2:]
    row = torch.arange(height, device=images.device)[:, None]
    column = torch.arange(width, device=images.device)
    is_cut = (row >= top) & (row < bottom) & (column >= left) & (column < right)
    kept = share * (1 - (bottom - top) * (right - left) / (height * width))
    right_ones = (labels[:, None] == torch.arange(num_classes, device=labels.device)).float()
    probabilities = torch.lerp(right_ones.flip(0), right_ones, kept.flatten()[:, None])
    return torch.where(is_cut, others, torch.lerp(others, values, share)), probabilities


def _check(images: Tensor, labels: Tensor, numbers: Tensor, num_classes: int) -> None:
    known = images.dtype == torch.uint8 or images.is_floating_point()
    shapes = images.ndim == 4 and labels.shape == images.shape[:1] and numbers.shape == (len(images), 5)
    if not known or not shapes or labels.is_floating_point():
        raise InputError(
            "These images cannot be mixed by these numbers.",
            given=f"images of {images.dtype} and shape {tuple(images.shape)}, labels of {labels.dtype} and shape "
            f"{tuple(labels.shape)}, numbers of shape {tuple(numbers.shape)}",
            expected="images of shape (batch, channels, height, width), uint8 or floats; whole numbers of shape "
            "(batch,); numbers of shape (batch, 5)",
            hint="add MixDraws to the augmentations, and pass the field that it names",
        )
    # Elsewhere a look at the labels would have to wait for the device.
    if labels.device.type == "cpu" and ((labels < 0) | (labels >= num_classes)).any():
        raise InputError(
            "A label is not the number of a class.",
            given=f"labels from {int(labels.min())} to {int(labels.max())}",
            expected=f"whole numbers from 0 to {num_classes - 1}: there are {num_classes} classes",
            hint="number the classes from 0, or give num_classes as many as there are",
        )
