"""What both sides of the recorded nets of TF-Slim begin with: images, and weights that follow from names alone."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

PATH = Path(__file__).parent / "slim_nets_golden.npz"
IMAGE = (75, 91)
"""Odd and even sizes, so that TensorFlow's padding is not symmetric everywhere."""
NUM_CLASSES = 3
SAMPLES = 24
BATCH_NORM = {"decay": 0.9997, "epsilon": 0.001, "center": True, "scale": True}

Array = npt.NDArray[np.float32]


def images() -> Array:
    """Two images from -1 to 1, (batch, height, width, 3)."""
    return np.random.default_rng(0).uniform(-1, 1, (2, *IMAGE, 3)).astype(np.float32)


def weights(name: str, shape: Sequence[int]) -> Array:
    """The value of a variable, by its name; activations keep their size from layer to layer."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).random(shape, dtype=np.float32)
    if name.endswith(("/gamma", "/moving_variance")):
        return drawn + np.float32(0.5)
    if name.endswith(("/beta", "/biases", "/moving_mean")):
        return (drawn - np.float32(0.5)) / np.float32(5)
    inputs = np.prod(shape[:2] if name.endswith("depthwise_weights") else shape[:-1])
    return (drawn - np.float32(0.5)) * np.float32(np.sqrt(24 / inputs))


def sample(values: Array) -> Array:
    """A few values of a map, spread over it, (batch, height, width, channels)."""
    return values.reshape(-1)[np.linspace(0, values.size - 1, SAMPLES).astype(np.int64)]
