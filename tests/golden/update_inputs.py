"""What TensorFlow's updates and ours are given: parameters, gradients, losses' inputs. Numpy alone, read by both sides.

Gradients are inputs too, so that nothing but the rule of the update is compared. All numbers are uniform ones of
numpy's old, frozen generator: the same bits on every machine.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]
Indices = npt.NDArray[np.int64]
Named = dict[str, Array]

NUM_STEPS = 25
RECORDED_STEPS = (1, 2, 5, 10, 20, 25)
"""The completed updates after which parameters are recorded."""
SHAPES: dict[str, tuple[int, ...]] = {"weights": (3, 4), "biases": (4,), "embedding": (5, 2)}
# The size of each step's gradients: ordinary ones, and tiny and large ones among them.
GRADIENT_SIZES = (1.0, 0.3, 1e-4, 1.0, 20.0, 0.5, 1e-6, 2.0, 1.0, 0.05, 5.0, 1e-3, 1.0)
MULTIPLIERS = {"weights": 0.5, "biases": 2.0, "embedding": 3.7}
CLIP_NORM = 0.8
SCHEDULE_STEPS = range(41)
NUM_BATCHES = 10
BATCH_NORM_DECAY = 0.1


def initial(dtype: str) -> Named:
    """The parameters before the first step, in [-1, 1)."""
    random = np.random.RandomState(11)
    return {name: _uniform(random, shape).astype(dtype) for name, shape in SHAPES.items()}


def gradients(dtype: str) -> list[Named]:
    """Each step's gradients; one row of the embedding in turn has none (zeros)."""
    random = np.random.RandomState(12)
    steps = []
    for step in range(NUM_STEPS):
        size = GRADIENT_SIZES[step % len(GRADIENT_SIZES)]
        values = {name: _uniform(random, shape) * size for name, shape in SHAPES.items()}
        values["embedding"][step % 5] = 0.0
        steps.append({name: value.astype(dtype) for name, value in values.items()})
    return steps


def sparse_gradients(dtype: str, *, repeated: bool) -> list[tuple[Indices, Array]]:
    """Each step's gradient of the embedding as row numbers (4,) and rows (4, 2); `repeated`: rows may come twice."""
    random = np.random.RandomState(13)
    steps = []
    for step in range(NUM_STEPS):
        last = 2 * (step % 3) if repeated else 4
        rows = (step + np.array([0, 2, 1, last])) % 5
        steps.append((rows.astype(np.int64), _uniform(random, (4, 2)).astype(dtype)))
    return steps


def single_gradients(dtype: str) -> dict[str, Named]:
    """Sets of gradients for one clip or one scaling: longer than the largest norm, shorter, zeros."""
    random = np.random.RandomState(14)
    sets = {}
    for name, size in {"long": 3.0, "short": 0.01, "zero": 0.0}.items():
        sets[name] = {n: (_uniform(random, shape) * size).astype(dtype) for n, shape in SHAPES.items()}
    return sets


def sparse_sets(dtype: str) -> dict[str, tuple[Indices, Array]]:
    """Sparse gradients of the embedding for one clip or one scaling: each row named once, and one named twice."""
    rows = (_uniform(np.random.RandomState(15), (3, 2)) * 3.0).astype(dtype)
    return {"unique": (np.array([4, 0, 2], np.int64), rows), "duplicated": (np.array([4, 0, 4], np.int64), rows)}


def followed(dtype: str) -> Array:
    """The values, shape (25, 4), that a parameter takes from step to step and that an average follows."""
    return _uniform(np.random.RandomState(16), (NUM_STEPS, 4)).astype(dtype)


def loss_series(dtype: str) -> Array:
    """The losses, shape (25,), that a smoothed loss follows."""
    return (np.random.RandomState(17).random_sample(NUM_STEPS) * 5 + 1).astype(dtype)


def batch_norm_images(dtype: str) -> Array:
    """Batches of images, shape (10, 4, 2, 2, 3): batch, height, width, channel."""
    values = _uniform(np.random.RandomState(18), (NUM_BATCHES, 4, 2, 2, 3))
    return (values * np.array([0.5, 1.0, 3.0]) + np.array([0.0, -1.0, 2.0])).astype(dtype)


def loss_inputs(dtype: str) -> Named:
    """Six examples with five numbers each."""
    random = np.random.RandomState(19)
    shape = (6, 5)
    logits = _uniform(random, shape) * 4
    classes = np.array([0, 4, 2, 2, 1, 3])
    values = {
        "logits": logits,
        "one_hot": np.eye(5)[classes],
        "binary": (random.random_sample(shape) < 0.4).astype(np.float64),
        "targets": _uniform(random, shape) * 2,
        "probabilities": random.random_sample(shape) * 0.98 + 0.01,
    }
    units = [_uniform(random, shape) for _ in range(2)]
    values["unit_predictions"], values["unit_targets"] = (u / np.sqrt((u * u).sum(1, keepdims=True)) for u in units)
    return {name: value.astype(dtype) for name, value in values.items()}


def loss_weights(dtype: str) -> dict[str, Any]:
    """Weights of losses, by name: one for all, one an example, with zeros among them, nothing but zeros."""
    random = np.random.RandomState(20)
    return {
        "scalar": np.dtype(dtype).type(0.7),
        "per_example": (random.random_sample(6) + 0.5).astype(dtype),
        "some_zero": np.array([0.0, 1.5, 0.0, 1.0, 0.25, 2.0], dtype),
        "all_zero": np.zeros(6, dtype),
    }


def digest() -> str:
    """SHA-256 over everything that the float64 runs are given."""
    parts = [sparse_gradients("float64", repeated=repeated) for repeated in (False, True)]
    rows = [pair for part in (*parts, sparse_sets("float64").values()) for pair in part]
    named = [initial("float64"), *gradients("float64"), *single_gradients("float64").values(), loss_inputs("float64")]
    arrays = [value for values in (*named, loss_weights("float64")) for value in values.values()]
    arrays += [array for pair in rows for array in pair]
    arrays += [followed("float64"), loss_series("float64"), batch_norm_images("float64")]
    return hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in arrays)).hexdigest()


def _uniform(random: np.random.RandomState, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Numbers in [-1, 1)."""
    return random.random_sample(shape) * 2 - 1
