"""What TF-Slim's Inception-v3 and ours are both given: photos, labels, weights, settings. Numpy and Pillow alone.

Everything here is in TensorFlow's layout: images (batch, height, width, channel), kernels (height, width, in, out).
The photos are centres of photographs from Pixabay, see `tests/fixtures/inception/SOURCE.md`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

Array = npt.NDArray[np.floating]

FIXTURES = Path(__file__).parent.parent / "fixtures" / "inception"
NUM_IMAGENET_CLASSES = 1001
FULL_SIZE = 299
NUM_FULL_SIZE = 4

# The shrunken net: few filters, so that its checkpoint is small.
NUM_CLASSES = 9
DEPTH_MULTIPLIER = 0.02
MIN_DEPTH = 4

LABEL_SMOOTHING = 0.1
AUXILIARY_WEIGHT = 0.4
L2_WEIGHT = 4e-5
DECAY_STEPS, DECAY_FACTOR = 8, 0.16
RMSPROP_DECAY, RMSPROP_MOMENTUM, RMSPROP_EPSILON = 0.9, 0.9, 1.0
AVERAGE_DECAY = 0.9999


@dataclass(frozen=True)
class Start:
    """What the weights that a net begins with are made of."""

    kernel_gain: float
    """Times the usual size of kernels that are followed by batch norm."""
    beta: float
    """What the betas lie around."""
    variance: float
    """What the moving variances lie around."""


USUAL = Start(kernel_gain=1, beta=0, variance=1)
CALM = Start(kernel_gain=8, beta=2, variance=640)
"""For a net that is trained. With the usual start a difference of 1e-7 in the weights becomes one of 0.1 in the losses
within three steps: batch norm makes gradients grow from layer to layer, and each ReLU that rounding turns on or off
shows. With betas around 2 few of them turn, and large kernels make a rate of 0.1 a moderate one."""


@dataclass(frozen=True)
class Run:
    """How the shrunken net is trained."""

    dtype: str
    num_towers: int = 1
    num_steps: int = 20
    start: Start = CALM
    full_size: bool = False
    """Four photos of 299 pixels instead of eight of 139: only then has TF-Slim's auxiliary head its usual kernel."""
    learning_rate: float = 0.1
    batch_norm_decay: float = 0.9997


RUNS = {
    "float32": Run("float32"),
    "float64": Run("float64"),
    "two_towers": Run("float64", num_towers=2, num_steps=6),
}
# Statistics that move so fast are soon those of the photos: scores then differ from photo to photo.
CHECKPOINT_RUN = Run("float32", num_steps=6, start=USUAL, full_size=True, learning_rate=0.01, batch_norm_decay=0.5)
CHECKPOINT = FIXTURES / "model.ckpt-6"


def weights(shapes: Mapping[str, Sequence[int]], start: Start, dtype: str = "float32") -> dict[str, Array]:
    """Values for the variables of these names and shapes, each from a stream of its own; the same bits anywhere.

    Uniform numbers, those of float32 in any dtype: kernels with a variance of 2 over their inputs, which keeps the size
    of what passes through a ReLU; the rest within 0.2 of what they lie around, variances within half of it.
    """
    return {name: _weight(name, shape, start).astype(dtype) for name, shape in shapes.items()}


def _weight(name: str, shape: Sequence[int], start: Start) -> Array:
    between = _uniform(name, math.prod(shape)).reshape(shape)  # -1 and 1
    if name.endswith("/weights"):
        is_last = name.endswith(("Logits/Conv2d_1c_1x1/weights", "AuxLogits/Conv2d_2b_1x1/weights"))
        return between * np.float32((1 if is_last else start.kernel_gain) * math.sqrt(6 / math.prod(shape[:-1])))
    if name.endswith("/moving_variance"):
        return (between * np.float32(0.5) + np.float32(1)) * np.float32(start.variance)
    return between * np.float32(0.2) + np.float32(start.beta if name.endswith("/beta") else 0)


def _uniform(name: str, size: int) -> Array:
    # The raw numbers of a generator never change from version to version, unlike what is made from them.
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    raw = np.random.Philox(key=key).random_raw(size)
    return (raw >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)


def photos() -> Array:
    """All photos as they are recorded, uint8 (8, 139, 139, 3)."""
    row = np.asarray(Image.open(FIXTURES / "photos.webp").convert("RGB"))
    return np.stack(np.split(row, 8, axis=1))


def small_images(dtype: str) -> Array:
    """All photos as they are, shape (8, 139, 139, 3), from -1 to 1."""
    return (photos() / 127.5 - 1).astype(dtype)


def full_size_images(dtype: str) -> Array:
    """The first four photos at 299 pixels, from -1 to 1."""
    return _stretched(_stretched(small_images("float64")[:NUM_FULL_SIZE], 1), 2).astype(dtype)


def _stretched(images: Array, axis: int) -> Array:
    """Linear interpolation between the centres of pixels along one axis."""
    size = images.shape[axis]
    places = ((np.arange(FULL_SIZE) + 0.5) * size / FULL_SIZE - 0.5).clip(0, size - 1)
    left = np.floor(places).astype(np.int64).clip(0, size - 2)
    share = (places - left).reshape([-1 if each == axis else 1 for each in range(4)])
    return images.take(left, axis) * (1 - share) + images.take(left + 1, axis) * share


def batches(run: Run) -> Iterator[tuple[Array, npt.NDArray[np.int64]]]:
    """Images and labels of each step: photos that go round, some of them mirrored. No photo has label 0."""
    images = full_size_images(run.dtype) if run.full_size else small_images(run.dtype)
    for step in range(run.num_steps):
        order = np.roll(np.arange(len(images)), 3 * step)
        mirrored = ((order * 5 + step * step) % 3 == 0).reshape(-1, 1, 1, 1)
        yield np.where(mirrored, images[order, :, ::-1], images[order]), order + 1


def sketch(values: Array) -> npt.NDArray[np.float64]:
    """Norm, sum, and two values of an array, added up in float64."""
    flat = values.astype(np.float64).ravel()
    return np.array([np.sqrt(np.square(flat).sum()), flat.sum(), flat[flat.size // 3], flat[-1]])
