"""Annotated images, and the objects on them as columns of numbers: a few bytes for each object."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lockstep.checks import check_type
from lockstep.images.masks import MaskOutlines, Outlines
from lockstep.listing import shorten
from lockstep.ragged import Ragged
from lockstep.readers.fingerprint import Fingerprint, checksum
from lockstep.readers.image_files import ImageFiles
from lockstep.readers.label_map import LabelMap, UnknownClassError
from lockstep.readers.reader import Cost, Int64s
from lockstep.screen import log

Column = npt.NDArray[Any]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NO_AREA = "have no area on their image, and are left out"
"""For the log: objects for which `shares_of_boxes` finds no area."""
NO_OUTLINE = "have no outline, and masks of zeros"

_MOST_GROUPS = 64
SPANS = "outline_spans"
"""Column with start and stop of each object's outline among the numbers of all outlines."""


class KnownObjects(NamedTuple):
    """What a reader of annotations knows of all its images without reading one."""

    sizes: Int64s
    """Height and width of each image, (images, 2)."""
    counts: Int64s
    """Number of objects of each image, (images,)."""
    labels: Int64s


class ObjectTable:
    """Columns of values by name, a row for each object, sorted by image.

    The index of each object's image may come in any order; objects of one image stay in the order given.
    """

    def __init__(self, images: Int64s, columns: Mapping[str, Column], num_images: int) -> None:
        order = np.argsort(images, kind="stable")
        self.columns = {name: values[order] for name, values in columns.items()}
        self.starts = np.searchsorted(images[order], np.arange(num_images + 1))
        """Where the objects of each image begin, and at the end the number of all objects."""

    def rows(self, name: str, index: int) -> Column:
        """Return one column's values of the objects on an image: a view, not to be changed."""
        return self.columns[name][self.starts[index] : self.starts[index + 1]]

    def ragged(self, names: Iterable[str], indices: Int64s) -> dict[str, Ragged]:
        """Copy some columns' values of the objects on some images."""
        first, lengths = self.starts[indices], self.starts[indices + 1] - self.starts[indices]
        ends = np.cumsum(lengths)
        places = np.arange(lengths.sum()) + np.repeat(first - ends + lengths, lengths)
        return {name: Ragged(torch.from_numpy(self.columns[name][places]), torch.from_numpy(lengths)) for name in names}


