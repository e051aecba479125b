"""A trained detector as a module that takes one image and returns its objects, as it is exported."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lockstep.detection.boxes import clip
from lockstep.recipes.tasks import network_input


class ImageDetector(nn.Module):
    """A detector that takes one image: uint8 (3, height, width), red, green and blue, of the size it is traced for.

    It returns float32 boxes (n, 4) of top, left, bottom and right in pixels of that image, float32 scores (n,), int64
    labels (n,) from 1 on, and the number of them, int64; the best first, and below them rows of zeros up to the most
    that there may be.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Detect objects."""
        detector: Any = self.model
        inputs = network_input(detector, image[None].float())
        (found,) = detector.postprocess(detector(inputs, None))
        height, width = image.shape[1:]
        return clip(found.boxes, (height, width)), found.scores, found.labels, (found.labels > 0).sum()
