"""Convert labelled images to records, and all those in a folder for each class.

Features are those of the TensorFlow reference's build_image_data and build_imagenet_data. A record holds a JPEG in
colour; images of other formats become JPEGs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from lockstep.checks import Fraction, PositiveInt, check_value
from lockstep.convert.conversion_state import SkippedItem
from lockstep.convert.sharding import DEFAULT, Settings, Summary, convert
from lockstep.errors import DataError
from lockstep.images import jpeg, pillow
from lockstep.images.decode import Decoding
from lockstep.listing import shorten
from lockstep.readers.image_folder import ImageFolder
from lockstep.records.example import Values, serialize_example
from lockstep.records.shards import check_local
from lockstep.screen import log

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
    return serialize_example(_features(image, encoded))


def colour_jpeg(data: bytes, source: str) -> Jpeg:
    """Encode an image as a JPEG that every decoder reads as red, green and blue; a grey or colour JPEG stays as it is.

    A JPEG of four inks (CMYK) and any other format, known by its content and not by its name, become a JPEG of quality
    100. The raster is not turned: a JPEG that stays keeps its EXIF orientation, that of another image is lost.
    """
    raster = DECODING.decode(data, source)
    _, height, width = raster.shape
    if not data.startswith(jpeg.START) or pillow.open_image(data).mode == _CMYK:
        data = jpeg_bytes(raster, quality=_QUALITY)
    return Jpeg(data, height, width)


def jpeg_bytes(raster: Tensor, **options: Any) -> bytes:
    """Encode a raster, uint8 of shape (3, height, width), as a JPEG with Pillow's options."""
    file = BytesIO()
    Image.fromarray(raster.permute(1, 2, 0).numpy()).save(file, "JPEG", **options)
    return file.getvalue()


def _features(image: LabelledImage, encoded: Jpeg) -> dict[str, Values]:
    features: dict[str, Values] = {
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
    if image.synset:
        name, boxes = image.synset.name, image.synset.boxes
        edges = np.array(boxes, dtype=np.float32).reshape(-1, 4).T
        features |= {f"image/object/bbox/{edge}": edges[i].copy() for i, edge in enumerate(Box._fields)}
        features["image/class/synset"] = [name.encode()]
        features["image/object/bbox/label"] = np.full(len(boxes), image.label, dtype=np.int64)
    return features


def _int64(value: int) -> Values:
    return np.array([value], dtype=np.int64)


SETS = {"validation": ("validation", "val"), "train": ("train",)}
"""The sets in the order in which they are converted, with the names that their folders may have."""

_SEED = 12345


def convert_images(
    folder: Path,
    images: Sequence[LabelledImage],
    output: Path,
    base: str,
    num_shards: int,
    *,
    settings: Settings = DEFAULT,
) -> Summary:
    """Write the records of images to the shards BASE-00000-of-00002 ... in the folder `output`, as `convert` does.

    Images that cannot be decoded and broken links are skipped. Other formats become JPEGs, as by `colour_jpeg`.
    """
    return convert(images, partial(image_record, folder), output, base, num_shards, settings=settings)


def image_sets(folder: Path, labels: Path | None = None) -> dict[str, list[LabelledImage]]:
    """List the images in the folders `train` and `validation` (or `val`) of a folder, shuffled; one may be missing.

    Each holds a folder for each class. The label of a class is its line in the file of labels, counted from 1; without
    that file it is the folder's place among all, sorted by name, which must be the same in both sets.
    """
    folders = find_sets(folder)
    readers = {name: _reader(path, labels) for name, path in folders.items()}
    _check_same_classes(folder, readers)
    return {name: shuffled(_list_images(folder, folders[name], reader)) for name, reader in readers.items()}


def split_images(
    folder: Path, labels: Path | None = None, *, share: float | None = None, per_class: int | None = None
) -> dict[str, list[LabelledImage]]:
    """List the images of a folder of classes, some of each class drawn for validation; both sets are shuffled.

    Labels are as in `image_sets`. `share` of each class validates, below 1, rounded, but one image at least; 0: all
    images train. `per_class` is the number of images of each class that validate, in place of a share.
    """
    if per_class is None:
        check_value("share", share, Fraction)
    else:
        check_value("per_class", per_class, PositiveInt)
    images = _list_images(folder, folder, _reader(folder, labels))
    drawing = random.Random(_SEED)
    sets: dict[str, list[LabelledImage]] = {"validation": [], "train": []}
    for name, group in groupby(images, lambda image: image.text):
        of_class = list(group)
        drawing.shuffle(of_class)
        count = per_class or (max(1, round(share * len(of_class))) if share else 0)
        if count >= len(of_class):
            raise DataError(
                f"{folder / name} has too few images to draw some for validation.",
                given=f"{len(of_class)} images, {count} of them to be drawn",
                expected="one more than is drawn, or more",
                hint="draw fewer, or leave the class out by a file of labels",
            )
        sets["validation"] += of_class[:count]
        sets["train"] += of_class[count:]
    return {name: shuffled(images) for name, images in sets.items() if images}


def find_sets(folder: Path) -> dict[str, Path]:
    """Find the folders of the sets in a folder, by the name of the set."""
    check_local(folder)
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    found = {name: [each for each in names if each in folders] for name, names in SETS.items()}
    if not any(found.values()) or any(len(names) > 1 for names in found.values()):
        raise DataError(
            f"{folder} does not hold sets of images.",
            given=shorten(folders, 10) or "no folders",
            expected="the folders train, and validation or val, one of them at least",
            hint="name the folder above them; for folders of classes alone say what validates: --validation-share 0.2",
        )
    taken = [name for names in found.values() for name in names]
    if others := [name for name in folders if name not in taken]:
        log.warning("Not converted in %s: %s", folder, shorten(others))
    return {name: folder / names[0] for name, names in found.items() if names}


def shuffled(images: Sequence[LabelledImage]) -> list[LabelledImage]:
    """Shuffle the images into the order in which the reference writes them, run by Python 3."""
    order = list(images)
    random.Random(_SEED).shuffle(order)
    return order


def labelled(folder: Path, path: Path, label: int, text: str, synset: Synset | None = None) -> LabelledImage:
    """Describe the image in a file below the folder that is converted."""
    try:
        status = path.stat()
        version = status.st_size, status.st_mtime_ns
    except OSError:  # such as a broken link: `image_record` says what is wrong
        version = 0, 0
    return LabelledImage(path.relative_to(folder).as_posix(), label, text, version, synset)


def _reader(folder: Path, labels: Path | None) -> ImageFolder:
    return ImageFolder(folder, labels, background=True, decoding=DECODING)


def _list_images(root: Path, folder: Path, reader: ImageFolder) -> list[LabelledImage]:
    labels = {text: label for label, text in enumerate(reader.classes)}
    names = [reader.example_id(index) for index in range(len(reader))]
    texts = [name.split("/", 1)[0] for name in names]
    return [labelled(root, folder / name, labels[text], text) for name, text in zip(names, texts, strict=True)]


def _check_same_classes(folder: Path, readers: Mapping[str, ImageFolder]) -> None:
    classes = [frozenset(reader.classes) for reader in readers.values()]
    if others := sorted(classes[0] ^ classes[-1]):
        raise DataError(
            f"The sets of images in {folder} have different classes.",
            given=f"in one of them alone: {shorten(others, 10)}",
            expected="a folder for each class in all of them: its label is its place among them",
            hint="give a file of labels, or each set the missing folders",
        )
