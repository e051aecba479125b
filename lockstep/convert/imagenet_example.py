"""The records of images with a label: features as in the TensorFlow reference's build_image_data and its ImageNet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.convert.jpeg_repair import Jpeg, colour_jpeg
from lockstep.convert.manifest import Skipped
from lockstep.errors import DataError
from lockstep.records.example import Values, serialize_example


class Box(NamedTuple):
    """A box on an image, as shares of its width and height, 0 to 1."""

    xmin: float
    ymin: float
    xmax: float
    ymax: float


@dataclass(frozen=True, slots=True)
class Synset:
    """What ImageNet says more of an image."""

    name: str
    """Of its class in WordNet, such as n01440764."""
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class LabelledImage:
    """A file that becomes a record."""

    path: str
    """Within the folder that is converted."""
    label: int
    """1 for the first class: 0 is the background."""
    text: str
    """The class, for people."""
    version: tuple[int, int]
    """Size of the file in bytes, and time of its last change in nanoseconds."""
    synset: Synset | None = None


def image_record(folder: Path, image: LabelledImage) -> bytes | Skipped:
    """The record of an image; or why there is none: it cannot be decoded, or is a link to a file that is not there.

    Raises:
        DataError: the file cannot be read.
    """
    path = folder / image.path
    try:
        data = path.read_bytes()
    except OSError as error:
        if path.is_symlink() and not path.exists():
            return Skipped(image.path, f"a broken link: it points to {str(path.readlink())!r}")
        raise DataError(
            f"{path} cannot be read.",
            given=str(error),
            expected="the image that was there when the folder was listed",
            hint="put it back; the same command goes on",
        ) from error
    try:
        jpeg = colour_jpeg(data, str(path))
    except DataError as error:
        return Skipped(image.path, str(error.given))
    return image_example(image, jpeg)


def image_example(image: LabelledImage, jpeg: Jpeg) -> bytes:
    """The serialised `tf.train.Example` of an image."""
    features: dict[str, Values] = {
        "image/height": _integers(jpeg.height),
        "image/width": _integers(jpeg.width),
        "image/channels": _integers(3),
        "image/colorspace": [b"RGB"],
        "image/format": [b"JPEG"],
        "image/class/label": _integers(image.label),
        "image/class/text": [os.fsencode(image.text)],
        "image/filename": [os.fsencode(Path(image.path).name)],
        "image/encoded": [jpeg.data],
    }
    if image.synset:
        features |= _synset_features(image.synset, image.label)
    return serialize_example(features)


def _synset_features(synset: Synset, label: int) -> dict[str, Values]:
    edges = np.array(synset.boxes, dtype=np.float32).reshape(-1, 4).T
    boxes: dict[str, Values] = {f"image/object/bbox/{name}": edges[i].copy() for i, name in enumerate(Box._fields)}
    return boxes | {
        "image/class/synset": [synset.name.encode()],
        "image/object/bbox/label": np.full(len(synset.boxes), label, dtype=np.int64),
    }


def _integers(*values: int) -> Values:
    return np.array(values, dtype=np.int64)
