"""List the images in a folder for each class and convert them, as by the TensorFlow reference's build_image_data."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from lockstep.checks import Fraction, PositiveInt, check_value
from lockstep.convert.image_record import DECODING, LabelledImage, Synset, image_record
from lockstep.convert.sharding import DEFAULT, Settings, Summary, convert
from lockstep.errors import DataError
from lockstep.listing import shorten
from lockstep.readers.image_folder import ImageFolder
from lockstep.records.shards import check_local
from lockstep.screen import log

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
    """List the images of a folder, some of each class drawn for validation; both sets are shuffled.

    Args:
        folder: holds a folder for each class.
        labels: as in `image_sets`.
        share: the share of each class that validates, below 1, rounded, but one image at least; 0: all images train.
        per_class: the number of images of each class that validate, in place of a share.
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
            hint="name the folder above them; where it holds the folders of the classes, say which share validates",
        )
    taken = [name for names in found.values() for name in names]
    if others := [name for name in folders if name not in taken]:
        log.warning("Not converted in %s: %s", folder, shorten(others))
    return {name: folder / names[0] for name, names in found.items() if names}


def shuffled(images: Sequence[LabelledImage]) -> list[LabelledImage]:
    """Shuffle the images into the order in which the reference writes them, run by Python 3."""
    order = list(range(len(images)))
    random.Random(_SEED).shuffle(order)
    return [images[index] for index in order]


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
