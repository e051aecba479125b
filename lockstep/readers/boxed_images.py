"""Images with boxes of named classes on them, as VOC's XML, YOLO's texts and tables of CSV list them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.checks import check_value
from lockstep.images.decode import Decoding
from lockstep.images.masks import Outlines, joined_outlines
from lockstep.listing import shorten
from lockstep.readers.image_files import ImageFiles
from lockstep.readers.label_map import LabelMap
from lockstep.readers.object_table import (
    NO_AREA,
    NO_OUTLINE,
    SPANS,
    AnnotatedImages,
    Column,
    Float64s,
    ObjectTable,
    labels_of_names,
    shares_of_boxes,
    shares_of_keypoints,
    warn_of_objects,
)
from lockstep.readers.split_folders import ENDINGS
from lockstep.records.index_cache import Cache
from lockstep.screen import log
from lockstep.storage.remote_path import AnyPath

UNSPECIFIED = "Unspecified"
"""VOC's own word for what nobody has named."""
VIEW = "view"
MOST_PIXELS = 2**31
"""A side of an image is less."""


class BoxedObject(NamedTuple):
    """An object on an image."""

    name: str
    box: tuple[float, ...]
    """Top, left, bottom and right in pixels, as the file has them."""
    difficult: bool = False
    """Hard to recognise: evaluations leave it out."""
    truncated: bool = False
    """Reaching out of its box."""
    view: str = UNSPECIFIED
    """The side from which it is seen."""
    outline: bytes = b""
    """As `packed_outline` makes it."""
    keypoints: bytes = b""
    """float64: x and y in pixels, and visibility of each; as many for all objects."""


class BoxedImage(NamedTuple):
    """The annotation of one image."""

    file_name: str
    height: int
    """Height of the image, in pixels; 0 where it cannot be read, as its reading tells."""
    width: int
    objects: tuple[BoxedObject, ...]


class BoxedImages(AnnotatedImages):
    """Base of readers of boxes of named classes: images in a folder, in the order given, and their objects.

    Args:
        folder: in which the file names are to be found.
        label_map: the label of each class, by its name or display name.
        source: what holds the annotations, for messages.
        flags: the objects have the fields "difficult" and "truncated", too.
        difficult: keep the objects that are marked as difficult.
        decoding: how images are decoded when they are asked for.
        truth: also give what detections are scored against, of all objects, in the very numbers of the annotations.
        cache: where what is read of an object store is kept; by default in the user's cache.
        masks: the objects have the field "masks", too.
        num_keypoints: of each object, which then have the fields "keypoints" and "keypoint_visibility", too.
    """

    def __init__(
        self,
        folder: AnyPath,
        images: Sequence[BoxedImage],
        label_map: LabelMap,
        *,
        source: str,
        decoding: Decoding,
        truth: bool,
        cache: Cache,
        flags: bool = False,
        difficult: bool = True,
        masks: bool = False,
        num_keypoints: int = 0,
    ) -> None:
        for name, value in {"difficult": difficult, "truth": truth, "masks": masks}.items():
            check_value(name, value, bool)
        # What cannot be read has some size, of which no batch tells.
        images = [each if each.height else each._replace(height=1, width=1, objects=()) for each in images]
        sizes = np.array([(each.height, each.width) for each in images], np.int64)
        files = ImageFiles(folder, [each.file_name for each in images], sizes, decoding, cache)
        found = [each for image in images for each in image.objects]
        outlines = joined_outlines([each.outline for each in found]) if masks else None
        packed = b"".join(each.keypoints for each in found)
        points = np.frombuffer(packed).reshape(len(found), num_keypoints, 3) if num_keypoints else None
        objects, scored, self.views = _tables(images, found, label_map, difficult, source, outlines, points)
        """The views, by their number in the column "view"."""
        flagged = ("difficult", "truncated") if flags else ()
        pointed = ("keypoints", "keypoint_visibility") if num_keypoints else ()
        super().__init__(
            files,
            objects,
            ("boxes", "labels", *flagged, *pointed),
            label_map.names,
            scored if truth else None,
            tuple(name for name in scored.columns if name.startswith("truth_")),
            outlines,
        )


def warn_of_others(folder: AnyPath, there: Iterable[str], named: Iterable[str]) -> None:
    """Tell by the log which of the images in a folder no annotation names."""
    if others := sorted({name for name in there if name.lower().endswith(ENDINGS)} - {*named}):
        log.warning("Not read in %s, since no annotation names them: %s", folder, shorten(others), chief_only=True)


def _tables(
    images: Sequence[BoxedImage],
    objects: list[BoxedObject],
    label_map: LabelMap,
    difficult: bool,
    source: str,
    outlines: Outlines | None,
    keypoints: Float64s | None,
) -> tuple[ObjectTable, ObjectTable, list[str]]:
    """Tabulate the objects to train on, and all objects of the images, which detections are scored against.

    Also return the views, by their number in the column "view".
    """
    owners = np.repeat(np.arange(len(images)), [len(image.objects) for image in images])
    sizes = np.array([(image.height, image.width) for image in images], np.int64)[owners]
    corners = np.array([found.box for found in objects], np.float64).reshape(-1, 4)
    boxes, has_area = shares_of_boxes(corners, sizes, source)
    _warn(
        [(objects[place], images[owners[place]]) for place in np.flatnonzero(~has_area)], len(objects), source, NO_AREA
    )
    views = sorted({found.view for found in objects})
    codes = {view: code for code, view in enumerate(views)}
    labels = labels_of_names(
        [found.name for found in objects], label_map, source, lambda index: images[owners[index]].file_name
    )
    columns: dict[str, Column] = {
        "boxes": boxes,
        "labels": labels,
        "difficult": np.array([found.difficult for found in objects], np.bool_),
        "truncated": np.array([found.truncated for found in objects], np.bool_),
        VIEW: np.array([codes[found.view] for found in objects], np.int64),
    }
    top, left, bottom, right = corners.T
    scored: dict[str, Column] = {
        "truth_boxes": np.stack([left, top, right - left, bottom - top], axis=1),
        "truth_labels": labels,
        "truth_difficult": columns["difficult"],
    }
    if keypoints is not None:
        columns |= shares_of_keypoints(keypoints, sizes)
        scored["truth_keypoints"] = keypoints
    if outlines is not None:
        columns[SPANS] = scored[SPANS] = outlines.spans
        without = np.flatnonzero(np.diff(outlines.spans)[:, 0] == 0)
        _warn([(objects[place], images[owners[place]]) for place in without], len(objects), source, NO_OUTLINE)
    kept = has_area & (difficult | ~columns["difficult"])
    table = ObjectTable(owners[kept], {name: column[kept] for name, column in columns.items()}, len(images))
    return table, ObjectTable(owners, scored, len(images)), views


def _warn(odd: Sequence[tuple[BoxedObject, BoxedImage]], total: int, source: str, what: str) -> None:
    warn_of_objects([f"{found.name} on {image.file_name}" for found, image in odd], total, source, what)
