"""What TIDE and our kinds of errors are both given: images with detections near objects, far from them, and twice.

Masks of objects are ellipses in their boxes; those of detections, in theirs, fill more of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NUM_IMAGES, NUM_CLASSES, SIDE = 30, 3, 448
OF_OBJECT, OF_DETECTION = 2.0, 3.0
"""Powers of the curves around masks."""
Row = tuple[list[float], int, float]
"""Box of x, y, width and height; class from 1 on; score."""


def images() -> list[tuple[list[Row], list[Row]]]:
    """Detections and objects of each image; the score of an object means nothing."""
    made = []
    for number in range(NUM_IMAGES):
        numbers = np.random.Philox(key=number).random_raw(400) / 2**64  # the same in every version of numpy
        draw: Any = iter(numbers.tolist())
        objects = [_object(draw) for _ in range(int(6 * next(draw)))]
        detections = [
            (_moved(box, draw), label if next(draw) < 0.7 else 1 + int(NUM_CLASSES * next(draw)), next(draw))
            for box, label, _ in objects * 3
            if next(draw) < 0.8
        ]
        made.append((detections + [_object(draw) for _ in range(int(4 * next(draw)))], objects))
    return made


def mask(box: list[float], power: float) -> np.ndarray:
    """The pixels within a curve in a box: uint8 (SIDE, SIDE)."""
    left, top, width, height = box
    x, y = (
        np.abs((np.arange(SIDE) + 0.5 - first) / side * 2 - 1) ** power
        for first, side in ((left, width), (top, height))
    )
    return (x + y[:, None] <= 1).astype(np.uint8)


def _object(draw: Any) -> Row:
    sides = [20 + 60 * next(draw), 20 + 60 * next(draw)]
    return [300 * next(draw), 300 * next(draw), *sides], 1 + int(NUM_CLASSES * next(draw)), next(draw)


def _moved(box: list[float], draw: Any) -> list[float]:
    far = 0.9 * next(draw)
    return [side + far * box[2 + place % 2] * (next(draw) - 0.3) for place, side in enumerate(box[:2])] + [
        side * (1 + 0.5 * far * (next(draw) - 0.5)) for side in box[2:]
    ]
