"""Files of annotations in COCO's format (https://cocodataset.org/#format-data), as columns of numbers.

A file of 450 MB holds a million dicts. They never exist at once, as each annotation is packed to some hundred bytes
while the file is parsed; for this half minute, memory also holds the file twice.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lockstep.errors import DataError
from lockstep.images.masks import Outlines, joined_outlines, packed_outline
from lockstep.readers.label_map import BACKGROUND
from lockstep.records.open_files import content_of
from lockstep.storage.remote_path import AnyPath

if TYPE_CHECKING:
    from lockstep.readers.object_table import Column, Float64s
    from lockstep.readers.reader import Int64s

_MOST_PIXELS = 2**31  # on a side
_MOST_AREA = 2**62  # in pixels

_OBJECT = struct.Struct("<qqq4dd?")
_COLUMNS = np.dtype(
    [("id", "<i8"), ("image_id", "<i8"), ("category_id", "<i8"), ("box", "<f8", 4), ("area", "<f8"), ("is_crowd", "?")]
)
NUMBERS_OF_A_KEYPOINT = 3  # x, y, visibility
_VISIBILITIES = (0, 1, 2)  # not labelled, labelled but hidden, labelled and visible

_SIDE = f"a whole number of pixels, from 1 to {_MOST_PIXELS - 1}"
EXPECTED = {
    "id": "a whole number of 64 bits, which nothing else in its list has",
    "image_id": "the id of one of the images",
    "category_id": "the id of one of the categories",
    "bbox": "four finite numbers: x and y of the upper left corner, width and height, in pixels",
    "area": "a finite number of square pixels, 0 or more; null or left out for that of the box",
    "iscrowd": "0 or 1; null or left out for 0",
    "segmentation": "a list of polygons, each of x and y of its corners; or runs, of as many pixels as their size has",
    "keypoints": "finite numbers, x, y and visibility (0, 1 or 2) of each keypoint, equally many for all objects",
    "height": _SIDE,
    "width": _SIDE,
    "file_name": "the path of the image's file, as text",
    "name": "the name of the category, as text",
}
"""What each entry of an image, an annotation or a category is to be."""


class EntryError(ValueError):
    """An entry that cannot be used: its name, and what is wrong with it."""

    def __init__(self, name: str, wrong: str) -> None:
        super().__init__(wrong)
        self.name = name


class CocoAnnotations(NamedTuple):
    """The content of a file of annotations, with images and objects in its order."""

    image_ids: Int64s
    file_names: list[str]
    sizes: Int64s
    """Height and width of each image, (images, 2)."""
    categories: dict[int, str]
    """The name of each category by its id."""
    zero_is_a_group: bool
    """The category 0 is no class by its looks: the background, or what is above the others."""
    object_ids: Int64s
    images: Int64s
    """The index of each object's image."""
    category_ids: Int64s
    boxes: Float64s
    """x and y of the upper left corner, width and height, in pixels, (objects, 4)."""
    areas: Float64s
    """Areas of the objects, in pixels."""
    is_crowd: Column
    """bool."""
    keypoints: Float64s | None
    """x and y in pixels, and visibility, (objects, keypoints, 3); 0 where an object has none. None if not asked for."""
    outlines: Outlines | None
    """None if not asked for."""


class _Packed(NamedTuple):
    """An annotation as bytes."""

    object: bytes
    keypoints: bytes
    outline: bytes


def read_coco(path: AnyPath, *, masks: bool = False, keypoints: bool = False) -> CocoAnnotations:
    """Read a file of annotations of instances or of keypoints.

    An annotation needs `id`, `image_id`, `category_id` and `bbox`. If missing or null, `iscrowd` is 0 and `area` is
    the box's. An empty list of `keypoints` counts as missing. Coordinates are below 2**31 pixels.

    Args:
        path: the file.
        masks: also read `segmentation`, which every annotation must then have.
        keypoints: also read `keypoints`, which some annotations must then have, all of them equally many.
    """
    document = _document(path, masks, keypoints)
    images, annotations, categories = (
        _list_in(document, name, path) for name in ("images", "annotations", "categories")
    )
    if loose := [(place, each) for place, each in enumerate(annotations) if not isinstance(each, _Packed)]:
        place, found = loose[0]
        lacking = "image_id" if isinstance(found, dict) and "image_id" not in found else "bbox"
        raise _unusable(path, f"annotation number {place}, without image_id or bbox: {found!r:.80}", lacking)
    image_ids, file_names, sizes = _images(images, path)
    packed: list[_Packed] = annotations
    objects = np.frombuffer(b"".join(each.object for each in packed), _COLUMNS)
    _check_unique(objects["id"], "annotation", path)
    return CocoAnnotations(
        image_ids=image_ids,
        file_names=file_names,
        sizes=sizes,
        categories=_categories(categories, objects, path),
        zero_is_a_group=_is_group(categories),
        object_ids=objects["id"],
        images=_indices_of_images(objects, image_ids, path),
        category_ids=objects["category_id"],
        boxes=objects["box"],
        areas=objects["area"],
        is_crowd=objects["is_crowd"],
        keypoints=_keypoints(packed, objects["id"], path) if keypoints else None,
        outlines=joined_outlines([each.outline for each in packed]) if masks else None,
    )


