"""Images as they are: decoded, and neither cropped nor resized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.images.crops import encoded_images
from lockstep.randomness import Draws


@dataclass(frozen=True)
class Decode:
    """All of each image at its own size: for models that take images of several sizes, as detectors do.

    The field becomes a list of uint8 tensors of shape (3, height, width). To have one size, crop or resize instead.
    """

    field: str = "image"

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded; nothing is drawn.

        Raises:
            InputError: the field holds no encoded images.
            DataError: an image cannot be decoded.
        """
        return {**batch, self.field: [image.decode() for image in encoded_images(batch, self.field, self)]}
