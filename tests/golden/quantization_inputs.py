"""What both sides of the recorded quantization-aware training begin with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from slim_nets_inputs import weights

__all__ = ["DELAY", "LEARNING_RATE", "MOMENTUM", "PATH", "RANGES", "STEPS", "images", "targets", "values", "weights"]

PATH = Path(__file__).parent / "quantization_golden.npz"
STEPS, DELAY, LEARNING_RATE, MOMENTUM = 3, 2, 0.05, 0.9
"""Updates, the first of them quantized (counted from 1), the rate of SGD, and the decay of batch norm."""
RANGES = [(-6.0, 6.0), (0.0, 6.0), (-0.3, 2.7), (-1.0, 0.0), (0.0, 0.0), (-1e-3, 5.1), (0.1, 1.3), (-2.0, -0.5)]
"""Lower and upper ends, among them some without 0 that TensorFlow nudges to have it."""

Array = npt.NDArray[np.float32]


def values() -> Array:
    """Values inside and outside the ranges, zeros, and some halfway between two steps of the range from 0 to 6."""
    drawn = np.random.default_rng(1).uniform(-7, 7, 60)
    halves = (np.arange(0, 255, 5) + 0.5) * 6 / 255
    return np.concatenate([drawn, halves, -halves, [0.0, -0.0, 6.0, -6.0]]).astype(np.float32)


def images(step: int) -> Array:
    """Images from -1 to 1, (batch, height, width, 3), others at each step."""
    return np.random.default_rng(step).uniform(-1, 1, (4, 9, 9, 3)).astype(np.float32)


def targets(step: int) -> Array:
    """What the outputs are to be, (batch, classes)."""
    return np.random.default_rng(100 + step).uniform(-1, 1, (4, 5)).astype(np.float32)
