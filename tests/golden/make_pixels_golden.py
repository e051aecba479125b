"""Have TensorFlow compute the colour options of its object detection API. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*"
    /tmp/tensorflow/bin/python tests/golden/make_pixels_golden.py

It writes `pixels_golden.npz` beside itself: images, uniform numbers in [0, 1) by what they are drawn for, and what each
option makes of the images with them, by TensorFlow's own operations in the order of the API of 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tensorflow as tf

Array = npt.NDArray[np.generic]

COUNT, HEIGHT, WIDTH = 6, 11, 14
ADJUSTMENTS = ("contrast", "saturation", "hue", "brightness")
ORDERINGS = (("brightness", "saturation", "hue", "contrast"), ("brightness", "contrast", "saturation", "hue"))
PATCHES = 4


def main() -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (COUNT, HEIGHT, WIDTH, 3)).astype(np.uint8)
    images[1] = images[1, ..., :1]  # grey
    images[2] = np.where(images[2] < 128, 0, 255)  # saturated
    uniform = {name: random.random(COUNT).astype(np.float32) for name in ADJUSTMENTS}
    uniform |= {
        f"patch {patch}{what}": random.random(COUNT).astype(np.float32)
        for patch in range(PATCHES)
        for what in ("", " top", " left")
    }
    values = [tf.constant(image, tf.float32) for image in images]
    named = {
        "brightness": by_row(values, "brightness", between(uniform["brightness"], -0.2, 0.2)),
        "contrast": by_row(values, "contrast", between(uniform["contrast"], 0.8, 1.25)),
        "hue": by_row(values, "hue", between(uniform["hue"], -0.02, 0.02)),
        "saturation": by_row(values, "saturation", between(uniform["saturation"], 0.8, 1.25)),
        "distort 0": distorted(values, ORDERINGS[0], uniform),
        "distort 1": distorted(values, ORDERINGS[1], uniform),
        "grey": [grey(value) for value in values],
        "normalised": [normalised(value, 0.0, 256.0, -1.0, 1.0) for value in values],
        "subtracted": [value - [[[123.68, 116.78, 103.94]]] for value in values],
        "patches": [patched(value, row, uniform) for row, value in enumerate(values)],
    }
    logits = random.normal(0, 3, (7, 4)).astype(np.float32)
    softmax = {f"softmax {t}": tf.nn.softmax(tf.divide(logits, t)).numpy() for t in (1.0, 2.0)}
    np.savez_compressed(
        Path(__file__).parent / "pixels_golden.npz",
        images=images,
        logits=logits,
        **{f"uniform {name}": numbers for name, numbers in uniform.items()},
        **{name: np.stack([np.asarray(row) for row in rows]) for name, rows in named.items()},
        **softmax,
    )


def between(uniform: Array, low: float, high: float) -> Array:
    return np.float32(low) + uniform * np.float32(high - low)


def adjusted(image: tf.Tensor, name: str, number: float) -> tf.Tensor:
    """As random_adjust_*: on a range of 1, then clipped to 0 to 255."""
    operation = getattr(tf.image, f"adjust_{name}")
    return tf.clip_by_value(operation(image / 255, number) * 255, 0.0, 255.0)


def by_row(images: Sequence[tf.Tensor], name: str, numbers: Array) -> list[tf.Tensor]:
    return [adjusted(image, name, number) for image, number in zip(images, numbers.tolist(), strict=True)]


def distorted(images: Sequence[tf.Tensor], names: Sequence[str], uniform: dict[str, Array]) -> list[tf.Tensor]:
    """As random_distort_color."""
    bounds = {"brightness": (-32 / 255, 32 / 255), "saturation": (0.5, 1.5), "hue": (-0.2, 0.2), "contrast": (0.5, 1.5)}
    for name in names:
        images = by_row(images, name, between(uniform[name], *bounds[name]))
    return [*images]


def grey(image: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(image * [0.2989, 0.5870, 0.1140], -1, keepdims=True)


def normalised(image: tf.Tensor, low: float, high: float, to_low: float, to_high: float) -> tf.Tensor:
    return (image - low) * ((to_high - to_low) / (high - low)) + to_low


def patched(image: tf.Tensor, row: int, uniform: dict[str, Array], ratio: float = 0.3) -> tf.Tensor:
    """As random_black_patches, each with a chance of a half."""
    side = tf.cast(tf.minimum(float(HEIGHT), float(WIDTH)) * ratio, tf.int32)
    for patch in range(PATCHES):
        if uniform[f"patch {patch}"][row] > 0.5:
            continue
        top, left = (
            tf.cast(uniform[f"patch {patch} {edge}"][row] * tf.constant(1.0 - ratio) * float(length), tf.int32)
            for edge, length in (("top", HEIGHT), ("left", WIDTH))
        )
        black = tf.ones([side, side, 3], tf.float32)
        image *= 1.0 - tf.image.pad_to_bounding_box(black, top, left, HEIGHT, WIDTH)
    return image


if __name__ == "__main__":
    main()