def _document(path: AnyPath, masks: bool, keypoints: bool) -> dict[str, Any]:
    """Parse the file, with its annotations packed."""
    pack = partial(_packed, path=path, masks=masks, keypoints=keypoints)
    try:
        document = json.loads(content_of(path).decode(), object_hook=pack)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read.",
            given=f"{type(error).__name__}: {error}",
            expected="a whole file of JSON that may be read",
            hint="check the path, and copy or fetch the file again",
        ) from error
    if not isinstance(document, dict):
        raise _unusable(path, f"a {type(document).__name__}")
    return document


def _packed(found: dict[str, Any], path: AnyPath, masks: bool, keypoints: bool) -> object:
    """Pack an annotation; return any other dict as it is: images and attributes may have an image_id, too."""
    if "image_id" not in found or "bbox" not in found:
        return found
    try:
        return _Packed(
            _OBJECT.pack(*_numbers_of_object(found)),
            packed_keypoints(found["keypoints"]) if keypoints and found.get("keypoints") else b"",
            outline_of(value_in(found, "segmentation")) if masks else b"",
        )
    except EntryError as error:
        named = f"annotation {found['id']!r:.40}" if "id" in found else "an annotation"
        raise _unusable(path, f"{named}: {error}", error.name) from error


def _numbers_of_object(found: dict[str, Any]) -> tuple[float, ...]:
    ids = [integer_in(found, name) for name in ("id", "image_id", "category_id")]
    x, y, width, height = numbers_of(found["bbox"], "bbox", 4)
    given = found.get("area")
    area = max(0, width * height) if given is None else number_of(given, "area", _MOST_AREA)
    if area < 0:
        raise EntryError("area", f"area {area:g}")
    is_crowd = found.get("iscrowd") or 0
    if is_crowd not in (0, 1):
        raise EntryError("iscrowd", f"iscrowd {is_crowd!r:.40}")
    return *ids, x, y, width, height, area, bool(is_crowd)


def packed_keypoints(values: object) -> bytes:
    """Pack a list of x, y and visibility of each keypoint; an EntryError says what is wrong with it."""
    count = len(values) if isinstance(values, list) else 0
    if not count or count % NUMBERS_OF_A_KEYPOINT:
        raise EntryError("keypoints", f"keypoints {values!r:.40}")
    numbers = np.array(numbers_of(values, "keypoints", count))
    if not np.isin(numbers[2::NUMBERS_OF_A_KEYPOINT], _VISIBILITIES).all():
        raise EntryError("keypoints", "keypoints with a visibility other than 0, 1 or 2")
    return numbers.tobytes()


def outline_of(segmentation: object) -> bytes:
    """Pack a segmentation, as `packed_outline` does; an EntryError says what is wrong with it."""
    try:
        return packed_outline(segmentation).tobytes()
    except ValueError as error:
        raise EntryError("segmentation", str(error)) from error


def value_in(found: dict[str, Any], name: str) -> object:
    """Return an entry's value; an EntryError says that there is none."""
    if name not in found:
        raise EntryError(name, f"no {name}")
    return found[name]


def integer_in(found: dict[str, Any], name: str) -> int:
    """Return an entry's value that has to be a whole number of 64 bits; else an EntryError says what it is."""
    value = value_in(found, name)
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise EntryError(name, f"{name} {value!r:.40}")
    return value


