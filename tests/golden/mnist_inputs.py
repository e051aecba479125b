"""What the reference run and ours start from: initial weights, images, settings. Numpy alone, read by both sides.

Everything here is in TensorFlow's layout: images (batch, height, width, channel), convolution kernels
(height, width, in, out), matrices (in, out), and features flattened in the order height, width, channel.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]

HERE = Path(__file__).parent
# In float32 a single ReLU that rounding turns on or off shows in the fifth digit of the loss some steps later. With
# this seed and a rate of 0.05 none does: twelve runs from weights moved by 3e-7, which is more than rounding, agreed to
# 5e-7 over twenty steps. With most seeds they did not.
WEIGHTS_SEED = 31
BATCH_SIZE = 32
MOMENTUM = 0.9

# (shape of the weights, their standard deviation, the value of the biases), in the order in which variables are made.
LAYERS: dict[str, tuple[tuple[int, ...], float, float]] = {
    "conv1": ((5, 5, 1, 32), 0.05, 0.0),
    "conv2": ((5, 5, 32, 64), 0.05, 0.1),
    "local3": ((7 * 7 * 64, 1024), 0.04, 0.1),
    "local4": ((1024, 10), 0.04, 0.1),
    "softmax_linear": ((10, 10), 1 / 192, 0.0),
}


def initial_weights(dtype: str) -> dict[str, Array]:
    """`<layer>/weights` and `<layer>/biases` of each layer.

    Uniform numbers of the reference's standard deviation: numpy's old generator is frozen, and its uniform numbers,
    unlike its normal ones, need no function of the machine's mathematics library. So they are the same bits anywhere.
    """
    random = np.random.RandomState(WEIGHTS_SEED)
    weights: dict[str, Array] = {}
    for layer, (shape, std, bias) in LAYERS.items():
        weights[f"{layer}/weights"] = ((random.random_sample(shape) * 2 - 1) * np.sqrt(3.0) * std).astype(dtype)
        weights[f"{layer}/biases"] = np.full(shape[-1], bias, dtype=dtype)
    return weights


def digest(weights: dict[str, Array]) -> str:
    """SHA-256 over all weights, in order."""
    return hashlib.sha256(b"".join(value.tobytes() for value in weights.values())).hexdigest()


def batches(dtype: str) -> tuple[Array, npt.NDArray[np.int64]]:
    """Images (5, 32, 28, 28, 1) in [-0.5, 0.5] and labels (5, 32); step s, counted from 0, uses batch s % 5."""
    with np.load(HERE / "mnist_sample.npz", allow_pickle=False) as sample:
        images, labels = sample["images"], sample["labels"]
    scaled = (images / 255.0 - 0.5).astype(dtype)
    return scaled.reshape(-1, BATCH_SIZE, 28, 28, 1), labels.astype(np.int64).reshape(-1, BATCH_SIZE)


def sampled_indices(size: int) -> npt.NDArray[np.int64]:
    """Where in a flattened variable of that size the values lie that are recorded: eight, spread over it."""
    return np.unique(np.linspace(0, size - 1, 8).astype(np.int64))
