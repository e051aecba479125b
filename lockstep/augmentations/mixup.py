"""Mixup of images with objects (Zhang et al., Bag of freebies for training object detection neural networks, 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from lockstep.augmentations.joining import WithPartners, dtype_of, images_and_objects, join_objects
from lockstep.checks import PositiveFloat, Probability
from lockstep.images.augment import decoded, sides_of
from lockstep.images.mixing import symmetric_beta
from lockstep.images.moves import Region, move
from lockstep.images.objects import Fields, as_ragged, move_objects

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.images.augment import Image
    from lockstep.randomness import Draws


@dataclass(frozen=True)
class MixUp(WithPartners):
    """Mix each image with another one, pixel by pixel; the objects of both stay, each with the weight of its image.

    Both lie at the upper left corner of the result, which is as high and as wide as the larger one; around them is
    black. The field "weights" is multiplied by the share of an object's image; it is added where there is none.
    """

    alpha: PositiveFloat = 1.5
    """The share of an image is drawn from Beta(alpha, alpha)."""
    p: Probability = 1.0
    """The probability that an image is mixed; else it stays as it is."""
    field: str = "image"

    num_partners: ClassVar[int] = 1

    def __call__(self, batch: Fields, draws: Draws, partners: Sequence[Fields] = ()) -> Fields:
        """Return the batch with its images mixed, as a list of images."""
        rows = np.flatnonzero(self.needs_partners(draws))
        images = [*images_and_objects(batch, self.field, self)]
        if not len(rows):
            return _weighted(batch, torch.ones(len(images)))
        self.check_partners(partners)
        (partner,) = partners
        others = images_and_objects(partner, self.field, self)
        sides, their_sides = sides_of(images), sides_of(others)
        larger = sides.copy()
        larger[rows] = np.maximum(sides[rows], their_sides)
        shares = np.ones(len(images))
        shares[rows] = self._shares(draws)[rows]
        for row, other in zip(rows.tolist(), others, strict=True):
            images[row] = _mixed(images[row], other, float(shares[row]), larger[row].tolist())
        own, theirs = (
            move_objects(
                fields,
                (move(each, Region(0, 0, *to)) for each, to in zip(given.tolist(), after.tolist(), strict=True)),
            )
            for fields, given, after in ((batch, sides, larger), (partner, their_sides, larger[rows]))
        )
        own = _weighted(own, torch.from_numpy(shares).float())
        theirs = _weighted(theirs, torch.from_numpy(1 - shares[rows]).float())
        return {**join_objects(own, [theirs], torch.from_numpy(rows)), self.field: images}

    def _shares(self, draws: Draws) -> Any:
        """Draw the share that each image keeps, shape (batch,)."""
        column = f"MixUp {self.field}"
        return symmetric_beta(draws.uniform(f"{column} share"), draws.uniform(f"{column} angle"), self.alpha)


def _weighted(batch: Fields, shares: Tensor) -> Fields:
    """Multiply the weights of objects by the share of their image, shape (batch,)."""
    boxes = as_ragged(batch["boxes"])
    weights = shares[boxes.owner]
    if "weights" in batch:
        weights = weights * as_ragged(batch["weights"]).values
    return {**batch, "weights": boxes.replaced(weights)}


def _mixed(image: Image, other: Image, share: float, sides: Sequence[int]) -> Tensor:
    """Add up shares of two images at the upper left corner of one of these sides; bytes are rounded."""
    mixed = torch.zeros(*sides, 3).permute(2, 0, 1)
    for pixels, weight in ((decoded(image), share), (decoded(other), 1 - share)):
        mixed[:, : pixels.shape[1], : pixels.shape[2]].add_(pixels, alpha=weight)
    dtype = dtype_of((image, other))
    return mixed if dtype.is_floating_point else mixed.round_().to(dtype)
