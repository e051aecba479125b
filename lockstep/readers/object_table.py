"""Objects on the images of a detection data set, as columns of numbers: a few bytes for each object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lockstep.checks import check_type
from lockstep.errors import DataError
from lockstep.listing import shorten
from lockstep.ragged import Ragged
from lockstep.readers.fingerprint import Fingerprint, checksum
from lockstep.readers.image_files import ImageFiles
from lockstep.readers.label_map import LabelMap
from lockstep.readers.reader import Int64s
from lockstep.screen import log

Column = npt.NDArray[Any]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NO_AREA = "have no area on their image, and are left out"
"""For the log: objects for which `shares_of_boxes` finds no area."""

_MOST_GROUPS = 64


class KnownObjects(NamedTuple):
    """What a reader of annotations knows of all its images without reading one."""

    sizes: Int64s
    """Height and width of each image, (images, 2)."""
    counts: Int64s
    """Number of objects of each image, (images,)."""
    labels: Int64s
    """Labels of all objects."""


class ObjectTable:
    """Columns of values by name, a row for each object, sorted by image.

    Args:
        images: the index of each object's image, in any order; objects of one image stay in the order given.
        columns: the values, with the objects first.
        num_images: number of images, with and without objects.
    """

    def __init__(self, images: Int64s, columns: Mapping[str, Column], num_images: int) -> None:
        order = np.argsort(images, kind="stable")
        self._columns = {name: values[order] for name, values in columns.items()}
        self._starts = np.searchsorted(images[order], np.arange(num_images + 1))

    def rows(self, name: str, index: int) -> Column:
        """Return one column's values of the objects on an image: a view, not to be changed."""
        return self._columns[name][self._starts[index] : self._starts[index + 1]]

    def known(self, files: ImageFiles) -> KnownObjects:
        """Return sizes, numbers of objects and labels of all images, whose files are given."""
        return KnownObjects(files.sizes, np.diff(self._starts), self._columns["labels"])

    def columns(self, first: int, stop: int) -> list[Column]:
        """Return the starts of each image's objects, then all columns, for images `first` to `stop` - 1."""
        starts = self._starts[first : stop + 1]
        return [starts - starts[0], *(values[starts[0] : starts[-1]] for values in self._columns.values())]

    def ragged(self, names: Iterable[str], indices: Int64s) -> dict[str, Ragged]:
        """Copy some columns' values of the objects on some images."""
        first, lengths = self._starts[indices], self._starts[indices + 1] - self._starts[indices]
        ends = np.cumsum(lengths)
        places = np.arange(lengths.sum()) + np.repeat(first - ends + lengths, lengths)
        return {
            name: Ragged(torch.from_numpy(self._columns[name][places]), torch.from_numpy(lengths)) for name in names
        }


def fingerprint_of_objects(files: ImageFiles, objects: ObjectTable, classes: Mapping[int, str]) -> Fingerprint:
    """Compute a checksum of the classes, and of images and objects for each of at most 64 groups of images.

    Of the image files it covers names and sizes in pixels, and the sizes in bytes of 1024, evenly spaced.
    """
    bounds = np.linspace(0, len(files), min(len(files), _MOST_GROUPS) + 1).astype(np.int64)
    found = {"classes": f"{len(classes)}, {checksum(json.dumps(classes).encode())}"}
    for (first, stop), block in zip(pairwise(bounds.tolist()), files.names.blocks(bounds), strict=True):
        columns = objects.columns(first, stop)
        name = files.names[first] if stop - first == 1 else f"{files.names[first]} to {files.names[stop - 1]}"
        all_of_them = checksum(*block, files.sizes[first:stop], *columns)
        found[name] = f"{stop - first} images, {columns[0][-1]} objects, {all_of_them}"
    return found


def shares_of_boxes(boxes: Float64s, sizes: Int64s, source: str) -> tuple[Float32s, Bools]:
    """Convert boxes to shares of height and width, clipped to their image; also return which have an area there.

    Args:
        boxes: (objects, 4) top, left, bottom, right, in pixels.
        sizes: (objects, 2) height and width of each object's image, in pixels.
        source: for the log, which tells how many were clipped.
    """
    limits = np.tile(sizes, 2)
    clipped = np.clip(boxes, 0, limits)
    shares = (clipped / limits).astype(np.float32)
    has_area = (shares[:, 2] > shares[:, 0]) & (shares[:, 3] > shares[:, 1])
    if num_clipped := int((has_area & (clipped != boxes).any(axis=1)).sum()):
        log.info(
            "%d of %d boxes in %s reach out of their image, and are clipped to it", num_clipped, len(boxes), source
        )
    return shares, has_area


def check_label_map(label_map: object) -> None:
    """Refuse a value that is neither a label map nor None."""
    if label_map is not None:
        check_type("label_map", label_map, LabelMap, expected="a LabelMap", hint="read it: read_label_map(path)")


def labels_of_names(names: Sequence[str], label_map: LabelMap, source: str) -> Int64s:
    """Look up the labels of objects by class name; an error if the label map lacks a class of `source`."""
    if missing := sorted({*names} - {*label_map.ids}):
        raise DataError(
            f"The label map lacks classes of {source}.",
            given=f"no {shorten(missing)}",
            expected="a label for each class that an object is of, by its name or its display name",
            hint="add them to the label map, or take these objects out of the annotations",
        )
    return np.array([label_map.ids[name] for name in names], np.int64)


def warn_of_objects(names: Sequence[str], total: int, source: str, what: str) -> None:
    """Warn of odd objects of a source in one line of the log; `what` is odd about them."""
    if names:
        log.warning("%d of %d objects in %s %s: %s", len(names), total, source, what, shorten(names), chief_only=True)
