"""Reads data sets in PASCAL VOC's format: an XML file for each image, as labelImg writes them, too.

The format is described at http://host.robots.ox.ac.uk/pascal/VOC.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from xml.etree.ElementTree import Element, ParseError, TreeBuilder, XMLParser

from lockstep.checks import check_type
from lockstep.errors import DataError
from lockstep.images.decode import AS_STORED, Decoding
from lockstep.listing import shorten
from lockstep.readers.boxed_images import (
    MOST_PIXELS,
    UNSPECIFIED,
    VIEW,
    BoxedImage,
    BoxedImages,
    BoxedObject,
    warn_of_others,
)
from lockstep.readers.fingerprint import Fingerprint, tells_options
from lockstep.readers.label_map import LabelMap
from lockstep.readers.object_table import check_label_map
from lockstep.readers.paths import has_images, is_folder
from lockstep.readers.reader import Int64s
from lockstep.readers.split_folders import ENDINGS
from lockstep.records.index_cache import Cache
from lockstep.records.open_files import content_of, fetched
from lockstep.records.shards import data_path
from lockstep.storage.remote_path import AnyPath

_ANNOTATIONS = ("Annotations", "annotations/xmls", "annotations", "xmls", "xml")
_IMAGES = ("JPEGImages", "images")
_EDGES = ("ymin", "xmin", "ymax", "xmax")
_FLAGS = {"0": False, "1": True, "false": False, "true": True, UNSPECIFIED.lower(): False, "": False}


@tells_options
class Voc(BoxedImages):
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
        check_label_map(label_map)
        folder = folder_of_year(data_path(root), year)
        there = annotation_files(folder)
        paths = there if split is None else split_files(folder, split, there)
        read = _read(paths if label_map else there)
        label_map = label_map or LabelMap.alphabetical(_classes(read))
        annotations = [read[path] for path in paths]
        images = _folder_of_images(folder)
        super().__init__(
            images,
            annotations if split else _as_stored(images, annotations, [path.stem for path in paths]),
            label_map,
            source=str(folder),
            flags=True,
            difficult=difficult,
            truth=truth,
            decoding=decoding,
            cache=cache,
        )

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the images of these examples, not decoded, and the fields of their objects."""
        fields = super().read_batch(indices)
        fields["view"] = [[self.views[code] for code in self._objects.rows(VIEW, index)] for index in indices.tolist()]
        return fields

    def fingerprint(self) -> Fingerprint:
        """Describe classes, images and objects by checksums, and name the views."""
        return super().fingerprint() | {"views": ", ".join(self.views)}


def classes_in_xml(root: AnyPath, year: int | None = None) -> set[str]:
    """Return the names of the classes in all annotations of a folder."""
    return _classes(_read(annotation_files(folder_of_year(root, year))))


def _read(paths: Sequence[AnyPath]) -> dict[AnyPath, BoxedImage]:
    return {path: read_voc_xml(path, data) for path, data in zip(paths, fetched(paths), strict=True)}


def _classes(read: Mapping[AnyPath, BoxedImage]) -> set[str]:
    return {found.name for each in read.values() for found in each.objects}


def _as_stored(folder: AnyPath, annotations: Sequence[BoxedImage], stems: Sequence[str]) -> list[BoxedImage]:
    """Name the images as they are there, and tell which no annotation names.

    Some tools leave the ending out of `filename`, or keep the name that an image had before it was renamed with its
    annotation, which another image may have: it is then the one that is named like the annotation, but for the ending.
    """
    there = {entry.name for entry in folder.iterdir()}
    by_stem: dict[str, list[str]] = {}
    for name in there:
        if name.lower().endswith(ENDINGS):
            by_stem.setdefault(name.rpartition(".")[0], []).append(name)
    times = Counter(annotation.file_name for annotation in annotations)
    names = []
    for annotation, stem in zip(annotations, stems, strict=True):
        name = annotation.file_name
        alike = by_stem.get(stem, [])
        is_sure = "/" in name or (name in there and times[name] == 1)
        names.append(alike[0] if len(alike) == 1 and not is_sure else name)
    warn_of_others(folder, there, names)
    return [each._replace(file_name=name) for each, name in zip(annotations, names, strict=True)]


def _folder_of_images(root: AnyPath) -> AnyPath:
    """Return the folder of images in that of the annotations, or itself; if it holds none, that beside it."""
    inside, beside = _existing(root, _IMAGES), _existing(root.parent, _IMAGES)
    return beside if inside == root and beside != root.parent and not has_images(root) else inside


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
            expected="a folder with Annotations or annotations in it, or the files themselves",
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


def read_voc_xml(path: AnyPath, data: bytes | None = None) -> BoxedImage:
    """Read one annotation, whose content may have been read already. Parts of objects, such as hands, are skipped.

    `difficult` and `truncated` are 0 or 1, or false or true as some tools write them; missing or "Unspecified" is 0.
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


def _annotation(root: Element) -> BoxedImage:
    height, width = (_number(root, f"size/{name}") for name in ("height", "width"))
    if not all(side.is_integer() and 0 < side < MOST_PIXELS for side in (height, width)):
        raise ValueError(f"a size of {width:g} x {height:g} pixels")
    objects = tuple(_object(each, place) for place, each in enumerate(root.iterfind("object"), 1))
    return BoxedImage(_text(root, "filename"), int(height), int(width), objects)


def _object(found: Element, place: int) -> BoxedObject:
    try:
        box = tuple(_number(found, f"bndbox/{edge}") for edge in _EDGES)
        view = found.findtext("pose", "").strip() or UNSPECIFIED
        return BoxedObject(_text(found, "name"), box, _flag(found, "difficult"), _flag(found, "truncated"), view)
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
