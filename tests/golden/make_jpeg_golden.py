"""Have TensorFlow decode JPEGs. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tf
    /tmp/tf/bin/pip install "tensorflow-cpu==2.21.0"
    /tmp/tf/bin/python tests/golden/make_jpeg_golden.py

It writes `jpeg_golden.json` beside itself: SHA-256 of the pixels of some images. "accurate" is
dct_method="INTEGER_ACCURATE"; "default" is what TensorFlow does unless told otherwise.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import tensorflow as tf

HERE = Path(__file__).parent
IMAGES = HERE.parent / "fixtures" / "images"
NAMES = ("hopper.jpg", "hopper_gray.jpg", "jpeg.png", "padlock-406986_640_rotate_90.jpg")
METHODS = {"accurate": "INTEGER_ACCURATE", "default": ""}


def digest_of(name: str, method: str) -> str:
    pixels = tf.io.decode_jpeg((IMAGES / name).read_bytes(), channels=3, dct_method=method)
    return hashlib.sha256(pixels.numpy().tobytes()).hexdigest()


digests = {name: {kind: digest_of(name, method) for kind, method in METHODS.items()} for name in NAMES}
(HERE / "jpeg_golden.json").write_text(json.dumps(digests, indent=1) + "\n")