class AnnotatedImages:
    """Base of the readers of annotations: image files, and a table of the objects on them.

    Args:
        objects: those to train on.
        columns: the names of those columns of the table that are fields of a batch.
        classes: the name of each class by its label.
        truth: all objects, which detections are scored against.
        truth_columns: the names of those of its columns that are fields of a batch.
        outlines: of the masks; both tables have their spans as the column `SPANS`.
    """

    cost: Cost = "decode"

    def __init__(
        self,
        files: ImageFiles,
        objects: ObjectTable,
        columns: Sequence[str],
        classes: Mapping[int, str],
        truth: ObjectTable | None = None,
        truth_columns: Sequence[str] = (),
        outlines: Outlines | None = None,
    ) -> None:
        self._files, self._objects, self._columns = files, objects, columns
        self._truth, self._truth_columns, self._outlines = truth, truth_columns, outlines
        self.decoder = files.decoder
        self.classes = classes
        """The name of each class by its label."""

    def __len__(self) -> int:
        return len(self._files)

    @property
    def source_ids(self) -> list[str]:
        """The ids of all images, as texts."""
        return self._source_ids(np.arange(len(self)))

    def known_objects(self) -> KnownObjects:
        """Return what is known of all images without reading one."""
        return KnownObjects(self._files.sizes, np.diff(self._objects.starts), self._objects.columns["labels"])

    def example_id(self, index: int) -> str:
        """Return the file name of the image, as its annotation has it."""
        return self._files.names[index]

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the images of these examples, not decoded, and the fields of their objects."""
        fields: dict[str, Any] = {
            "image": self._files.read_each(indices),
            "source_id": self._source_ids(indices),
            **self._objects.ragged(self._columns, indices),
        }
        fields["class_text"] = [[self.classes[label] for label in labels.tolist()] for labels in fields["labels"]]
        if self._truth is not None:
            fields |= self._truth.ragged(self._truth_columns, indices)
        for name, objects in {"masks": self._objects, "truth_masks": self._truth}.items():
            if self._outlines is not None and objects is not None:
                fields[name] = [self._masks(index, objects, self._outlines) for index in indices.tolist()]
        return fields

    def fingerprint(self) -> Fingerprint:
        """Return a checksum of the classes, and of images and objects for each of at most 64 groups of images.

        Of the image files it covers names and sizes in pixels, and the sizes in bytes of 1024, evenly spaced.
        """
        names, sizes, objects = self._files.names, self._files.sizes, self._objects
        bounds = np.linspace(0, len(self), min(len(self), _MOST_GROUPS) + 1).astype(np.int64)
        found = {"classes": f"{len(self.classes)}, {checksum(json.dumps(self.classes).encode())}"}
        for (first, stop), block in zip(pairwise(bounds.tolist()), names.blocks(bounds), strict=True):
            starts = objects.starts[first : stop + 1]
            columns = [values[starts[0] : starts[-1]] for values in objects.columns.values()]
            name = names[first] if stop - first == 1 else f"{names[first]} to {names[stop - 1]}"
            all_of_them = checksum(*block, sizes[first:stop], starts - starts[0], *columns)
            found[name] = f"{stop - first} images, {starts[-1] - starts[0]} objects, {all_of_them}"
        return found if self._outlines is None else found | {"outlines": checksum(self._outlines.numbers)}

    def _masks(self, index: int, objects: ObjectTable, outlines: Outlines) -> MaskOutlines:
        spans = objects.rows(SPANS, index).tolist()
        height, width = self._files.sizes[index].tolist()
        return MaskOutlines(
            tuple(outlines.numbers[start:stop] for start, stop in spans), height, width, self._files.names.path(index)
        )

    def _source_ids(self, indices: Int64s) -> list[str]:
        """Return the ids of some images: unless overridden, their file names."""
        return [self._files.names[index] for index in indices.tolist()]


def shares_of_boxes(boxes: Float64s, sizes: Int64s, source: str) -> tuple[Float32s, Bools]:
    """Convert boxes to shares of height and width, clipped to their image; also return which have an area there.

    Boxes are (objects, 4) top, left, bottom, right, sizes (objects, 2) of each object's image, in pixels. The log tells
    how many of the source were clipped.
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


def shares_of_keypoints(keypoints: Float64s, sizes: Int64s) -> dict[str, Column]:
    """Make the fields of keypoints, (objects, keypoints, 3) of x and y in pixels and visibility, by images' sizes."""
    x, y, visibility = np.moveaxis(keypoints.astype(np.float32), 2, 0)
    points = np.stack([y, x], axis=2) / sizes[:, None]
    points[visibility == 0] = np.nan
    return {"keypoints": points.astype(np.float32), "keypoint_visibility": visibility.astype(np.int64)}


def check_label_map(label_map: object) -> None:
    """Refuse a value that is neither a label map nor None."""
    if label_map is not None:
        check_type("label_map", label_map, LabelMap, expected="a LabelMap", hint="read it: read_label_map(path)")


def labels_of_names(
    names: Sequence[str], label_map: LabelMap, source: str, image_of: Callable[[int], str] | None = None
) -> Int64s:
    """Look up the labels of objects by class name; an error if the label map lacks a class of `source`.

    `image_of` returns the file name of an image with an object, by the place of the object's name.
    """
    if missing := sorted({*names} - {*label_map.ids}):
        example = f"an object of it is on {image_of(names.index(missing[0]))}; " if image_of else ""
        raise UnknownClassError(
            f"{shorten(missing)} {'is' if len(missing) == 1 else 'are'} not in the label map.",
            given=f"{example}the class {missing[0]!r} of {source}",
            expected=f"a class that the label map has, by its name or its display name: {shorten([*label_map.ids])}",
            hint="add it to the label map, or take its objects out of the annotations",
        )
    return np.array([label_map.ids[name] for name in names], np.int64)


def warn_of_objects(names: Sequence[str], total: int, source: str, what: str) -> None:
    """Warn of odd objects of a source in one line of the log; `what` is odd about them."""
    if names:
        log.warning("%d of %d objects in %s %s: %s", len(names), total, source, what, shorten(names), chief_only=True)
