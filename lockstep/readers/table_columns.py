"""Finds which columns of a table are images, labels and objects: by their types and usual names, and what they hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError, InputError
from lockstep.listing import did_you_mean, shorten
from lockstep.readers.coco_annotations import EXPECTED, NUMBERS_OF_A_KEYPOINT, EntryError, outline_of, packed_keypoints
from lockstep.records.tables import Leaf, TableFile, load_pyarrow

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]

NO_LABEL = -1
"""The label of a row that has none."""

_IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp", "bytes", "image_bytes", "picture", "photo")
_PATHS = (*_IMAGES, "file_name", "filename", "file", "path", "image_path", "image_file", "filepath")
_LABELS = ("label", "labels", "class", "cls", "fine_label", "target", "category", "class_name")
_OBJECTS = ("objects", "annotations", "object")
_BOXES = ("bbox", "bboxes", "boxes", "box")
_CLASSES = ("category", "categories", "category_id", "label", "labels", "class", "class_name")
_AREAS, _CROWDS = ("area", "areas"), ("iscrowd", "is_crowd", "crowd")
_OUTLINES, _KEYPOINTS = ("segmentation", "segmentations"), ("keypoints",)
_KEY = b"huggingface"


class FoundImages(NamedTuple):
    """The column of the images."""

    leaf: Leaf
    is_path: bool
    """Whether it holds the paths of files, in place of the bytes of images."""


class Coded(NamedTuple):
    """Labels as numbers."""

    numbers: Int64s
    """`NO_LABEL` where there is none."""
    names: tuple[str, ...] | None
    """The name of each number, where the column has names."""


class TableObjects(NamedTuple):
    """The objects of all rows of a file."""

    counts: Int64s
    boxes: Float64s
    """(objects, 4): x, y, width and height in pixels."""
    classes: Coded
    areas: Float64s | None
    is_crowd: npt.NDArray[np.bool_] | None
    outlines: list[bytes] | None
    """As `outline_of` packs them; None if not asked for."""
    keypoints: list[bytes] | None
    """As `packed_keypoints` packs them, empty where an object has none; None if not asked for."""


def find_image(table: TableFile, named: str | None) -> FoundImages:
    """Find the column of images; the one that is named, or the one that can be meant."""
    schema = table.schema
    if named is not None:
        column = _image_column(_field(table, named, "image"))
        if column is None:
            kind = schema.field(named).type
            raise _unusable(table, named, f"the type {kind}", "bytes, a struct of bytes and path, or paths as text")
        return column
    found = {field.name: column for field in schema if (column := _image_column(field))}
    by_feature = [name for name, feature in features_of(table).items() if _kind_of(feature) == "Image"]
    held = [name for name, column in found.items() if not column.is_path]
    choices = [name for name in by_feature if name in found]
    choices = choices or [name for name in held if name.lower() in _IMAGES] or held
    choices = choices or [name for name in found if name.lower() in _PATHS]
    if len(choices) > 1 and "image" in choices:
        choices = ["image"]
    if len(choices) != 1:
        raise _undecided(table, "image", choices, "bytes of images, a struct of bytes and path, or paths")
    return found[choices[0]]


def find_label(table: TableFile, named: str | None) -> str | None:
    """Find the column of labels: the one that is named, or the one that can be meant; None if there is none."""
    types = load_pyarrow().types
    if named is not None:
        kind = _field(table, named, "label").type
        if not _is_label(types, kind):
            raise _unusable(table, named, f"the type {kind}", "whole numbers, or names of classes")
        return named
    usable = [field.name for field in table.schema if _is_label(types, field.type)]
    by_feature = [name for name, feature in features_of(table).items() if _kind_of(feature) == "ClassLabel"]
    choices = [name for name in by_feature if name in usable] or [name for name in usable if name.lower() in _LABELS]
    if len(choices) > 1 and "label" in choices:
        return "label"
    if len(choices) > 1:
        raise _undecided(table, "label", choices, "one column of labels")
    return choices[0] if choices else None


def find_objects(table: TableFile, named: str | None) -> str | None:
    """Find the column of objects: the one that is named, or the one with boxes; None if there is none.

    Where each field of the objects is a column of its own, a list for each image, it is that of the boxes.
    """
    if named is not None:
        if not (_has_boxes(kind := _field(table, named, "objects").type) or _is_list_of_lists(kind)):
            raise _unusable(table, named, f"the type {kind}", f"lists of objects with a field {' or '.join(_BOXES)}")
        return named
    choices = [field.name for field in table.schema if _has_boxes(field.type)]
    if not choices and any(each.name in _CLASSES and _is_list(each.type) for each in table.schema):
        choices = [each.name for each in table.schema if each.name in _BOXES and _is_list_of_lists(each.type)]
    usual = [name for name in choices if name.lower() in _OBJECTS]
    choices = usual if len(usual) == 1 else choices
    if len(choices) > 1:
        raise _undecided(table, "objects", choices, "one column of objects")
    return choices[0] if choices else None


def check_column(table: TableFile, first: TableFile, name: str) -> None:
    """Refuse a file that does not have a column as the first file of its table has it."""
    wanted = first.schema.field(name).type
    given = table.schema.field(name).type if name in table.schema.names else None
    if given != wanted:
        raise DataError(
            f"{table.path} and {first.path} are not of one table.",
            given=f"a column {name!r} of {given}" if given else f"no column {name!r}",
            expected=f"{name!r} of {wanted}, as in the first file",
            hint="name files of one table",
        )


def features_of(table: TableFile) -> dict[str, Any]:
    """Return what Hugging Face's datasets have written of the columns, by their names; nothing for other tables."""
    try:
        features = json.loads((table.schema.metadata or {}).get(_KEY, b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def names_of_classes(feature: Any) -> tuple[str, ...] | None:
    """Return the names of a ClassLabel, or of the one within a list; None where there is none."""
    if isinstance(feature, list):
        return names_of_classes(feature[0]) if feature else None
    if not isinstance(feature, dict):
        return None
    if _kind_of(feature) == "ClassLabel":
        names = feature.get("names")
        return tuple(map(str, names)) if isinstance(names, list) else None
    return names_of_classes(feature.get("feature"))


def read_labels_of(table: TableFile, name: str) -> Coded:
    """Read a column of labels."""
    coded = _coded(table, table.column((name,)), name)
    names = names_of_classes(features_of(table).get(name))
    return coded if names is None or coded.names is not None else Coded(coded.numbers, names)


def fields_of_objects(table: TableFile, name: str) -> list[str]:
    """Return the names of what a column has of each object, or the columns of lists beside that of the boxes."""
    kind = table.schema.field(name).type
    if _is_list_of_lists(kind):
        return [each.name for each in table.schema if _is_list(each.type)]
    inside = kind.value_type if _is_list(kind) else kind
    return [inside.field(number).name for number in range(inside.num_fields)]


def has_outlines_and_keypoints(table: TableFile, name: str) -> tuple[bool, bool]:
    """Whether a column of objects has a field of segmentations, and one of keypoints."""
    fields = {*fields_of_objects(table, name)}
    return not fields.isdisjoint(_OUTLINES), not fields.isdisjoint(_KEYPOINTS)


def read_objects(table: TableFile, name: str, *, masks: bool = False, keypoints: bool = False) -> TableObjects:
    """Read a column of objects, structs of lists or lists of structs; or the columns of lists with that of the boxes.

    Raises:
        DataError: names the first row with a box that is none, or another number of classes than boxes.
    """
    compute = load_pyarrow().compute
    column = table.column((name,))
    is_flat, fields = _is_list_of_lists(column.type), fields_of_objects(table, name)
    is_list = _is_list(column.type) and not is_flat

    def values(usual: Sequence[str]) -> tuple[Any, Int64s] | None:
        found = next((field for field in usual if field in fields), None)
        if found is None:
            return None
        lists = column
        if not is_list:
            lists = table.column((found,)) if is_flat else compute.struct_field(column, found)
        counts = compute.fill_null(compute.list_value_length(lists), 0).to_numpy().astype(np.int64)
        flat = compute.list_flatten(lists)
        return (compute.struct_field(flat, found) if is_list else flat), counts

    wanted = {"boxes": _BOXES, "classes": _CLASSES, "areas": _AREAS, "crowds": _CROWDS}
    wanted |= ({"segmentations": _OUTLINES} if masks else {}) | ({"keypoints": _KEYPOINTS} if keypoints else {})
    found = {what: of_field for what, usual in wanted.items() if (of_field := values(usual)) is not None}
    if lacking := next((what for what in wanted if what not in (*found, "areas", "crowds")), None):
        raise _unusable(table, name, f"the fields {', '.join(fields)}", f"{lacking}: {' or '.join(wanted[lacking])}")
    counts = found["boxes"][1]
    for what, (_, numbers) in found.items():
        if (differs := numbers != counts).any():
            row = int(differs.argmax())
            raise _bad_row(table, row, name, f"{numbers[row]} {what}", f"{counts[row]}, one for each box")

    def cast(what: str, kind: str, null: object) -> Any:
        return compute.fill_null(_cast(table, found[what][0], kind, name), null).to_numpy() if what in found else None

    def packed(what: str, entry: str, pack: Callable[[Any], bytes]) -> list[bytes] | None:
        return _packed(table, found[what][0], counts, name, entry, pack) if what in found else None

    coded = _coded(table, found["classes"][0], name)
    names = names_of_classes(_feature_of_classes(table, None if is_flat else name, fields))
    return TableObjects(
        counts,
        _boxes(table, found["boxes"][0], counts, name),
        coded if names is None or coded.names is not None else Coded(coded.numbers, names),
        cast("areas", "float64", np.nan),
        cast("crowds", "bool", False),
        packed("segmentations", "segmentation", _packed_segmentation),
        packed("keypoints", "keypoints", _packed_points),
    )


def _packed(
    table: TableFile, column: Any, counts: Int64s, name: str, entry: str, pack: Callable[[Any], bytes]
) -> list[bytes]:
    """Pack a value of each object; the row of one that cannot be packed is named."""
    packed: list[bytes] = []
    for value in column:
        try:
            packed.append(pack(value.as_py()))
        except EntryError as error:
            row = int(np.searchsorted(np.cumsum(counts), len(packed), side="right"))
            raise _bad_row(table, row, name, str(error), f"as {entry}, {EXPECTED[entry]}") from error
    return packed


def _packed_segmentation(value: Any) -> bytes:
    """Pack polygons or runs, or the JSON of such, as a column of both has to be."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise EntryError("segmentation", f"a text that is no JSON ({error})") from error
    if isinstance(value, dict) and isinstance(value.get("counts"), bytes):  # as pycocotools makes them
        value["counts"] = value["counts"].decode("latin-1")
    return outline_of(value)


def _packed_points(value: Any) -> bytes:
    """Pack x, y and visibility of each keypoint, one after the other or as lists of three; nothing for none."""
    if isinstance(value, list) and any(isinstance(each, list) for each in value):
        if not all(isinstance(each, list) and len(each) == NUMBERS_OF_A_KEYPOINT for each in value):
            raise EntryError("keypoints", "lists of other than three numbers")
        value = [number for each in value for number in each]
    return packed_keypoints(value) if value else b""


def _boxes(table: TableFile, column: Any, counts: Int64s, name: str) -> Float64s:
    """Make an array of boxes, which are all of four finite numbers."""
    compute = load_pyarrow().compute
    lengths = compute.fill_null(compute.list_value_length(column), 0).to_numpy()
    owners = np.repeat(np.arange(len(counts)), counts)
    expected = "x, y, width and height in pixels, all of them finite, and no side below 0"
    if (wrong := lengths != 4).any():
        number = int(wrong.argmax())
        raise _bad_row(table, int(owners[number]), name, f"a box of {lengths[number]} numbers", expected)
    flat = compute.fill_null(_cast(table, compute.list_flatten(column), "float64", name), np.nan)
    boxes: Float64s = flat.to_numpy().reshape(-1, 4)
    if (wrong := ~np.isfinite(boxes).all(1) | (boxes[:, 2:] < 0).any(1)).any():
        number = int(wrong.argmax())
        given = f"the box {', '.join(f'{value:g}' for value in boxes[number])}"
        raise _bad_row(table, int(owners[number]), name, given, expected)
    return boxes


def _coded(table: TableFile, column: Any, name: str) -> Coded:
    """Make numbers of labels; names get numbers in the order of the alphabet."""
    pyarrow = load_pyarrow()
    types, compute = pyarrow.types, pyarrow.compute
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_null(column.type):
        return Coded(np.full(len(column), NO_LABEL), None)
    if not _is_text(types, column.type):
        if not (types.is_integer(column.type) or types.is_boolean(column.type)):
            raise _unusable(table, name, f"labels of {column.type}", "whole numbers, or names of classes")
        return Coded(compute.fill_null(_cast(table, column, "int64", name), NO_LABEL).to_numpy(), None)
    encoded = column.dictionary_encode().unify_dictionaries()
    given = encoded.chunk(0).dictionary.to_pylist() if encoded.num_chunks else []
    names = tuple(sorted(given))
    places = {each: number for number, each in enumerate(names)}
    numbers = np.array([*(places[each] for each in given), NO_LABEL], np.int64)
    parts = [compute.fill_null(chunk.indices.cast("int64"), len(given)).to_numpy() for chunk in encoded.chunks]
    return Coded(numbers[np.concatenate([np.empty(0, np.int64), *parts])], names)


def _cast(table: TableFile, column: Any, kind: str, name: str) -> Any:
    """Convert values of a column; those that have no such value are refused."""
    try:
        return column.cast(kind)
    except load_pyarrow().ArrowException as error:
        raise _unusable(table, name, f"values of {column.type}: {error}", f"values of {kind}") from error


def _image_column(field: Any) -> FoundImages | None:
    types, kind = load_pyarrow().types, field.type
    if types.is_struct(kind) and (place := kind.get_field_index("bytes")) >= 0:
        return FoundImages((field.name, "bytes"), False) if _is_binary(types, kind.field(place).type) else None
    if _is_binary(types, kind):
        return FoundImages((field.name,), False)
    return FoundImages((field.name,), True) if _is_text(types, kind) else None


def _is_binary(types: Any, kind: Any) -> bool:
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _is_text(types: Any, kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_label(types: Any, kind: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_integer(kind) or types.is_boolean(kind) or _is_text(types, kind))


def _is_list(kind: Any) -> bool:
    types = load_pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _has_boxes(kind: Any) -> bool:
    """Whether a type is that of objects: structs of lists, or lists of structs, with a field of boxes."""
    types = load_pyarrow().types
    inside = kind.value_type if _is_list(kind) else kind
    if not types.is_struct(inside):
        return False
    place = next((place for name in _BOXES if (place := inside.get_field_index(name)) >= 0), None)
    if place is None:
        return False
    boxes = inside.field(place).type
    return _is_list(boxes) if _is_list(kind) else _is_list_of_lists(boxes)


def _is_list_of_lists(kind: Any) -> bool:
    return _is_list(kind) and _is_list(kind.value_type)


def _within(feature: Any, usual: Sequence[str]) -> Any:
    """Return the feature of a field of objects, by its usual names."""
    while isinstance(feature, list) or (isinstance(feature, dict) and "feature" in feature):
        feature = (feature[0] if feature else None) if isinstance(feature, list) else feature["feature"]
    return next((feature[name] for name in usual if name in feature), None) if isinstance(feature, dict) else None


def _feature_of_classes(table: TableFile, name: str | None, fields: Sequence[str]) -> Any:
    """Return the feature of the classes in a column of objects; without one in that of the fields' columns.

    Other columns may be named like these: those of the image.
    """
    features = features_of(table)
    if name is not None:
        return _within(features.get(name), _CLASSES)
    return next((features.get(each) for each in _CLASSES if each in fields), None)


def _kind_of(feature: Any) -> str:
    return str(feature.get("_type", "")) if isinstance(feature, Mapping) else ""


def _field(table: TableFile, name: str, role: str) -> Any:
    names = table.schema.names
    if name not in names:
        raise InputError(
            f"{table.path} has no column {name!r}.",
            given=f"the columns {shorten(names, 20)}",
            expected=f"the column of {role}s" if role != "objects" else "the column of objects",
            hint=did_you_mean(name, names) or "name one of its columns",
        )
    return table.schema.field(name)


def _undecided(table: TableFile, role: str, choices: Sequence[str], expected: str) -> DataError:
    given = [f"{field.name} ({field.type})" for field in table.schema]
    return DataError(
        f"Which column of {table.path} is that of the {role} cannot be found out.",
        given=f"any of {', '.join(choices)}" if choices else f"the columns {shorten(given, 10)}",
        expected=expected,
        hint=f"name it: {role}=NAME, or in a recipe data.{role}_column"
        + ("; columns of lists within lists are not read" if not choices else ""),
    )


def _unusable(table: TableFile, name: str, given: str, expected: str) -> DataError:
    return DataError(
        f"The column {name!r} of {table.path} cannot be used.",
        given=given,
        expected=expected,
        hint="name another column, or write the table again",
    )


def _bad_row(table: TableFile, row: int, name: str, given: str, expected: str) -> DataError:
    return DataError(
        f"Row {row} of {table.path} has no usable {name!r}.",
        given=given,
        expected=expected,
        hint="mend the row, or write the table without it",
    )
