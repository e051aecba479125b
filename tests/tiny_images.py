"""Small photos of noise, each class of one colour, as folders and as records of ImageNet's schema."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from lockstep.records.example import serialize_example
from lockstep.records.tfrecord import write_records

HEIGHT, WIDTH = 24, 32


def photo(colour: int, number: int) -> bytes:
    """A JPEG that is mostly red, green or blue."""
    pixels = np.random.default_rng(number).integers(0, 100, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    pixels[..., colour % 3] += 150
    file = BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def image_folder(path: Path, count: int = 2, classes: Sequence[str] = ("red", "green", "blue")) -> Path:
    """A folder with a folder of so many photos for each class."""
    for colour, name in enumerate(classes):
        (path / name).mkdir(parents=True)
        for number in range(count):
            (path / name / f"{number}.jpg").write_bytes(photo(colour, number))
    return path


def image_record(label: int | None, number: int = 0, *, boxes: bool = False) -> bytes:
    """An example of ImageNet's schema; the colour is that of label - 1, as of a data set with a background."""
    features: dict[str, list[bytes] | np.ndarray] = {"image/encoded": [photo((label or 1) - 1, number)]}
    if label is not None:
        features["image/class/label"] = np.array([label])
    if boxes:
        for edge, share in (("ymin", 0.1), ("xmin", 0.2), ("ymax", 0.7), ("xmax", 0.8)):
            features[f"image/object/bbox/{edge}"] = np.array([share], np.float32)
    return serialize_example(features)


def image_shards(folder: Path, split: str, labels: Sequence[int | None], *, boxes: bool = False) -> str:
    """Two shards of records with these labels; returns their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [image_record(label, number, boxes=boxes) for number, label in enumerate(labels)]
    for shard in range(2):
        write_records(folder / f"{split}-{shard:05d}-of-00002", records[shard::2])
    return str(folder / f"{split}-*")
