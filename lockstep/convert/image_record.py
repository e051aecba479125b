"""Records of labelled images, with the features of the TensorFlow reference's build_image_data and build_imagenet_data.

A record holds a JPEG in colour; images of other formats become JPEGs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from lockstep.convert.conversion_state import SkippedItem
from lockstep.errors import DataError
from lockstep.images import jpeg, pillow
from lockstep.images.decode import Decoding
from lockstep.records.example import Values, serialize_example

DECODING = Decoding("pillow")
"""One decoder for all machines, so that the records are the same on all."""

_QUALITY = 100
_CMYK = "CMYK"


class Box(NamedTuple):
    """A box on an image, as shares of its width and height, 0 to 1."""

    xmin: float
    ymin: float
    xmax: float
    ymax: float


@dataclass(frozen=True, slots=True)
class Synset:
    """The class of an image in WordNet, such as n01440764, and the boxes on the image."""

    name: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class LabelledImage:
    """An image file to be converted. Its `repr` is part of the conversion's fingerprint."""

    path: str
    """Relative to the folder that is converted."""
    label: int
    """1 for the first class: 0 is the background."""
    text: str
    """The readable name of the class."""
    version: tuple[int, int]
    """Size of the file in bytes, and time of its last change in nanoseconds."""
    synset: Synset | None = None


class Jpeg(NamedTuple):
    """A JPEG, and the size of its raster in pixels."""

    data: bytes
    height: int
    width: int


def image_record(folder: Path, image: LabelledImage) -> bytes | SkippedItem:
    """Make the record of an image; one that cannot be decoded, and a broken link, are skipped."""
    path = folder / image.path
    try:
        data = path.read_bytes()
    except OSError as error:
        if path.is_symlink() and not path.exists():
            return SkippedItem(image.path, f"a broken link: it points to {str(path.readlink())!r}")
        raise DataError(
            f"{path} cannot be read.",
            given=str(error),
            expected="the image that was there when the folder was listed",
            hint="put it back; the same command goes on",
        ) from error
    try:
        encoded = colour_jpeg(data, str(path))
    except DataError as error:
        return SkippedItem(image.path, str(error.given))
    features = _image_features(image, encoded)
    if image.synset:
        features |= _synset_features(image.synset, image.label)
    return serialize_example(features)


def colour_jpeg(data: bytes, source: str) -> Jpeg:
    """Encode an image as a JPEG that every decoder reads as red, green and blue; a grey or colour JPEG stays as it is.

    A JPEG of four inks (CMYK) and any other format, known by its content and not by its name, become a JPEG of quality
    100. The raster is not turned: a JPEG that stays keeps its EXIF orientation, that of another image is lost.
    """
    raster = DECODING.decode(data, source)
    _, height, width = raster.shape
    if not data.startswith(jpeg.START) or pillow.open_image(data).mode == _CMYK:
        data = _encode(raster)
    return Jpeg(data, height, width)


def _encode(raster: Tensor) -> bytes:
    """Encode a raster, uint8 of shape (3, height, width), as a JPEG."""
    file = BytesIO()
    Image.fromarray(raster.permute(1, 2, 0).numpy(), "RGB").save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def _image_features(image: LabelledImage, encoded: Jpeg) -> dict[str, Values]:
    return {
        "image/height": _int64(encoded.height),
        "image/width": _int64(encoded.width),
        "image/channels": _int64(3),
        "image/colorspace": [b"RGB"],
        "image/format": [b"JPEG"],
        "image/class/label": _int64(image.label),
        "image/class/text": [os.fsencode(image.text)],
        "image/filename": [os.fsencode(Path(image.path).name)],
        "image/encoded": [encoded.data],
    }


def _synset_features(synset: Synset, label: int) -> dict[str, Values]:
    edges = np.array(synset.boxes, dtype=np.float32).reshape(-1, 4).T
    boxes: dict[str, Values] = {f"image/object/bbox/{name}": edges[i].copy() for i, name in enumerate(Box._fields)}
    return boxes | {
        "image/class/synset": [synset.name.encode()],
        "image/object/bbox/label": np.full(len(synset.boxes), label, dtype=np.int64),
    }


def _int64(value: int) -> Values:
    return np.array([value], dtype=np.int64)
