"""Have TensorFlow move small images and the objects on them. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*"
    /tmp/tensorflow/bin/python tests/golden/make_augmentations_golden.py

It writes `augmentations_golden.npz` beside itself. Each function here is the graph of the option of this name in
TensorFlow's object detection API, of which pip has no release, after its random numbers are drawn: these are arguments,
uniform in [0, 1), so that the test can give the same ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1.image
METHODS = ("bilinear", "nearest", "bicubic", "area")  # as `tf.image.ResizeMethod` numbers them
SIDES = ((60, 40), (15, 30), (15, 50), (312, 320), (299, 299), (333, 500), (1, 7), (427, 640))
RANGES = ((50, 100), (600, 1024), (320, 320))
WINDOWS = ((0, 0, 11, 13), (2, 3, 6, 7), (4, 0, 7, 5), (0, 6, 3, 7))
OVERLAPS = (0.0, 0.3, 0.7)
RATIOS = (0.5, 1.0, 1.7)


def main() -> None:
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (11, 13, 3)).astype(np.float32)
    corners = np.sort(random.random((7, 2, 2)), axis=1).astype(np.float32)
    corners[5, 1] = corners[5, 0]  # without area
    boxes = corners.reshape(-1, 4)
    points = random.random((7, 3, 2)).astype(np.float32)
    points[1, 1] = np.nan
    masks = random.integers(0, 2, (7, 11, 13)).astype(np.float32)
    jitter = random.random((7, 4)).astype(np.float32)
    scores = np.array([0.2, 0.6, 0.61, np.nan, 1, 0, 0.5], np.float32)
    values: dict[str, Any] = {
        **{"image": image, "boxes": boxes, "points": points, "masks": masks, "jitter": jitter, "scores": scores},
        **turned(image, boxes, masks, points),
        **{
            f"crop {number} {overlap} {name}": value
            for number, window in enumerate(WINDOWS)
            for overlap in OVERLAPS
            for name, value in random_crop_image(image, boxes, masks, points, window, overlap).items()
        },
        **{
            f"aspect crop {ratio} {name}": value
            for ratio in RATIOS
            for name, value in random_crop_to_aspect_ratio(image, boxes, masks, points, ratio, (0.4, 0.7)).items()
        },
        **{
            f"pad {number} {name}": value
            for number, arguments in enumerate(PADS)
            for name, value in random_pad_image(image, boxes, *arguments).items()
        },
        **{
            f"aspect pad {number} {name}": value
            for number, arguments in enumerate(ASPECT_PADS)
            for name, value in random_pad_to_aspect_ratio(image, boxes, masks, points, *arguments).items()
        },
        **{
            f"scale {share} {name}": value
            for share in (0.0, 0.3, 0.9)
            for name, value in random_image_scale(image, masks, share).items()
        },
        **{
            f"resize {method} {name}": value
            for number, method in enumerate(METHODS)
            for name, value in resize_image(image, masks, number).items()
        },
        **{
            f"min dimension {side} {name}": value
            for side in (9, 20)
            for name, value in resize_to_min_dimension(image, masks, side).items()
        },
        "jittered": random_jitter_boxes(boxes, jitter, 0.3),
        "scaled boxes": boxes * np.array([11, 13, 11, 13], np.float32),
        "scaled points": points * np.array([11, 13], np.float32),
        "kept": np.flatnonzero((tf.greater(scores, 0.6) | tf.math.is_nan(scores)).numpy()),
        "ranges": np.array([[range_size(*side, *bounds) for side in SIDES] for bounds in RANGES]),
    }
    np.savez_compressed(
        Path(__file__).parent / "augmentations_golden.npz", **{k: np.asarray(v) for k, v in values.items()}
    )


def turned(image: Any, boxes: Any, masks: Any, points: Any) -> dict[str, Any]:
    ymin, xmin, ymax, xmax = tf.split(boxes, 4, axis=1)
    y, x = tf.split(points, 2, axis=2)
    order = [2, 0, 1]
    return {
        "left right image": tf.image.flip_left_right(image),
        "left right boxes": tf.concat([ymin, 1 - xmax, ymax, 1 - xmin], 1),
        "left right masks": masks[:, :, ::-1],
        "left right points": tf.gather(tf.concat([y, 1 - x], 2), order, axis=1),
        "up down image": tf.image.flip_up_down(image),
        "up down boxes": tf.concat([1 - ymax, xmin, 1 - ymin, xmax], 1),
        "up down masks": masks[:, ::-1],
        "up down points": tf.gather(tf.concat([1 - y, x], 2), order, axis=1),
        "rot90 image": tf.image.rot90(image),
        "rot90 boxes": tf.concat([1 - xmax, ymin, 1 - xmin, ymax], 1),
        "rot90 masks": tf.image.rot90(masks[..., None])[..., 0],
        "rot90 points": tf.concat([1 - x, y], 2),
    }


def random_crop_image(image: Any, boxes: Any, masks: Any, points: Any, window: Any, overlap: float) -> dict[str, Any]:
    """After `sample_distorted_bounding_box` has given this window."""
    top, left, height, width = window
    rows, columns = image.shape[:2]
    frame = np.array([top / rows, left / columns, (top + height) / rows, (left + width) / columns], np.float32)
    outside = (
        (boxes[:, 0] >= frame[2]) | (boxes[:, 1] >= frame[3]) | (boxes[:, 2] <= frame[0]) | (boxes[:, 3] <= frame[1])
    )
    places = np.flatnonzero(~outside)
    places = places[(intersection(boxes[places], frame) / area(boxes[places]) >= overlap).numpy()]
    return {
        "places": places,
        "image": tf.slice(image, (top, left, 0), (height, width, 3)),
        "boxes": tf.clip_by_value(in_frame(tf.gather(boxes, places), frame), 0.0, 1.0),
        "masks": tf.slice(tf.gather(masks, places), (0, top, left), (-1, height, width)),
        "points": without_outer(in_frame(tf.gather(points, places), frame)),
    }


def random_crop_to_aspect_ratio(
    image: Any, boxes: Any, masks: Any, points: Any, ratio: float, shares: tuple[float, float]
) -> dict[str, Any]:
    rows, columns = (tf.constant(side, tf.float32) for side in image.shape[:2])
    new = tf.constant(ratio, tf.float32)
    height = rows if columns / rows >= new else tf.round(columns / new)
    width = columns if columns / rows <= new else tf.round(rows * new)
    top, left = (
        int(share * int(room + 1)) for share, room in zip(shares, (rows - height, columns - width), strict=True)
    )
    frame = tf.stack([top / rows, left / columns, (top + height) / rows, (left + width) / columns])
    places = np.flatnonzero((intersection(boxes, frame) / area(boxes) >= 0.3).numpy())
    size = int(height), int(width)
    return {
        "places": places,
        "image": tf.image.crop_to_bounding_box(image, top, left, *size),
        "boxes": tf.clip_by_value(in_frame(tf.gather(boxes, places), frame), 0.0, 1.0),
        "masks": tf.slice(tf.gather(masks, places), (0, top, left), (-1, *size)),
        "points": without_outer(in_frame(tf.gather(points, places), frame)),
    }


# The least and the most of height and width, the colour, and shares of their spans: the sizes' and the offsets'.
PADS = (
    (None, None, None, (0.0, 0.0), (0.0, 0.0)),
    (None, None, (3.0, 100.0, 250.0), (0.99, 0.5), (0.99, 0.2)),
    ((14, 5), (30, 12), None, (0.5, 0.5), (0.6, 0.9)),
    ((40, 40), (20, 30), None, (0.5, 0.5), (0.0, 0.5)),  # the most wins
)


def random_pad_image(
    image: Any, boxes: Any, least: Any, most: Any, colour: Any, size_shares: Any, offset_shares: Any
) -> dict[str, Any]:
    sides = np.array(image.shape[:2])
    most = np.maximum(2 * sides if most is None else most, sides)
    least = np.maximum(sides if least is None else least, sides)
    target = np.where(most > least, least + np.floor(size_shares * (most - least)), most).astype(int)
    top, left = np.floor(offset_shares * (target - sides)).astype(int)
    colour = tf.reduce_mean(image, axis=[0, 1]) if colour is None else tf.constant(colour)
    places = {"offset_height": top, "offset_width": left, "target_height": target[0], "target_width": target[1]}
    ones = tf.image.pad_to_bounding_box(tf.ones_like(image), **places)
    window = np.array([-top, -left, target[0] - top, target[1] - left], np.float32) / np.tile(sides, 2).astype(
        np.float32
    )
    return {
        "image": tf.image.pad_to_bounding_box(image, **places) + (1.0 - ones) * colour,
        "boxes": in_frame(tf.constant(boxes), window),
    }


# The aspect, the least and the most of the sizes' ratios, and a share of their span.
ASPECT_PADS = (
    (1.0, (1.0, 1.0), (2.0, 2.0), 0.5),
    (2.0, (1.0, 1.0), (1.0, 1.0), 0.7),
    (0.6, (4.0, 4.0), (4.0, 4.0), 0.1),
)


def random_pad_to_aspect_ratio(
    image: Any, boxes: Any, masks: Any, points: Any, ratio: float, least: Any, most: Any, share: float
) -> dict[str, Any]:
    rows, columns = (tf.constant(side, tf.float32) for side in image.shape[:2])
    new = tf.constant(ratio, tf.float32)
    height = rows if columns / rows <= new else columns / new
    width = columns if columns / rows >= new else rows * new
    low = tf.maximum(least[0] * rows, height), tf.maximum(least[1] * columns, width)
    high = tf.maximum(most[0] * rows, height), tf.maximum(most[1] * columns, width)
    largest = tf.minimum(high[0] / height, high[1] / width)
    smallest = tf.minimum(largest, tf.maximum(low[0] / height, low[1] / width))
    scale = smallest + share * (largest - smallest)
    height, width = tf.round(scale * height), tf.round(scale * width)
    frame = tf.stack([0.0, 0.0, height / rows, width / columns])
    size = int(height), int(width)
    return {
        "image": tf.image.pad_to_bounding_box(image, 0, 0, *size),
        "boxes": in_frame(tf.constant(boxes), frame),
        "masks": tf.image.pad_to_bounding_box(masks[..., None], 0, 0, *size)[..., 0],
        "points": in_frame(tf.constant(points), frame),
    }


def random_image_scale(image: Any, masks: Any, share: float) -> dict[str, Any]:
    coefficient = np.float32(0.5 + share * 1.5)
    size = [int(np.float32(side) * coefficient) for side in image.shape[:2]]
    return {
        "image": v1.resize_images(image, size, align_corners=True),
        "masks": v1.resize_nearest_neighbor(masks[..., None], size, align_corners=True)[..., 0],
    }


def resize_image(image: Any, masks: Any, method: int) -> dict[str, Any]:
    return {
        "image": v1.resize_images(image, (17, 9), method),
        "masks": v1.resize_nearest_neighbor(masks[..., None], (17, 9))[..., 0],
    }


def resize_to_min_dimension(image: Any, masks: Any, min_dimension: int) -> dict[str, Any]:
    rows, columns = image.shape[:2]
    ratio = np.float32(max(min(rows, columns), min_dimension)) / np.float32(min(rows, columns))
    size = [int(np.float32(side) * ratio) for side in (rows, columns)]
    return {
        "image": v1.resize_bilinear(image[None], size, align_corners=True)[0],
        "masks": v1.resize_nearest_neighbor(masks[..., None], size, align_corners=True)[..., 0],
    }


def random_jitter_boxes(boxes: Any, numbers: Any, ratio: float) -> Any:
    sides = np.tile(boxes[:, 2:] - boxes[:, :2], 2)
    return tf.clip_by_value(boxes + sides * (-ratio + numbers * np.float32(2 * ratio)), 0.0, 1.0)


def range_size(height: int, width: int, min_dimension: int, max_dimension: int) -> list[int]:
    sides = tf.constant([height, width], tf.float32)
    large = tf.round(sides * (min_dimension / tf.reduce_min(sides)))
    small = tf.round(sides * (max_dimension / tf.reduce_max(sides)))
    size = small if tf.reduce_max(large) > max_dimension else large
    return [int(side) for side in size]


def in_frame(values: Any, frame: Any) -> Any:
    """`change_coordinate_frame`, of boxes (n, 4) or of points (n, k, 2)."""
    origin, sides = frame[:2], frame[2:] - frame[:2]
    if len(values.shape) == 2:
        origin, sides = tf.tile(origin, [2]), tf.tile(sides, [2])
    return (values - origin) / sides


def without_outer(points: Any) -> Any:
    inside = tf.reduce_all((points >= 0) & (points <= 1), axis=2, keepdims=True)
    return tf.where(inside, points, np.nan)


def intersection(boxes: Any, frame: Any) -> Any:
    sides = tf.minimum(boxes[:, 2:], frame[2:]) - tf.maximum(boxes[:, :2], frame[:2])
    return tf.reduce_prod(tf.maximum(sides, 0.0), axis=1)


def area(boxes: Any) -> Any:
    return tf.reduce_prod(boxes[:, 2:] - boxes[:, :2], axis=1)


if __name__ == "__main__":
    main()
