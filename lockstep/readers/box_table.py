"""Reads boxes from a table of CSV, a line for each object, as users of the Object Detection API make it of XML."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.errors import DataError
from lockstep.images.decode import AS_STORED, Decoding
from lockstep.listing import shorten
from lockstep.readers.boxed_images import MOST_PIXELS, BoxedImage, BoxedImages, BoxedObject, warn_of_others
from lockstep.readers.fingerprint import tells_options
from lockstep.readers.image_files import upright_sizes
from lockstep.readers.image_folder import images_below
from lockstep.readers.label_map import LabelMap
from lockstep.readers.label_tables import EDGE_COLUMNS, FILE_COLUMNS, LABEL_COLUMNS, columns_of, files_named, read_table
from lockstep.readers.object_table import check_label_map
from lockstep.records.index_cache import Cache
from lockstep.records.shards import data_path
from lockstep.storage.remote_path import AnyPath

_SIZES = (("height", "image_height", "img_height"), ("width", "image_width", "img_width"))


@tells_options
class BoxTable(BoxedImages):
    """The images that a table of CSV names, by their paths, and the objects on them.

    The first line names columns: a file (`filename`), a class (`class`), and the edges of a box in pixels (`xmin`,
    `ymin`, `xmax`, `ymax`), or other names that tools give these. With `width` and `height` of the image it must have
    this size; else its header is read as the data is opened. A file is beside the table or in a folder there. A line
    with a file alone is of an image without objects.

    A batch is as that of `Yolo`; classes are numbered from 1 on in alphabetical order, or by a label map.

    Args:
        label_map, decoding, truth, cache: as of `Voc`.
    """

    def __init__(
        self,
        path: str | AnyPath,
        *,
        label_map: LabelMap | None = None,
        decoding: Decoding = AS_STORED,
        truth: bool = False,
        cache: Cache = None,
    ) -> None:
        check_label_map(label_map)
        table = data_path(path)
        objects, sizes = _read(table)
        given = sorted(objects)
        folder, names = _within_one_folder(table.parent, given)
        if unsaid := {each: name for name, each in zip(names, given, strict=True) if each not in sizes}:
            sizes |= zip(unsaid, upright_sizes(folder, [*unsaid.values()], decoding, cache).tolist(), strict=True)
        images = [BoxedImage(name, *sizes[each], tuple(objects[each])) for name, each in zip(names, given, strict=True)]
        label_map = label_map or LabelMap.alphabetical(found.name for image in images for found in image.objects)
        super().__init__(folder, images, label_map, source=str(path), decoding=decoding, truth=truth, cache=cache)
        warn_of_others(folder, images_below(folder).names, names)


def classes_in_table(table: AnyPath) -> set[str]:
    """Return the names of the classes of objects in a table."""
    objects, _ = _read(table)
    return {found.name for each in objects.values() for found in each}


def _within_one_folder(folder: AnyPath, names: Sequence[str]) -> tuple[AnyPath, list[str]]:
    """Name images from the folder on that all of them are in."""
    inside = {name.rpartition("/")[0] for name in names}
    only = next(iter(inside)) if len(inside) == 1 else ""
    return (folder / only, [name.removeprefix(f"{only}/") for name in names]) if only else (folder, [*names])


def _read(table: AnyPath) -> tuple[dict[str, list[BoxedObject]], dict[str, tuple[int, int]]]:
    """Return the objects of each image by its path within the table's folder; and its height and width, if said."""
    (_, header), *lines = read_table(table) or [(1, [])]
    columns = columns_of(header, (FILE_COLUMNS, LABEL_COLUMNS, *EDGE_COLUMNS))
    if not columns or not lines:
        given = f"the columns {shorten(header) or '(none)'}" if not columns else "no line but the first"
        raise _unusable(table, given)
    of_size = columns_of(header, _SIZES)
    rows = [(number, [*line, *[""] * (len(header) - len(line))]) for number, line in lines]
    names = files_named(table, [line[columns[0]] for _, line in rows])
    objects: dict[str, list[BoxedObject]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for (number, line), name in zip(rows, names, strict=True):
        found = objects.setdefault(name, [])
        label, *edges = (line[column] for column in columns[1:])
        try:
            if any((label, *edges)):
                found.append(_object(label, edges))
            if all(line[column] for column in of_size) and of_size:
                size = _size([line[column] for column in of_size])
                if sizes.setdefault(name, size) != size:
                    raise ValueError
        except ValueError:
            raise _unusable(table, f"line {number}: {','.join(line)}") from None
    corners = [edge for found in objects.values() for each in found for edge in each.box]
    if corners and max(corners) <= 1:
        raise _unusable(table, "boxes whose edges are all 1 at most: shares")
    return objects, sizes


def _size(values: Sequence[str]) -> tuple[int, int]:
    height, width = map(float, values)  # a column with gaps is written as 64.0
    if not all(side.is_integer() and 0 < side < MOST_PIXELS for side in (height, width)):
        raise ValueError
    return int(height), int(width)


def _object(label: str, edges: Sequence[str]) -> BoxedObject:
    box = tuple(map(float, edges))
    if not label or not all(map(math.isfinite, box)):
        raise ValueError
    return BoxedObject(label, box)


def _unusable(table: AnyPath, given: str) -> DataError:
    return DataError(
        f"{table} does not say the boxes on images.",
        given=given,
        expected="columns of files, classes, and edges in pixels: filename,class,xmin,ymin,xmax,ymax; with width and "
        "height one size for each image",
        hint="repair the line, or name the columns so in the first line",
    )
