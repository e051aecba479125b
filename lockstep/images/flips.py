"""Flips of whole batches of images that have their final size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.errors import InputError
from lockstep.images.arguments import check_no_places, check_probability
from lockstep.randomness import Draws


@dataclass(frozen=True)
class HorizontalFlip:
    """Exchange left and right of some of the images.

    The field holds images of shape (batch, channels, height, width) and any dtype.

    Raises:
        InputError: the probability is out of range.
    """

    p: float = 0.5
    """The probability that an image is flipped, from 0 to 1."""
    field: str = "image"

    def __post_init__(self) -> None:
        check_probability("p", self.p)

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with some of its images flipped; the images given stay as they are.

        Raises:
            InputError: the batch has no such field, or it holds no images of four dimensions; or there are places of
                objects: boxes, masks, keypoints.
        """
        images = batch.get(self.field)
        if not isinstance(images, torch.Tensor) or images.ndim != 4:
            raise self._without_images(batch)
        check_no_places(batch, self)
        flipped = images.clone()
        # Row by row: to gather and scatter them at once takes several times as long.
        for row in np.flatnonzero(draws.uniform(f"HorizontalFlip {self.field}") < self.p).tolist():
            flipped[row] = images[row].flip(-1)
        return {**batch, self.field: flipped}

    def _without_images(self, batch: dict[str, Any]) -> InputError:
        images = batch.get(self.field)
        shape = f"a tensor of shape {tuple(images.shape)}" if isinstance(images, torch.Tensor) else ""
        found = shape or (type(images).__name__ if self.field in batch else "missing")
        return InputError(
            f"HorizontalFlip finds no images in the field {self.field!r}.",
            given=f"{self.field!r} is {found}; the fields are {', '.join(batch)}",
            expected="a tensor of shape (batch, channels, height, width)",
            hint="crop or resize encoded images first, or name the field: HorizontalFlip(field=...)",
        )
