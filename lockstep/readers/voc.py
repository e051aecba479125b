"""Reads data sets in PASCAL VOC's format: an XML file for each image, as labelImg writes them, too.

The format is described at http://host.robots.ox.ac.uk/pascal/VOC.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn
from xml.etree.ElementTree import Element, ParseError, TreeBuilder, XMLParser

import numpy as np

from lockstep.checks import check_type, check_value
from lockstep.errors import DataError
from lockstep.images.decode import AS_STORED, Decoding
from lockstep.listing import shorten
from lockstep.readers import object_table
from lockstep.readers.fingerprint import Fingerprint, tells_options
from lockstep.readers.image_files import ImageFiles
from lockstep.readers.label_map import LabelMap
from lockstep.readers.paths import is_folder
from lockstep.readers.reader import Int64s
from lockstep.readers.split_folders import ENDINGS
from lockstep.records.index_cache import Cache
from lockstep.records.open_files import content_of, fetched
from lockstep.records.shards import data_path
from lockstep.screen import log
from lockstep.storage.remote_path import AnyPath

_TENSORS = ("boxes", "labels", "difficult", "truncated")
_VIEW = "view"
_ANNOTATIONS = ("Annotations", "annotations")
_IMAGES = ("JPEGImages", "images")
_EDGES = ("ymin", "xmin", "ymax", "xmax")
_MOST_PIXELS = 2**31  # on a side
_UNSPECIFIED = "Unspecified"  # VOC's own word for what nobody has named
_FLAGS = {"0": False, "1": True, "false": False, "true": True, _UNSPECIFIED.lower(): False, "": False}


@tells_options
class Voc(object_table.AnnotatedImages):
    """The images of a split, in the order of its list, and the objects on them.

    The folder has Annotations/*.xml, JPEGImages/* and ImageSets/Main/<split>.txt, whose lines begin with the name of an
    annotation. Other tools name the folders annotations and images, or put all files into one; these have no lists, and
    are read with `split=None`: all annotations, by name. The image is the `filename` of the annotation.

    A batch has an entry for each image, of n objects: tensors with n first are `Ragged`, the others are lists:

    - "image": `EncodedImage`; "source_id": the file name of the image
    - "boxes": float32 (n, 4) of top, left, bottom, right as shares of height and width: the file's numbers divided by
      the image's size as they are, as the object detection API of TensorFlow has it, though VOC counts its pixels from
      1; clipped to the image
    - "labels": int64 (n,), from 1 on; "class_text": n names of classes
    - "difficult", "truncated": bool (n,); "view": n words such as "Frontal"
    - with `truth`, what detections are scored against: all objects, with those that training leaves out, and the very
      numbers of the annotations. "truth_boxes": float64 (n, 4) of x, y, width and height; "truth_labels": int64 (n,);
      "truth_difficult": bool (n,)

    An object whose box has no area on its image is left out; the log names these, once. An image must be of the size
    that its annotation says: boxes belong to the raster as it is stored, which is how images are decoded by default.
    All annotations are read at once, in less than a millisecond each; they take 60 bytes an image, and 40 an object, or
    80 with `truth`.

    Args:
        root: the folder, such as VOCdevkit/VOC2012; with a year the one above, VOCdevkit.
        split: a list in ImageSets/Main, such as "train", "val", "trainval" or "test"; None for all annotations.
        year: of the challenge, such as 2007 or 2012.
        difficult: keep the objects that are marked as difficult.
        label_map: the label of each class, by its name or display name. Without it the names in all annotations of the
            folder, whichever split is read, are numbered from 1 on in alphabetical order.
        decoding: how images are decoded when they are asked for.
        truth: also give what detections are scored against.
        cache: where what is read of an object store is kept; by default in the user's cache.
    """

    def __init__(
        self,
        root: str | AnyPath,
        split: str | None = "train",
        *,
        year: int | None = None,
        difficult: bool = True,
        label_map: LabelMap | None = None,
        decoding: Decoding = AS_STORED,
        truth: bool = False,
        cache: Cache = None,
    ) -> None:
        check_value("difficult", difficult, bool)
        check_value("truth", truth, bool)
        object_table.check_label_map(label_map)
        folder = folder_of_year(data_path(root), year)
        there = annotation_files(folder)
        paths = there if split is None else split_files(folder, split, there)
        wanted = paths if label_map else there
        read = {path: read_voc_xml(path, data) for path, data in zip(wanted, fetched(wanted), strict=True)}
        label_map = label_map or LabelMap.alphabetical(found.name for each in read.values() for found in each.objects)
        annotations = [read[path] for path in paths]
        names = [each.file_name for each in annotations]
        sizes = np.array([(each.height, each.width) for each in annotations], np.int64)
        images = _existing(folder, _IMAGES)
        files = ImageFiles(images, names, sizes, decoding, cache)
        if split is None:
            _warn_of_others(images, names)
        objects, self._truth, self._views = _tables(annotations, label_map, difficult, truth, str(folder))
        super().__init__(files, objects, _TENSORS, label_map.names)

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the images of these examples, not decoded, and the fields of their objects."""
        fields = self._fields(indices)
        fields["view"] = [
            [self._views[code] for code in self._objects.rows(_VIEW, index)] for index in indices.tolist()
        ]
        return fields if self._truth is None else fields | self._truth.ragged(self._truth.columns, indices)

    def fingerprint(self) -> Fingerprint:
        """Describe classes, images and objects by checksums, and name the views."""
        return super().fingerprint() | {"views": ", ".join(self._views)}


def _warn_of_others(folder: AnyPath, names: Iterable[str]) -> None:
    images = {path.name for path in folder.iterdir() if path.name.lower().endswith(ENDINGS)}
    if others := sorted(images - {*names}):
        named = shorten(others)
        log.warning("Not read in %s, since no annotation names them: %s", folder, named, chief_only=True)


def _tables(
    annotations: Sequence[VocAnnotation], label_map: LabelMap, difficult: bool, truth: bool, source: str
) -> tuple[object_table.ObjectTable, object_table.ObjectTable | None, list[str]]:
    """Tabulate the objects to train on, and with `truth` all objects, which detections are scored against.

    Also return the views, by their number in the column "view".
    """
    objects = [found for annotation in annotations for found in annotation.objects]
    images = np.repeat(np.arange(len(annotations)), [len(annotation.objects) for annotation in annotations])
    sizes = np.array([(annotation.height, annotation.width) for annotation in annotations], np.int64)[images]
    corners = np.array([found.box for found in objects], np.float64).reshape(-1, 4)
    boxes, has_area = object_table.shares_of_boxes(corners, sizes, source)
    without = np.flatnonzero(~has_area).tolist()
    names = [f"{objects[index].name} on {annotations[images[index]].file_name}" for index in without]
    object_table.warn_of_objects(names, len(objects), source, object_table.NO_AREA)
    views = sorted({found.view for found in objects})
    columns: dict[str, object_table.Column] = {
        "boxes": boxes,
        "labels": object_table.labels_of_names([found.name for found in objects], label_map, source),
        "difficult": np.array([found.difficult for found in objects], np.bool_),
        "truncated": np.array([found.truncated for found in objects], np.bool_),
        _VIEW: np.array([views.index(found.view) for found in objects], np.int64),
    }
    kept = has_area & (difficult | ~columns["difficult"])
    table = object_table.ObjectTable(
        images[kept], {name: column[kept] for name, column in columns.items()}, len(annotations)
    )
    if not truth:
        return table, None, views
    top, left, bottom, right = corners.T
    scored = {
        "truth_boxes": np.stack([left, top, right - left, bottom - top], axis=1),
        "truth_labels": columns["labels"],
        "truth_difficult": columns["difficult"],
    }
    return table, object_table.ObjectTable(images, scored, len(annotations)), views


def folder_of_year(root: AnyPath, year: int | None) -> AnyPath:
    """Find the folder VOC<year> in a folder; without a year the folder itself."""
    if year is None:
        return root
    check_type("year", year, int, expected="a year, such as 2012", hint="write year=2012, or leave it out")
    folder = root / f"VOC{year}"
    if not folder.is_dir():
        raise DataError(
            f"There is no folder {folder}.",
            given=f"year={year}; in {root} there is {shorten(_years(root)) or 'no folder VOC*'}",
            expected="the folder above those of the years, VOCdevkit",
            hint="name another year, or without one the folder that holds the annotations",
        )
    return folder


def annotation_files(root: AnyPath) -> list[AnyPath]:
    """List the annotations by name, in Annotations, in annotations, or in the folder itself."""
    folder = _existing(root, _ANNOTATIONS)
    there = _matching(folder, "*.xml")
    if not there:
        years = _years(root)
        year = f"year={years[0].removeprefix('VOC')} (--year {years[0]})" if years else ""
        raise DataError(
            f"There are no annotations in {folder}.",
            given=f"no *.xml, but {shorten(years)}" if years else "no *.xml",
            expected=f"a folder with {' or '.join(_ANNOTATIONS)} in it, or the files themselves",
            hint=f"give the year, such as {year}" if years else "check the path",
        )
    return there


def split_files(root: AnyPath, split: str, there: Sequence[AnyPath]) -> list[AnyPath]:
    """Return the annotations that the list of a split names, in its order."""
    names = _listed(root, split)
    paths = {path.stem: path for path in there}
    if missing := [name for name in names if name not in paths]:
        raise DataError(
            f"The split {split!r} lists images without annotations.",
            given=f"no {shorten([f'{name}.xml' for name in missing])} in {there[0].parent}",
            expected=f"one for each of {len(names)} images",
            hint="copy them there, or take the images out of the list",
        )
    return [paths[name] for name in names]


def _listed(root: AnyPath, split: str) -> list[str]:
    """Return the names in the list of a split: the first word of each line."""
    folder = root / "ImageSets" / "Main"
    path = folder / f"{split}.txt"
    try:
        names = [line.split()[0] for line in content_of(path).decode().splitlines() if line.strip()]
    except (OSError, ValueError) as error:  # the second where it is no text, or the split no name
        # Those of single classes, such as cat_train, come last.
        splits = sorted((each.stem for each in folder.glob("*.txt")), key=lambda name: ("_" in name, name))
        raise DataError(
            f"The split {split!r} cannot be read.",
            given=str(error),
            expected=f"in {folder}: {shorten(splits)}" if splits else f"a list of names; there is none in {folder}",
            hint="name one of these" if splits else "read all annotations with split=None (--set all)",
        ) from error
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice or not names:
        raise DataError(
            f"{path} is no list of images.",
            given=f"{shorten(twice)} more than once" if twice else "no names",
            expected="one name or more, each on a line of its own and once",
            hint="repair the list",
        )
    return names


def _existing(root: AnyPath, names: Sequence[str]) -> AnyPath:
    """Return the first of these folders that exists, or the root itself."""
    return next((root / name for name in names if is_folder(root / name)), root)


def _years(root: AnyPath) -> list[str]:
    return [path.name for path in _matching(root, "VOC*") if path.is_dir()]


def _matching(folder: AnyPath, pattern: str) -> list[AnyPath]:
    """List what has such a name in a folder; nothing in a bucket that is not there, as in a folder that is not."""
    try:
        return sorted(folder.glob(pattern))
    except FileNotFoundError:
        return []


class VocObject(NamedTuple):
    """An object on an image."""

    name: str
    box: tuple[float, ...]
    """Top, left, bottom and right in pixels, as the file has them."""
    difficult: bool
    """Hard to recognise: evaluations leave it out."""
    truncated: bool
    """Reaching out of its box."""
    view: str
    """The side from which it is seen."""


class VocAnnotation(NamedTuple):
    """The annotation of one image."""

    file_name: str
    height: int
    """Height of the image, in pixels."""
    width: int
    objects: tuple[VocObject, ...]


def read_voc_xml(path: AnyPath, data: bytes | None = None) -> VocAnnotation:
    """Read one annotation. Parts of objects, such as hands, are skipped.

    `difficult` and `truncated` are 0 or 1, or false or true as some tools write them; missing or "Unspecified" is 0.

    Args:
        path: of the file.
        data: what is in it, where it has been read already.
    """
    try:
        parser = XMLParser(target=_Builder())
        parser.feed(content_of(path) if data is None else data)
        return _annotation(parser.close())
    except (OSError, ParseError, ValueError, LookupError) as error:  # the last for an unknown encoding
        raise DataError(
            f"{path} cannot be used as an annotation in PASCAL VOC's format.",
            given=str(error),
            expected="XML with filename, size (width, height), and for each object name and bndbox, without a DOCTYPE",
            hint="repair the file, or leave it and its image out",
        ) from error


class _Builder(TreeBuilder):
    """Refuses a document type before it is read: it could define entities that grow without bound."""

    def doctype(self, name: str, public_id: str | None, system: str | None) -> NoReturn:
        raise ValueError(f"a DOCTYPE {name}")


def _annotation(root: Element) -> VocAnnotation:
    height, width = (_number(root, f"size/{name}") for name in ("height", "width"))
    if not all(side.is_integer() and 0 < side < _MOST_PIXELS for side in (height, width)):
        raise ValueError(f"a size of {width:g} x {height:g} pixels")
    objects = tuple(_object(each, place) for place, each in enumerate(root.iterfind("object"), 1))
    return VocAnnotation(_text(root, "filename"), int(height), int(width), objects)


def _object(found: Element, place: int) -> VocObject:
    try:
        box = tuple(_number(found, f"bndbox/{edge}") for edge in _EDGES)
        view = found.findtext("pose", "").strip() or _UNSPECIFIED
        return VocObject(_text(found, "name"), box, _flag(found, "difficult"), _flag(found, "truncated"), view)
    except ValueError as error:
        raise ValueError(f"object {place}: {error}") from None


def _text(found: Element, name: str) -> str:
    text = found.findtext(name, "").strip()
    if not text:
        raise ValueError(f"no {name}")
    return text


def _number(found: Element, name: str) -> float:
    text = _text(found, name)
    try:
        number = math.nan if "_" in text else float(text)  # 1_000 is a number in Python alone
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} {text!r:.40}")
    return number


def _flag(found: Element, name: str) -> bool:
    text = found.findtext(name, "").strip()
    if text.lower() not in _FLAGS:
        raise ValueError(f"{name} {text!r:.40}")
    return _FLAGS[text.lower()]
