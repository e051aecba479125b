"""Have TensorFlow resample features within boxes and suppress boxes. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tf
    /tmp/tf/bin/pip install "tensorflow-cpu==2.21.0"
    /tmp/tf/bin/python tests/golden/make_regions_golden.py

It writes `regions_golden.npz` beside itself: the inputs, what `tf.image.crop_and_resize` made of them and of the
gradient, and what `tf.image.non_max_suppression_with_scores` chose.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

CROPS = ((14, 14), (1, 3), (2, 1))
SIGMAS = (0.0, 0.3, 2.0)
THRESHOLDS = ((1.0, 0.0), (0.5, 0.2))  # of the overlap, of the score


def main() -> None:
    rng = np.random.default_rng(0)
    arrays = crops(rng) | suppressed(rng)
    np.savez_compressed(Path(__file__).parent / "regions_golden.npz", **arrays)


def crops(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Boxes inside, across the borders, outside, turned round, a point, the whole image."""
    features = rng.normal(size=(2, 9, 12, 3)).astype(np.float32)
    drawn = rng.uniform(-0.3, 1.3, size=(12, 4))
    by_hand = [[0, 0, 1, 1], [0.2, 0.3, 0.2, 0.3], [0.9, 0.8, 0.1, 0.2], [1.5, 1.5, 2, 2], [0, 0, 0, 0]]
    boxes = np.concatenate([drawn, by_hand]).astype(np.float32)
    image_of = rng.integers(2, size=len(boxes)).astype(np.int32)
    arrays = {"features": features, "boxes": boxes, "image_of": image_of}
    for number, size in enumerate(CROPS):
        with tf.GradientTape() as tape:
            given = tf.constant(features)
            tape.watch(given)
            made = tf.image.crop_and_resize(given, boxes, image_of, size)
            total = tf.reduce_sum(made * made)
        arrays[f"crops_{number}"] = made.numpy()
        arrays[f"gradient_{number}"] = tape.gradient(total, given).numpy()
    return arrays


def suppressed(rng: np.random.Generator) -> dict[str, np.ndarray]:
    corners = rng.uniform(0, 40, size=(80, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(0, 30, size=(80, 2))], 1).astype(np.float32)
    boxes[3, 2:] = boxes[3, :2]
    scores = (rng.integers(0, 100, size=80) / 100).astype(np.float32)
    arrays = {"rivals": boxes, "scores": scores}
    for number, sigma in enumerate(SIGMAS):
        for other, (iou_threshold, score_threshold) in enumerate(THRESHOLDS):
            places, lowered = tf.image.non_max_suppression_with_scores(
                boxes, scores, 50, iou_threshold, score_threshold, sigma
            )
            arrays[f"places_{number}_{other}"] = places.numpy()
            arrays[f"lowered_{number}_{other}"] = lowered.numpy()
    return arrays


if __name__ == "__main__":
    main()
