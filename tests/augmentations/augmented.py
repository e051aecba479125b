"""Small batches with objects for the tests of augmentations, and the boxes of the reference's tests."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lockstep.images.decode import EncodedImage
from lockstep.ragged import Ragged
from lockstep.randomness import Draws

BOXES = torch.tensor([[0, 0.25, 0.75, 1], [0.25, 0.5, 0.75, 1]])


def draws_of(count: int, seed: int = 0) -> Draws:
    return Draws(seed, np.arange(count))


def batch_of(*images: Any, boxes: Tensor = BOXES, **columns: Tensor) -> dict[str, Any]:
    """These images, each with these objects and their columns; labels number the objects."""
    values = {"boxes": boxes, "labels": torch.arange(len(boxes)), **columns}
    return {"image": [*images], **{name: Ragged.of([value] * len(images)) for name, value in values.items()}}


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (channels, height, width), dtype=np.uint8))


def png(pixels: Tensor) -> EncodedImage:
    """The same image as a file, without loss."""
    file = BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file, "PNG")
    return EncodedImage(file.getvalue(), "photo.png")
