"""Reads data sets in COCO's format: a file of annotations, and a folder of images."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lockstep.checks import check_value
from lockstep.errors import DataError
from lockstep.images.decode import AS_STORED, Decoding
from lockstep.readers.coco_annotations import CocoAnnotations, read_coco
from lockstep.readers.fingerprint import tells_options
from lockstep.readers.image_files import ImageFiles
from lockstep.readers.label_map import LabelMap, ZeroBasedError
from lockstep.readers.object_table import (
    NO_AREA,
    NO_OUTLINE,
    SPANS,
    AnnotatedImages,
    Bools,
    Column,
    ObjectTable,
    check_label_map,
    labels_of_names,
    shares_of_boxes,
    shares_of_keypoints,
    warn_of_objects,
)
from lockstep.readers.reader import Int64s
from lockstep.records.index_cache import Cache
from lockstep.records.shards import data_path
from lockstep.screen import log
from lockstep.storage.remote_path import AnyPath


@tells_options
class Coco(AnnotatedImages):
    """The images that a file of annotations lists, in its order, and the objects on them.

    A batch has an entry for each image, of n objects: tensors with n first are `Ragged`, the others are lists:

    - "image": `EncodedImage`; "source_id": the image's id, as text
    - "boxes": float32 (n, 4) of top, left, bottom, right as shares of height and width: x, y, x + width and y + height
      of `bbox` divided by the image's size, clipped to the image
    - "labels": int64 (n,); "class_text": n names of classes
    - "is_crowd": bool (n,); "area": float32 (n,) in pixels, that of the annotation, which is the mask's
    - with `masks`, "masks": `MaskOutlines` of the n objects; empty ones where an annotation has no outline
    - with `keypoints`, "keypoints": float32 (n, keypoints, 2) of y and x as shares of height and width, NaN where not
      labelled; "keypoint_visibility": int64 (n, keypoints) of 0 (not labelled), 1 (hidden), 2 (visible)
    - with `truth`, what detections are scored against: all objects, with those that training leaves out, and the very
      numbers of the annotations. "truth_boxes": float64 (n, 4) of x, y, width and height; "truth_labels", "truth_ids":
      int64 (n,); "truth_is_crowd": bool (n,); "truth_area": float64 (n,); with masks or keypoints, "truth_masks" as
      "masks", and "truth_keypoints": float64 (n, keypoints, 3) of x, y and visibility

    An object whose box has no area on its image is left out; the log names these, once. An image must be of the size
    that the annotations say: boxes belong to the raster as it is stored, which is how images are decoded by default.

    Memory: about 60 bytes an image, and 40 an object; with `masks` 4 more for each number of an outline, 200 MB for
    COCO's training set; with `keypoints` 16 more for each keypoint of each object. With `truth` 60 more an object, and
    24 a keypoint.

    Args:
        annotations: the file, such as annotations/instances_train2017.json or person_keypoints_train2017.json.
        images: the folder in which the file names of the annotations are to be found.
        masks: read the masks of the objects, too.
        keypoints: read their keypoints, too.
        label_map: the label of each category, by its name or display name; without it a category's id is its label,
            which for COCO means 80 labels from 1 to 90.
        zero_based: the label of a category is its id + 1, where there is no label map, since 0 is the label of the
            background; None: so it is where the file has a category 0 that is more than the background, or than the
            group of the others, as Roboflow writes it.
        decoding: how images are decoded when they are asked for.
        crowd: keep the objects that are crowds.
        empty_images: keep the images without objects.
        truth: also give what detections are scored against.
        cache: where what is read of an object store is kept; by default in the user's cache.
    """

    def __init__(
        self,
        annotations: str | AnyPath,
        images: str | AnyPath,
        *,
        masks: bool = False,
        keypoints: bool = False,
        label_map: LabelMap | None = None,
        zero_based: bool | None = None,
        decoding: Decoding = AS_STORED,
        crowd: bool = True,
        empty_images: bool = True,
        truth: bool = False,
        cache: Cache = None,
    ) -> None:
        switches = {"masks": masks, "keypoints": keypoints, "crowd": crowd, "empty_images": empty_images}
        for name, value in {**switches, "truth": truth}.items():
            check_value(name, value, bool)
        check_value("zero_based", zero_based, bool | None)
        check_label_map(label_map)
        path, folder = data_path(annotations), data_path(images)
        read = read_coco(path, masks=masks, keypoints=keypoints)
        labels, classes, self.category_ids = _classes(read, label_map, zero_based, path)
        """The id that the file has for each class, by its label."""
        columns, has_area = _columns(read, labels, str(path))
        _warn(read, ~has_area, path, NO_AREA)
        if read.outlines is not None:
            start, stop = read.outlines.spans.T
            _warn(read, start == stop, path, NO_OUTLINE)
        kept = np.flatnonzero(has_area & (crowd | ~read.is_crowd))
        used = np.arange(len(read.sizes)) if empty_images else np.unique(read.images[kept])
        self._ids = read.image_ids[used]
        files = ImageFiles(folder, [read.file_names[index] for index in used], read.sizes[used], decoding, cache)
        spans: dict[str, Column] = {} if read.outlines is None else {SPANS: read.outlines.spans}
        scored, there = _truth(read, labels) if truth else {}, np.flatnonzero(np.isin(read.images, used))
        super().__init__(
            files,
            _table(columns | spans, kept, read.images, used),
            tuple(columns),
            classes,
            _table(scored | spans, there, read.images, used) if truth else None,
            tuple(scored),
            read.outlines,
        )

    def _source_ids(self, indices: Int64s) -> list[str]:
        return [str(number) for number in self._ids[indices].tolist()]


def _classes(
    read: CocoAnnotations, label_map: LabelMap | None, zero_based: bool | None, path: AnyPath
) -> tuple[Int64s, dict[int, str], dict[int, int]]:
    """Return the label of each object; and by label the name of each class, and its id in the file."""
    used, first, places = np.unique(read.category_ids, return_index=True, return_inverse=True)
    names = [read.categories[number] for number in used.tolist()]
    if label_map is None:
        if zero_based is None:
            zero_based = 0 in read.categories and (0 in used or not read.zero_is_a_group)
            if zero_based:
                log.info("the categories of %s count from 0: the label of each is its id + 1", path, chief_only=True)
        shift = int(zero_based)
        least = 1 - shift
        if len(used) and used[0] < least:
            raise (DataError if used[0] else ZeroBasedError)(
                f"The ids of categories in {path} cannot be labels.",
                given=f"the id {used[0]} of {names[0]!r}",
                expected=f"ids from {least} on: the label 0 is that of the background",
                hint=("" if used[0] else "leave zero_based out, and each label is the id + 1; or ")
                + "give a label_map, with a label for each category by its name",
            )
        classes = {number + shift: name for number, name in read.categories.items()}
        return read.category_ids + shift, classes, {number + shift: number for number in read.categories}
    ids = label_map.ids
    labels = labels_of_names(names, label_map, str(path), lambda place: read.file_names[read.images[first[place]]])
    labels = labels[places]
    return labels, label_map.names, {ids[name]: number for number, name in read.categories.items() if name in ids}


def _warn(read: CocoAnnotations, odd: Bools, path: AnyPath, what: str) -> None:
    names = [f"annotation {number}" for number in read.object_ids[odd].tolist()]
    warn_of_objects(names, len(odd), str(path), what)


def _columns(read: CocoAnnotations, labels: Int64s, source: str) -> tuple[dict[str, Column], Bools]:
    """Return the fields of all objects by name, and a mask of the objects with an area on their image."""
    sizes = read.sizes[read.images]
    left, top, width, height = read.boxes.T
    boxes, has_area = shares_of_boxes(np.stack([top, left, top + height, left + width], axis=1), sizes, source)
    columns: dict[str, Column] = {
        "boxes": boxes,
        "labels": labels,
        "is_crowd": read.is_crowd,
        "area": read.areas.astype(np.float32),
    }
    if read.keypoints is not None:
        columns |= shares_of_keypoints(read.keypoints, sizes)
    return columns, has_area


def _truth(read: CocoAnnotations, labels: Int64s) -> dict[str, Column]:
    """Return the fields of ground truth of all objects by name."""
    truth: dict[str, Column] = {
        "truth_boxes": read.boxes,
        "truth_labels": labels,
        "truth_ids": read.object_ids,
        "truth_is_crowd": read.is_crowd,
        "truth_area": read.areas,
    }
    return truth if read.keypoints is None else truth | {"truth_keypoints": read.keypoints}


def _table(columns: Mapping[str, Column], objects: Int64s, images: Int64s, used: Int64s) -> ObjectTable:
    """Tabulate the columns of some objects by the images that are used, given the image of each of all objects."""
    chosen = {name: column[objects] for name, column in columns.items()}
    return ObjectTable(np.searchsorted(used, images[objects]), chosen, len(used))
