"""What both sides of the recorded RT-DETRs begin with: sizes, images, objects, weights from names, draws of noise."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PATH = Path(__file__).parent / "rt_detr_golden.npz"
SIDES = (64, 96)
NUM_CLASSES, NUM_QUERIES, NUM_DENOISING = 3, 12, 8
SIZES: dict[str, dict[str, Any]] = {
    "basic": {"bottleneck": False, "decoder_layers": 2, "expansion": 0.5},
    "bottleneck": {"bottleneck": True, "decoder_layers": 3, "expansion": 1.0},
}
SHARED: dict[str, Any] = {"depths": (1, 2, 1, 1), "channels": 16, "feed_forward": 24, "stem": 8, "queries": 32}
SHARED |= {"decoder_feed_forward": 40, "heads": 4}
LOSSES = {"vfl": "classification", "bbox": "boxes", "giou": "giou"}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "r18vd": (
        {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"},
        {"encoder_in_channels": [128, 256, 512], "hidden_expansion": 0.5, "decoder_layers": 3},
    ),
    "r34vd": (
        {"hidden_sizes": [64, 128, 256, 512], "depths": [3, 4, 6, 3], "layer_type": "basic"},
        {"encoder_in_channels": [128, 256, 512], "hidden_expansion": 0.5, "decoder_layers": 4},
    ),
    "r50vd": ({}, {}),
    "r101vd": (
        {"depths": [3, 4, 23, 3]},
        {"encoder_ffn_dim": 2048, "encoder_hidden_dim": 384, "decoder_in_channels": [384] * 3},
    ),
}
"""What the published configurations say of the backbone and of the rest, where it is not the default."""

Array = npt.NDArray[np.float32]


def images() -> Array:
    """Two images from 0 to 255, (batch, 3, height, width)."""
    return np.random.default_rng(0).uniform(0, 255, (2, 3, *SIDES)).astype(np.float32)


def objects() -> tuple[list[Array], list[npt.NDArray[np.int64]]]:
    """The boxes of each image, as shares (top, left, bottom, right), and their classes, from 0 on."""
    boxes = [[[0.1, 0.2, 0.6, 0.7], [0.5, 0.5, 0.95, 0.9], [0.2, 0.1, 0.3, 0.15]], [[0.3, 0.05, 0.5, 0.4]]]
    return [np.array(each, np.float32) for each in boxes], [np.array([0, 2, 2]), np.array([1])]


def draws() -> Array:
    """The numbers that the queries with noise are made of: (batch, queries, 10)."""
    return np.random.default_rng(1).random((2, 2 * (NUM_DENOISING // 3) * 3, 10), dtype=np.float32)


def weights(name: str, shape: Sequence[int]) -> Array:
    """The value of a parameter or buffer, by its name."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).random(tuple(shape), dtype=np.float32)
    if len(shape) == 1:
        is_scale = name.endswith((".weight", ".running_var"))
        return drawn + np.float32(0.5) if is_scale else (drawn - np.float32(0.5)) / np.float32(5)
    return (drawn - np.float32(0.5)) * np.float32(np.sqrt(16 / np.prod(shape[1:])))
