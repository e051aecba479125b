"""The recorded numbers of the update, and what it means to match them.

The recording is TensorFlow's, TF-Slim's and Keras's (make_update_golden.py). In float64 the rules have to be the same
to nine digits. In float32 each side rounds in its own order, so that the first step agrees to 1e-6 and the twentieth to
2e-5; TensorFlow rounds the settings too, and its 1 - beta2 of Adam is 1.3e-5 off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from mnist_reference import golden
from torch import Tensor

RECORDED = golden("update_golden.json.gz")
BOTH = pytest.mark.parametrize("dtype", ["float64", "float32"])
TOLERANCE = {"float64": 1e-9, "float32": 1e-6}
LATER_TOLERANCE = {"float64": 1e-9, "float32": 2e-5}
"""After the first step."""

Settings = Mapping[str, Any]
Named = Mapping[str, Any]


def assert_close(ours: Any, recorded: Any, tolerance: float, scale: float = 0.0) -> None:
    """Relative to the largest number there: what is recorded as zeros has to be zeros.

    Args:
        scale: the largest number of those that are subtracted to give these, where it is larger.
    """
    given, expected = np.asarray(ours, np.float64), np.asarray(recorded, np.float64)
    assert given.shape == expected.shape
    assert np.abs(given - expected).max() <= tolerance * max(scale, np.abs(expected).max()), (given, expected)


def tensors(values: Named) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(value)) for name, value in values.items()}
