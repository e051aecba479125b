"""Have TensorFlow preprocess a small image as slim's networks do. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*"
    /tmp/tensorflow/bin/python tests/golden/make_presets_golden.py

It writes `presets_golden.npz` beside itself: an image of noise; parts of it by `resize_image_with_crop_or_pad`; the
sides that slim's aspect-preserving resize gives; and what is not random of the four presets.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import tensorflow as tf

Array = npt.NDArray[np.generic]

# Height and width of the image, and the size of the result.
PARTS = ((11, 14, 8), (11, 14, 7), (6, 9, 8), (5, 9, 8), (9, 5, 8), (8, 8, 8), (1, 14, 9))
BRIGHTNESS, CONTRAST = (-60.0, 0.0, 63.0), (0.2, 1.8, 1.3)


def main() -> None:
    image = np.random.default_rng(0).integers(0, 256, (11, 14, 3)).astype(np.uint8)
    values = {"image": image, "sides": sides(), "lenet": (cropped(image, 8) - 128.0) / 128.0}
    for height, width, size in PARTS:
        values[f"part {height} {width} {size}"] = cropped(image[:height, :width], size)
    values |= {"cifarnet": cifarnet(image), "vgg": vgg(image), "inception": inception(image), "flat": flat()}
    np.savez_compressed(Path(__file__).parent / "presets_golden.npz", **values)  # type: ignore[arg-type]


def cropped(image: Array, size: int) -> Array:
    return tf.image.resize_with_crop_or_pad(tf.cast(image, tf.float32), size, size).numpy()


def scaled_sides(height: int, width: int, short: int) -> list[int]:
    """As slim: in 32 bits, rounded to the nearest whole number."""
    lengths = [tf.cast(length, tf.float32) for length in (height, width)]
    scale = tf.cast(short, tf.float32) / tf.minimum(*lengths)
    return [int(tf.math.rint(length * scale)) for length in lengths]


def sides() -> Array:
    """Rows of height, width, short side, and height and width after the resize."""
    drawn = np.random.default_rng(1).integers((30, 30, 224), (900, 900, 513), (300, 3)).tolist()
    return np.array([[*row, *scaled_sides(*row)] for row in drawn])


def cifarnet(image: Array) -> Array:
    """The middle of the image as it is, and for each pair of numbers."""
    middle = cropped(image, 8)
    rows = [tf.image.per_image_standardization(middle)]
    for delta, factor in zip(BRIGHTNESS, CONTRAST, strict=True):
        coloured = tf.image.adjust_contrast(tf.image.adjust_brightness(middle, delta), factor)
        rows.append(tf.image.per_image_standardization(coloured))
    return tf.stack(rows).numpy()


def flat() -> Array:
    """An image of one colour, and one that is nearly so."""
    images = np.full((2, 8, 8, 3), 77.0, np.float32)
    images[1, 3, 3, 1] = 77.5
    return tf.image.per_image_standardization(images).numpy()


def vgg(image: Array) -> Array:
    """Short side 9 pixels, middle of 7."""
    height, width = scaled_sides(*image.shape[:2], 9)
    resized = tf.compat.v1.image.resize_bilinear(image[None], (height, width), align_corners=False)[0]
    top, left = (height - 7) // 2, (width - 7) // 2
    return (resized[top : top + 7, left : left + 7] - tf.constant([123.68, 116.78, 103.94])).numpy()


def inception(image: Array) -> Array:
    middle = tf.image.central_crop(tf.image.convert_image_dtype(image, tf.float32), 0.875)
    return ((tf.compat.v1.image.resize_bilinear(middle[None], (7, 7), align_corners=False)[0] - 0.5) * 2.0).numpy()


if __name__ == "__main__":
    main()
