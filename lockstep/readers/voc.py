"""The reader of data sets in PASCAL VOC's format: a file of XML for each image."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.checks import check_switch
from lockstep.images.decode import AS_STORED, Decoding
from lockstep.listing import shorten
from lockstep.readers.fingerprint import Fingerprint
from lockstep.readers.image_files import ImageFiles
from lockstep.readers.image_folder import ENDINGS
from lockstep.readers.label_map import Label, LabelMap
from lockstep.readers.object_table import (
    NO_AREA,
    Column,
    ObjectTable,
    check_label_map,
    fingerprint_of_objects,
    labels_of_names,
    shares_of_boxes,
    warn_of_objects,
)
from lockstep.readers.reader import Cost, Int64s
from lockstep.readers.voc_files import annotation_files, folder_of_year, image_folder, split_files
from lockstep.readers.voc_xml import VocAnnotation, read_voc_xml
from lockstep.records.shards import check_local

_TENSORS = ("boxes", "labels", "difficult", "truncated")
_VIEW = "view"

_logger = logging.getLogger("lockstep")


class Voc:
    """The images of a split, in the order of its list, and the objects on them.

    The folder has Annotations/*.xml, JPEGImages/* and ImageSets/Main/<split>.txt, whose lines begin with the name of an
    annotation. Other tools name the folders annotations and images, or put all files into one; these have no lists, and
    are read with `split=None`: all annotations, by name. The image is the `filename` of the annotation.

    A batch is lists, with an entry for each image and n for the objects on it:

    - "image": `EncodedImage`; "source_id": the file name of the image
    - "boxes": float32 (n, 4) of top, left, bottom, right as shares of height and width: the file's numbers divided by
      the image's size as they are, as the object detection API of TensorFlow has it, though VOC counts its pixels from
      1; clipped to the image
    - "labels": int64 (n,), from 1 on; "class_text": n names of classes
    - "difficult", "truncated": bool (n,); "view": n words such as "Frontal"

    An object whose box has no area on its image is left out; the log names these, once. An image must be of the size
    that its annotation says: boxes belong to the raster as it is stored, which is how images are decoded by default.
    All annotations are read at once, in less than a millisecond each; they take 60 bytes an image and 40 an object.

    Args:
        root: the folder, such as VOCdevkit/VOC2012; with a year the one above, VOCdevkit.
        split: a list in ImageSets/Main, such as "train", "val", "trainval" or "test"; None for all annotations.
        year: of the challenge, such as 2007 or 2012.
        difficult: keep the objects that are marked so; they are marked in "difficult".
        label_map: the label of each class, by its name or display name. Without it the names in all annotations of the
            folder, whichever split is read, are numbered from 1 on in alphabetical order.
        decoding: how the images are decoded once they are asked for.

    Raises:
        InputError: an argument is of another type.
        DataError: there is no such folder or split, or an annotation of it is missing or broken; the label map lacks a
            class; or an image is missing.
    """

    cost: Cost = "decode"

    def __init__(
        self,
        root: str | Path,
        split: str | None = "train",
        *,
        year: int | None = None,
        difficult: bool = True,
        label_map: LabelMap | None = None,
        decoding: Decoding = AS_STORED,
    ) -> None:
        check_switch("difficult", difficult)
        check_label_map(label_map)
        check_local(root)
        folder = folder_of_year(Path(root), year)
        there = annotation_files(folder)
        paths = there if split is None else split_files(folder, split, there)
        read = {path: read_voc_xml(path) for path in (paths if label_map else there)}
        label_map = label_map or _alphabetical({found.name for each in read.values() for found in each.objects})
        self.classes = label_map.names
        """The name of each class by its label."""
        annotations = [read[path] for path in paths]
        names = [each.file_name for each in annotations]
        sizes = np.array([(each.height, each.width) for each in annotations], np.int64)
        self._files = ImageFiles(image_folder(folder), names, sizes, decoding)
        self.decoder = self._files.decoder
        if split is None:
            _warn_of_others(image_folder(folder), names)
        self._objects, self._views = _table(annotations, label_map, difficult, str(folder))

    def __len__(self) -> int:
        return len(self._files)

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """The images, not decoded, and what is known of the objects on them.

        Raises:
            DataError: an image cannot be read, or is not of the size that its annotation says.
        """
        fields: dict[str, Any] = {
            "image": [self._files.read(index) for index in indices.tolist()],
            "source_id": [self._files.name(index) for index in indices.tolist()],
            **{name: self._objects.tensors(name, indices) for name in _TENSORS},
        }
        fields["class_text"] = [[self.classes[label] for label in labels.tolist()] for labels in fields["labels"]]
        fields["view"] = [
            [self._views[code] for code in self._objects.rows(_VIEW, index)] for index in indices.tolist()
        ]
        return fields

    def example_id(self, index: int) -> str:
        """The file name of the image, as its annotation has it."""
        return self._files.name(index)

    def fingerprint(self) -> Fingerprint:
        """The classes, the views, and the images with their objects in groups; each with a checksum.

        Of the image files it has names and sizes in pixels, and of 1024 of them, evenly spaced, the sizes in bytes.
        """
        return fingerprint_of_objects(self._files, self._objects, self.classes) | {"views": ", ".join(self._views)}


def _alphabetical(names: set[str]) -> LabelMap:
    return LabelMap(tuple(Label(number, name) for number, name in enumerate(sorted(names), 1)))


def _warn_of_others(folder: Path, names: Iterable[str]) -> None:
    images = {path.name for path in folder.iterdir() if path.name.lower().endswith(ENDINGS)}
    if others := sorted(images - {*names}):
        _logger.warning("Not read in %s, since no annotation names them: %s", folder, shorten(others))


def _table(
    annotations: Sequence[VocAnnotation], label_map: LabelMap, difficult: bool, source: str
) -> tuple[ObjectTable, list[str]]:
    """The objects on all images, and the views that "view" counts from 0 on."""
    objects = [found for annotation in annotations for found in annotation.objects]
    images = np.repeat(np.arange(len(annotations)), [len(annotation.objects) for annotation in annotations])
    sizes = np.array([(annotation.height, annotation.width) for annotation in annotations], np.int64)[images]
    corners = np.array([found.box for found in objects], np.float64).reshape(-1, 4)
    boxes, has_area = shares_of_boxes(corners, sizes, source)
    without = np.flatnonzero(~has_area).tolist()
    names = [f"{objects[index].name} on {annotations[images[index]].file_name}" for index in without]
    warn_of_objects(names, len(objects), source, NO_AREA)
    views = sorted({found.view for found in objects})
    columns: dict[str, Column] = {
        "boxes": boxes,
        "labels": labels_of_names([found.name for found in objects], label_map, source),
        "difficult": np.array([found.difficult for found in objects], np.bool_),
        "truncated": np.array([found.truncated for found in objects], np.bool_),
        _VIEW: np.array([views.index(found.view) for found in objects], np.int64),
    }
    kept = has_area & (difficult | ~columns["difficult"])
    return ObjectTable(images[kept], {name: column[kept] for name, column in columns.items()}, len(annotations)), views