def number_of(value: Any, name: str, most: float) -> float:
    """Return a value that has to be a number of a magnitude below `most`; else raise an EntryError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -most < value < most:  # NaN is neither
        raise EntryError(name, f"{name} {value!r:.40}")
    return float(value)


def numbers_of(values: object, name: str, count: int) -> array[float]:
    """Return a list that has to be of `count` numbers, of magnitudes below 2**31; else raise an EntryError."""
    try:
        numbers = array("d", values if isinstance(values, list) else [])
    except (TypeError, OverflowError):
        numbers = array("d")
    if len(numbers) != count or not all(-_MOST_PIXELS < number < _MOST_PIXELS for number in numbers):  # NaN is neither
        raise EntryError(name, f"{name} {values!r:.40}")
    return numbers


def _list_in(document: dict[str, Any], name: str, path: AnyPath) -> list[Any]:
    found = document.get(name)
    if not isinstance(found, list):
        there = f"no list {name!r}, but {', '.join(map(repr, document)) or 'nothing'}"
        raise _unusable(path, f"{type(found).__name__} as {name!r}, not a list" if name in document else there)
    return found


def _images(images: Sequence[Any], path: AnyPath) -> tuple[Int64s, list[str], Int64s]:
    """Return the ids, the names, and the heights and widths of all images."""
    if not images:
        raise _unusable(path, "no images")
    rows = np.empty((len(images), 3), np.int64)
    names = []
    for place, image in enumerate(images):
        try:
            rows[place] = [integer_in(image, name) for name in ("id", "height", "width")]
            names.append(_text(image, "file_name"))
            for name in ("height", "width"):
                if not 0 < image[name] < _MOST_PIXELS:
                    raise EntryError(name, f"{name} {image[name]}")
        except (EntryError, TypeError) as error:
            raise _unusable(path, f"image number {place}: {error}", getattr(error, "name", "")) from error
    _check_unique(rows[:, 0], "image", path)
    return rows[:, 0].copy(), names, rows[:, 1:].copy()


def _categories(categories: Sequence[Any], objects: Column, path: AnyPath) -> dict[int, str]:
    """Return the names of categories by id; an error if an object's category is not listed."""
    pairs = []
    for place, category in enumerate(categories):
        try:
            pairs.append((integer_in(category, "id"), _text(category, "name")))
        except (EntryError, TypeError) as error:
            raise _unusable(path, f"category number {place}: {error}", getattr(error, "name", "")) from error
    _check_unique(np.array([number for number, _ in pairs], np.int64), "category", path)
    unknown = np.flatnonzero(~np.isin(objects["category_id"], [number for number, _ in pairs]))
    if len(unknown):
        first = objects[unknown[0]]
        given = f"annotation {first['id']} is of category {first['category_id']}, which is not listed"
        raise _unusable(path, given, "category_id")
    return dict(pairs)


def _is_group(categories: Sequence[Any]) -> bool:
    zero = next((category["name"] for category in categories if category["id"] == 0), "")
    is_above = any(category["id"] != 0 and category.get("supercategory") == zero for category in categories)
    return is_above or zero.strip("_").lower() == BACKGROUND


def _text(found: dict[str, Any], name: str) -> str:
    value = value_in(found, name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise EntryError(name, f"{name} {value!r:.40}")
    try:
        value.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise EntryError(name, str(error)) from error
    return value


def _check_unique(ids: Int64s, what: str, path: AnyPath) -> None:
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise _unusable(path, f"the id {twice[0]} of more than one {what}", "id")


def _indices_of_images(objects: Column, image_ids: Int64s, path: AnyPath) -> Int64s:
    order = np.argsort(image_ids)
    places = np.searchsorted(image_ids, objects["image_id"], sorter=order).clip(max=len(image_ids) - 1)
    indices: Int64s = order[places]
    unknown = np.flatnonzero(image_ids[indices] != objects["image_id"])
    if len(unknown):
        first = objects[unknown[0]]
        given = f"annotation {first['id']} is of image {first['image_id']}, which is not listed"
        raise _unusable(path, given, "image_id")
    return indices


def _keypoints(packed: Sequence[_Packed], ids: Int64s, path: AnyPath) -> Float64s:
    try:
        return joined_keypoints([each.keypoints for each in packed], lambda place: f"annotation {ids[place]}")
    except EntryError as error:
        raise _unusable(path, str(error), error.name) from error


def joined_keypoints(packed: Sequence[bytes], name: Callable[[int], str]) -> Float64s:
    """Join the keypoints of all objects to (objects, keypoints, 3); 0 where an object has none.

    An EntryError, in which `name` names an object by its place, says that none has any, or not all equally many.
    """
    lengths = np.array([len(each) for each in packed], np.int64)
    having = np.flatnonzero(lengths)
    if not len(having):
        raise EntryError("keypoints", "no object with keypoints")
    others = having[lengths[having] != lengths[having[0]]]
    if len(others):
        given = f"{name(others[0])} has another number of keypoints than {name(having[0])}"
        raise EntryError("keypoints", given)
    numbers = np.frombuffer(b"".join(packed), np.float64)
    keypoints = np.zeros((len(packed), len(numbers) // len(having)), np.float64)
    keypoints[having] = numbers.reshape(len(having), -1)
    return keypoints.reshape(len(packed), -1, NUMBERS_OF_A_KEYPOINT)


def _unusable(path: AnyPath, given: str, entry: str = "") -> DataError:
    """Make the error for an entry that cannot be used; without an entry it is the file that has another form."""
    whole = "images, annotations (of instances or of keypoints) and categories, each with an id of its own"
    return DataError(
        f"{path} cannot be used as annotations in COCO's format.",
        given=given,
        expected=f"as {entry}, {EXPECTED[entry]}" if entry else whole,
        hint="repair the file, or leave out what is named",
    )
