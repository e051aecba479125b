"""Have TensorFlow resize, colour and crop small images. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*"
    /tmp/tensorflow/bin/python tests/golden/make_preprocessing_golden.py

It writes `preprocessing_golden.npz` beside itself: images of noise; each resized by the four methods of
`tf.compat.v1.image.resize_images`; each coloured by `tf.image.adjust_*` in every order of the reference systems; where
`tf.image.central_crop` crops; and the means and standard deviations of many `sample_distorted_bounding_box`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tensorflow as tf

Array = npt.NDArray[np.generic]

METHODS = ("bilinear", "nearest", "bicubic", "area")  # as `tf.image.ResizeMethod` numbers them
SIZES = ((5, 4), (17, 23), (11, 13))  # smaller, larger, and the same
ORDERS = {
    "inception": ("bshc", "bcsh"),
    "slim": ("bshc", "sbch", "chbs", "hscb"),
    "fast": ("bs",),
}
SAMPLES = 20_000
# Name: height, width, min_object_covered, aspects, areas, attempts, boxes.
CROPS = {
    "whole": (375, 500, 0.1, (0.75, 1.33), (0.05, 1.0), 100, []),
    "flat": (60, 300, 0.1, (0.75, 1.33), (0.05, 1.0), 100, []),
    "tiny": (7, 5, 0.1, (0.75, 1.33), (0.05, 1.0), 100, []),
    "narrow": (9, 8, 0.1, (0.75, 1.33), (0.4, 0.5), 100, []),
    "boxes": (375, 500, 0.3, (0.75, 1.33), (0.05, 1.0), 100, [[0.1, 0.2, 0.4, 0.5], [0.8, 0.8, 0.95, 0.9]]),
    "seldom": (200, 200, 0.6, (0.75, 1.33), (0.05, 0.5), 3, [[0.0, 0.0, 0.7, 0.7]]),
}


def main() -> None:
    values: dict[str, Array] = {"images": np.random.default_rng(0).integers(0, 256, (6, 11, 13, 3)).astype(np.uint8)}
    values["images"][0] //= 16  # dark: brightness makes it negative
    values["images"][1] = 255 - values["images"][1] // 16
    values["images"][2, ..., 1:] = values["images"][2, ..., :1]  # grey
    values |= resized(values["images"]) | coloured(values["images"]) | central() | crops()
    np.savez_compressed(Path(__file__).parent / "preprocessing_golden.npz", **values)


def resized(images: Array) -> dict[str, Array]:
    return {
        f"{method} {height}x{width}": tf.compat.v1.image.resize_images(images[:2], (height, width), number).numpy()
        for number, method in enumerate(METHODS)
        for height, width in SIZES
    }


def coloured(images: Array) -> dict[str, Array]:
    """Numbers (brightness, contrast, saturation, hue), and the images coloured by them in each order."""
    low, high = np.array([[-32 / 255, 0.5, 0.5, -0.2], [32 / 255, 1.5, 1.5, 0.2]])
    numbers = np.random.default_rng(1).uniform(low, high, (len(images), 4)).astype(np.float32)
    numbers[0] = low
    numbers[1] = high
    steps: dict[str, Callable[[tf.Tensor, Array], tf.Tensor]] = {
        "b": lambda image, row: tf.image.adjust_brightness(image, row[0]),
        "c": lambda image, row: tf.image.adjust_contrast(image, row[1]),
        "s": lambda image, row: tf.image.adjust_saturation(image, row[2]),
        "h": lambda image, row: tf.image.adjust_hue(image, row[3]),
    }

    def coloured_one(image: Array, row: Array, order: str) -> Array:
        changed = tf.image.convert_image_dtype(image, tf.float32)
        for letter in order:
            changed = steps[letter](changed, row)
        clipped: Array = tf.clip_by_value(changed, 0.0, 1.0).numpy()
        return clipped

    return {"numbers": numbers} | {
        f"{name} {place}": np.stack([coloured_one(*pair, order) for pair in zip(images, numbers, strict=True)])
        for name, orders in ORDERS.items()
        for place, order in enumerate(orders)
    }


def central() -> dict[str, Array]:
    """Rows of height, width, top, left, rows and columns."""
    rows = []
    for height, width in [(11, 13), (299, 299), (375, 500), (333, 501), (8, 7), (1, 2), (480, 640)]:
        places = tf.reshape(tf.range(height * width), (height, width, 1))
        crop = tf.image.central_crop(places, 0.875).numpy()[..., 0]
        rows.append([height, width, *divmod(int(crop[0, 0]), width), *crop.shape])
    return {"central": np.array(rows)}


def crops() -> dict[str, Array]:
    """The mean and the standard deviation of top, left, height and width, by name."""
    return {f"crops {name}": distribution(*crop) for name, crop in CROPS.items()}


def distribution(
    height: int,
    width: int,
    covered: float,
    aspects: tuple[float, float],
    areas: tuple[float, float],
    attempts: int,
    boxes: list[list[float]],
) -> Array:
    @tf.function
    def sample(seed: tf.Tensor) -> tf.Tensor:
        begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            [height, width, 3],
            tf.reshape(tf.constant(boxes, tf.float32), (1, -1, 4)),
            tf.stack([seed, 7]),
            covered,
            aspects,
            areas,
            attempts,
            use_image_if_no_bounding_boxes=True,
        )
        return tf.concat([begin[:2], size[:2]], 0)

    regions = tf.map_fn(sample, tf.range(SAMPLES)).numpy()
    return np.stack([regions.mean(0), regions.std(0)])


if __name__ == "__main__":
    main()
