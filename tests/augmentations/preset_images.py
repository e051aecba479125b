"""Images of slim's presets, as TensorFlow preprocessed them, and small noise."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lockstep.images.decode import Decoding, EncodedImage
from lockstep.randomness import Draws

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "presets_golden.npz")


def draws(count: int, start: int = 0) -> Draws:
    return Draws(5, np.arange(start, start + count))


def first_channels(array: Any) -> Tensor:
    return torch.from_numpy(array).movedim(-1, -3)


def encoded(pixels: Any, source: str = "noise") -> EncodedImage:
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return EncodedImage(written.getvalue(), source, Decoding("pillow"))


def some_images(count: int) -> list[EncodedImage]:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3)).astype(np.uint8)
    return [encoded(noise[: 10 + row, : 30 - row], f"{row}.png") for row in range(count)]
