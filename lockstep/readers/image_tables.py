"""Reads images in Parquet and Arrow files, with a class each, or with objects on them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from lockstep.errors import DataError
from lockstep.images.decode import AS_STORED, Decoding, EncodedImage
from lockstep.images.masks import MaskOutlines, joined_outlines
from lockstep.images.objects import areas_of, select_objects
from lockstep.listing import shorten
from lockstep.ragged import Ragged
from lockstep.readers import table_columns
from lockstep.readers.coco_annotations import EXPECTED, EntryError, joined_keypoints
from lockstep.readers.fingerprint import Fingerprint, checksum, named_parts, tells_options
from lockstep.readers.image_files import FileNames, check_not_turned, load_decoder, present_files
from lockstep.readers.image_records import are_edges
from lockstep.readers.label_map import LabelMap, ZeroBasedError, read_labels
from lockstep.readers.object_table import (
    ObjectTable,
    check_label_map,
    labels_of_names,
    shares_of_keypoints,
    warn_of_objects,
)
from lockstep.readers.reader import Cost, Int64s
from lockstep.readers.schemas import truth_of_records
from lockstep.records.index_cache import Cache, ranges_through
from lockstep.records.open_files import OpenFiles
from lockstep.records.shards import Paths, expand_braces, find_shards, list_of_paths
from lockstep.records.tables import KEPT_BYTES, Kept, TableFile, open_table
from lockstep.screen import log
from lockstep.storage.remote_path import AnyPath, RemotePath
from lockstep.tracing import now_reading

_SPANS, _POINTS = "spans", "keypoints_px"
"""Columns: the start and stop of each object's outline, and its keypoints in pixels."""
_FLAGS = ("is_crowd", "difficult", "group_of")
_BIG_READ_BYTES = 64 << 20
_THREADS = 16


class _Images:
    """The images of a table: files of rows, one after the other.

    Args:
        paths: the files: a path, a pattern, a range in braces, or several of these.
        image: the name of the column of images; None: it is found out.
        decoding: how images are decoded when they are asked for.
        cache: the folder where what is read of an object store is kept.
    """

    cost: Cost = "decode"

    def __init__(self, paths: Paths, image: str | None, decoding: Decoding, cache: Cache) -> None:
        files = find_shards([expanded for path in list_of_paths(paths) for expanded in expand_braces(path)])
        kept, parts = Kept(), OpenFiles(ranges=ranges_through(cache))
        self._tables = [open_table(file, kept, parts) for file in files]
        self._starts = [0, *accumulate(map(len, self._tables))]
        self._decoding, self.decoder = decoding, load_decoder(decoding)
        self._image = table_columns.find_image(self._tables[0], image)
        for table in self._tables[1:]:
            table_columns.check_column(table, self._tables[0], self._image.leaf[0])
        self._files = [self._named_files(table, cache) for table in self._tables] if self._image.is_path else None
        if not self._image.is_path:
            self._warn_of_large_groups()

    def __len__(self) -> int:
        return self._starts[-1]

    def example_id(self, index: int) -> str:
        """Return the name of its file, and the number of its row in that file: "train.parquet:17"."""
        table, row = self._locate(index)
        return f"{self._tables[table].path.name}:{row}"

    def _read_images(self, indices: Int64s) -> list[EncodedImage]:
        """Read the images of rows: in turn, or if they are in a store several at once, as each waits for it."""
        if not isinstance(self._tables[0].path, RemotePath):
            return [self._read_image(index) for index in indices.tolist()]
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(self._read_image, indices.tolist()))

    def _read_image(self, index: int) -> EncodedImage:
        """Read the image of a row, not decoded; a DataError names a row that has none."""
        number, row = self._locate(index)
        table = self._tables[number]
        if self._files is not None:
            return next(self._files[number].read_each([row], self._decoding))
        now_reading(f"{table.path.name}:{row}")
        data = table.value(self._image.leaf, row)
        if data is None:
            raise DataError(
                f"Row {row} of {table.path} has no image.",
                given=f"a null in the column {'.'.join(self._image.leaf)!r}",
                expected="the bytes of an image",
                hint="write the table with the bytes of all images, not their paths alone; or leave such rows out: "
                '--set feed.bad_examples="skip"',
            )
        return EncodedImage(data, f"Row {row} of {table.path}", self._decoding)

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the number of the file that holds a row, and the row's number in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"there is no row {index} in {len(self)} rows")
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def _named_files(self, table: TableFile, cache: Cache) -> FileNames:
        """Find the files that a column of paths names, beside the table or below."""
        names = table.column(self._image.leaf).to_pylist()
        if None in names:
            raise DataError(
                f"Row {names.index(None)} of {table.path} has no image.",
                given=f"a null in the column {self._image.leaf[0]!r}",
                expected="the path of an image in each row",
                hint="write the table without such rows",
            )
        return present_files(table.path.parent, names, cache)

    def _warn_of_large_groups(self) -> None:
        leaf = self._image.leaf
        size_bytes, table = max((table.bytes_read_for(leaf), str(table.path)) for table in self._tables)
        if size_bytes > _BIG_READ_BYTES:
            log.warning(
                "%s is read slowly in a random order: up to %.0f MB are decoded for one image, and %.0f MB are kept. "
                'Write it with smaller groups (row_group_size=100), or set feed.order = {kind = "block_shuffled"}',
                table,
                size_bytes / 1e6,
                max(KEPT_BYTES, size_bytes) / 1e6,
                chief_only=True,
            )


@tells_options
class ImageTable(_Images):
    """The images in Parquet or Arrow files that have one class each: a row is an example.

    A batch is {"image": a list of `EncodedImage`, "label": int64 (batch,)}; without "label" where the table has none.
    Any row is read by itself: of a Parquet file on this machine the page of the column that it is in, of an Arrow
    file the image alone, unless it is compressed; see `lockstep.records.tables`. Labels are kept in memory.

    Images are bytes, structs of bytes and path as Hugging Face's datasets write them, or the paths of files beside the
    table or below. Labels are whole numbers, or the names of classes, which are numbered in the order of the alphabet
    unless a file of labels numbers them, as the splits of a data set need it of which one may lack a class. A label
    that is null is -1.

    Args:
        paths: the files: a path, a pattern such as "train-*.parquet", or several of these.
        image: the name of the column of images; by default the one that can be meant, by its type and name.
        label: the name of the column of labels; likewise.
        labels: the names of the classes, or a file with one on each line: its number is that of the line, from 0 on.
        decoding: how images are decoded when they are asked for.
        cache: the folder where what is read of an object store is kept; by default in the user's cache.

    Raises:
        DataError: a file that is none, cut short or of another table, no column that can be meant, or several.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        image: str | None = None,
        label: str | None = None,
        labels: str | AnyPath | tuple[str, ...] | None = None,
        decoding: Decoding = AS_STORED,
        cache: Cache = None,
    ) -> None:
        super().__init__(paths, image, decoding, cache)
        first, *others = self._tables
        wanted = None if labels is None else read_labels(labels)
        name = table_columns.find_label(first, label)
        self._labels: Int64s | None = None
        self.classes: tuple[str, ...] = ()
        """The name of each class by its label, where the table has names."""
        if name is not None:
            for table in others:
                table_columns.check_column(table, first, name)
            self._labels, self.classes = _joined(
                [table_columns.read_labels_of(table, name) for table in self._tables], self._tables
            )
        if wanted is not None:
            self._labels, self.classes = _renumbered(self._labels, self.classes, wanted, str(first.path), str(labels))

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the images of these rows, not decoded, and their labels."""
        fields: dict[str, Any] = {"image": self._read_images(indices)}
        if self._labels is not None:
            fields["label"] = torch.from_numpy(self._labels[indices])
        return fields

    def fingerprint(self) -> Fingerprint:
        """Return the number of rows, size, checksums of the footer and of the labels, for each file."""
        labels = np.empty(0, np.int64) if self._labels is None else self._labels
        return named_parts(
            (table.path.name, f"{table.summary}, labels {checksum(labels[start : start + len(table)])}")
            for table, start in zip(self._tables, self._starts, strict=False)
        )


@tells_options
class DetectionTable(_Images):
    """The images in Parquet or Arrow files, and the objects on them, as Hugging Face's datasets have them.

    The column of objects is a struct of lists or a list of structs, or there is a column of lists for each of their
    fields: `bbox`, each of x, y, width and height in pixels as in COCO, and `category`, a number or a name; `area` and
    `iscrowd` if they are there, `segmentation` and `keypoints` if they are asked for. They are kept in memory, in as
    many bytes as those of `Coco`. Images are as for `ImageTable`. A batch has an entry for each image, of n objects:

    - "image": `EncodedImage`; "source_id": the name of the example
    - "boxes": float32 (n, 4) of top, left, bottom and right as shares of height and width, clipped to the image
    - "labels": int64 (n,), from 1 on where the table names its classes, as 0 is the background; "class_text": n names,
      "" where the table has none
    - "area": float32 (n,) in pixels, that of the box where the table has none; "is_crowd": bool (n,)
    - with `masks` and `keypoints`, "masks", "keypoints" and "keypoint_visibility" as those of `Coco`
    - with `truth`, what detections are scored against, as `truth_of_records` makes it

    Args:
        paths: the files: a path, a pattern such as "train-*.parquet", or several of these.
        image: the name of the column of images; by default the one that can be meant, by its type and name.
        objects: the name of the column of objects, or of boxes where that is one; likewise.
        masks: read the masks of the objects, too: polygons, runs (`size` and `counts`), or the JSON of either.
        keypoints: read their keypoints, too: x, y and visibility of each, in one list or in lists of three.
        label_map: the label of each class by its name.
        zero_based: the table numbers its classes from 0, and does not name them: a label is the number + 1.
        check_boxes: refuse boxes that `are_edges` refuses, clip the others, and leave out those without an area; False:
            give all as they are stored, to a `DetectionReader`.
        truth: also give what detections are scored against.
        decoding: how images are decoded when they are asked for; they are not turned, as their boxes are not.
        cache: as of `ImageTable`.

    Raises:
        DataError: as `ImageTable`; a row with a box that is none, or without a class for each box.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        image: str | None = None,
        objects: str | None = None,
        masks: bool = False,
        keypoints: bool = False,
        label_map: LabelMap | None = None,
        zero_based: bool = False,
        check_boxes: bool = True,
        truth: bool = False,
        decoding: Decoding = AS_STORED,
        cache: Cache = None,
    ) -> None:
        check_not_turned(decoding)
        check_label_map(label_map)
        super().__init__(paths, image, decoding, cache)
        first, *others = self._tables
        name = table_columns.find_objects(first, objects)
        if name is None:
            raise DataError(
                f"{first.path} has no objects on its images.",
                given=f"the columns {', '.join(first.schema.names)}",
                expected="a column with a list of boxes (bbox) and of their classes (category)",
                hint="give a table of detection, or name the column: data.objects_column",
            )
        for table in others:
            table_columns.check_column(table, first, name)
        read = [table_columns.read_objects(table, name, masks=masks, keypoints=keypoints) for table in self._tables]
        numbers, names = _joined([each.classes for each in read], self._tables)
        labels, self.classes = _labels(numbers, names, label_map, zero_based, str(first.path))
        """The name of each class by its label."""
        self._check_boxes, self._truth = check_boxes, truth
        self._objects = self._tabulated(read, labels)
        self._outlines = joined_outlines([*chain(*(each.outlines or () for each in read))]) if masks else None
        if self._outlines is not None:
            self._objects.columns[_SPANS] = self._outlines.spans
        self._warn(self._objects)

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the images of these rows, not decoded, and the fields of their objects."""
        images = self._read_images(indices)
        columns = self._objects.ragged(self._objects.columns, indices)
        given, points, spans = (columns.pop(name, None) for name in ("boxes_px", _POINTS, _SPANS))
        assert given is not None, "every table has boxes"
        sizes = torch.tensor([image.size[::-1] for image in images]).view(-1, 2)
        left, top, width, height = given.values.unbind(1)
        corners = torch.stack([top, left, top + height, left + width], 1) / sizes.double().repeat(1, 2)[given.owner]
        stored = given.replaced(corners.float())
        if self._check_boxes and not (usable := are_edges(stored.values.numpy()).all(1)).all():
            raise self._bad_box(indices, given, int(usable.argmin()))
        none = given.replaced(torch.zeros(len(given.values), dtype=torch.bool))
        fields: dict[str, Any] = {
            "image": images,
            "source_id": [self.example_id(index) for index in indices.tolist()],
            "boxes": stored,
            **columns,
            "class_text": [[self.classes.get(label, "") for label in row.tolist()] for row in columns["labels"]],
        }
        if points is not None:
            shares = shares_of_keypoints(points.values.numpy(), sizes.numpy()[points.owner.numpy()])
            fields |= {name: points.replaced(torch.from_numpy(values)) for name, values in shares.items()}
        if spans is not None:
            fields["masks"] = self._masks(indices, spans, sizes)
        truth: dict[str, Any] = {}
        if self._truth:
            flags = dict.fromkeys(_FLAGS, none) | columns
            truth = truth_of_records(flags, stored, sizes) | {"truth_boxes": given}
            truth |= {"truth_masks": fields["masks"]} if spans is not None else {}
            truth |= {"truth_keypoints": points} if points is not None else {}
        if self._check_boxes:
            fields["boxes"] = stored.replaced(stored.values.clamp(0, 1))
            fields = select_objects(fields, areas_of(fields["boxes"].values) > 0)
        return fields | truth

    def fingerprint(self) -> Fingerprint:
        """Return the number of rows, size, checksums of the footer and of the objects, for each file."""
        found = named_parts(
            (table.path.name, f"{table.summary}, objects {self._checksum(start, start + len(table))}")
            for table, start in zip(self._tables, self._starts, strict=False)
        )
        return found if self._outlines is None else found | {"outlines": checksum(self._outlines.numbers)}

    def _checksum(self, start: int, stop: int) -> str:
        starts = self._objects.starts[start : stop + 1]
        columns = [values[starts[0] : starts[-1]] for values in self._objects.columns.values()]
        return checksum(starts - starts[0], *columns)

    def _masks(self, indices: Int64s, spans: Ragged, sizes: torch.Tensor) -> list[MaskOutlines]:
        assert self._outlines is not None, "there are spans"
        found = []
        for index, each, (height, width) in zip(indices.tolist(), spans, sizes.tolist(), strict=True):
            number, row = self._locate(index)
            outlines = tuple(self._outlines.numbers[start:stop] for start, stop in each.tolist())
            found.append(MaskOutlines(outlines, height, width, f"Row {row} of {self._tables[number].path}"))
        return found

    def _tabulated(self, read: Sequence[table_columns.TableObjects], labels: Int64s) -> ObjectTable:
        objects = _table(read, labels)
        if all(each.keypoints is not None for each in read):
            owners = np.repeat(np.arange(len(self)), np.diff(objects.starts))
            packed = [*chain(*(each.keypoints or () for each in read))]
            try:
                objects.columns[_POINTS] = joined_keypoints(packed, lambda place: self.example_id(int(owners[place])))
            except EntryError as error:
                raise DataError(
                    f"The objects of {self._tables[0].path} have no keypoints that can be used.",
                    given=str(error),
                    expected=f"as keypoints, {EXPECTED[error.name]}",
                    hint="write the table again, or leave keypoints out",
                ) from error
        return objects

    def _warn(self, objects: ObjectTable) -> None:
        places = np.flatnonzero((objects.columns["boxes_px"][:, 2:] == 0).any(1))
        rows = np.searchsorted(objects.starts, places, side="right") - 1
        names = [self.example_id(row) for row in rows.tolist()]
        source = str(self._tables[0].path)
        warn_of_objects(names, len(objects.columns["labels"]), source, "have no area, and are left out")

    def _bad_box(self, indices: Int64s, boxes: Ragged, place: int) -> DataError:
        index = int(indices[int(boxes.owner[place])])
        number, row = self._locate(index)
        return DataError(
            f"Row {row} of {self._tables[number].path} has a box that is not on its image.",
            given=f"x, y, width and height {', '.join(f'{value:g}' for value in boxes.values[place].tolist())}",
            expected="pixels of the image as it is stored, a tenth of its sides outside at most",
            hint="write boxes as x, y, width and height in pixels; or leave such rows out: "
            '--set feed.bad_examples="skip"',
        )


def _joined(parts: Sequence[table_columns.Coded], tables: Sequence[TableFile]) -> tuple[Int64s, tuple[str, ...]]:
    """Join the labels of several files; those with names are numbered by the names of all of them."""
    if all(part.names is None for part in parts):
        return np.concatenate([part.numbers for part in parts]), ()
    lists = [part.names or () for part in parts]
    if len({*lists}) == 1:
        return np.concatenate([part.numbers for part in parts]), lists[0]
    for table, part, each in zip(tables, parts, lists, strict=True):
        if bad := [*np.unique(part.numbers[(part.numbers < table_columns.NO_LABEL) | (part.numbers >= len(each))])]:
            raise DataError(
                f"The labels of {table.path} are not those of the other files.",
                given=f"the label {bad[0]}, " + (f"of {len(each)} names" if part.names else "and no names of classes"),
                expected="in each file a name for each label, or in none",
                hint="write all files with the same ClassLabel, or name files of one table",
            )
    names = tuple(sorted({name for each in lists for name in each}))
    places = {name: number for number, name in enumerate(names)}
    numbers = [np.array([*(places[name] for name in each), table_columns.NO_LABEL]) for each in lists]
    return np.concatenate([table[part.numbers] for table, part in zip(numbers, parts, strict=True)]), names


def _renumbered(
    numbers: Int64s | None, names: Sequence[str], wanted: tuple[str, ...], source: str, labels: str
) -> tuple[Int64s, tuple[str, ...]]:
    """Number the labels of a table by a file of labels, which names those that have no names as they are numbered."""
    if numbers is None:
        raise DataError(
            f"{source} has no labels.",
            given=f"a file of labels, {labels}, and no column that they are of",
            expected="a column of whole numbers, or of names of classes",
            hint="name the column: label=NAME, or in a recipe data.label_column; or leave the file out",
        )
    used = np.unique(numbers[numbers != table_columns.NO_LABEL])
    known = names or wanted
    lacking = [number for number in used.tolist() if not 0 <= number < len(known)]
    missing = [] if lacking else [name for number in used.tolist() if (name := known[number]) not in wanted]
    if lacking or missing:
        raise DataError(
            f"The file of labels, {labels}, lacks classes of {source}.",
            given=f"no {shorten(missing)}" if missing else f"the label {lacking[0]}, of {len(known)} classes",
            expected=f"a class for each label of the table: {len(wanted)} are named there, from 0 on",
            hint="write each class on a line of its own, in the order that it is to have in all splits",
        )
    places = {name: number for number, name in enumerate(wanted)}
    return np.array([*(places.get(name, table_columns.NO_LABEL) for name in known), table_columns.NO_LABEL], np.int64)[
        numbers
    ], wanted


def _labels(
    numbers: Int64s, names: Sequence[str], label_map: LabelMap | None, zero_based: bool, source: str
) -> tuple[Int64s, Mapping[int, str]]:
    """Return the labels of objects, 0 of which is the background, and the name of each class by its label."""
    least, most = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
    if least < 0 or (names and most >= len(names)):
        raise DataError(
            f"An object of {source} has no class.",
            given=f"the number {least if least < 0 else most}" + (f" of {len(names)} classes" if names else ""),
            expected="a class for each object",
            hint="write the table again, without such objects",
        )
    if label_map is not None:
        if not names:
            return numbers, label_map.names
        used = np.unique(numbers)
        table = np.zeros(len(names), np.int64)
        table[used] = labels_of_names([names[number] for number in used.tolist()], label_map, source)
        return table[numbers], label_map.names
    if names or zero_based:
        return numbers + 1, dict(enumerate(names, 1))
    if len(numbers) and least == 0:
        raise ZeroBasedError(
            f"The classes of objects in {source} cannot be labels.",
            given="the number 0",
            expected="numbers from 1 on: the label 0 is that of the background",
            hint="set zero_based, or data.labels_offset=-1 in a recipe, and each label is the number + 1",
        )
    return numbers, {}


def _table(read: Sequence[table_columns.TableObjects], labels: Int64s) -> ObjectTable:
    counts = np.concatenate([each.counts for each in read])
    boxes = np.concatenate([each.boxes for each in read])
    sides = boxes[:, 2:].prod(1)
    given = [np.full(len(each.boxes), np.nan) if each.areas is None else each.areas for each in read]
    areas = np.concatenate(given)
    columns: dict[str, Any] = {
        "boxes_px": boxes,
        "labels": labels,
        "area": np.where(np.isnan(areas), sides, areas).astype(np.float32),
    }
    if any(each.is_crowd is not None for each in read):
        crowds = [np.zeros(len(each.boxes), bool) if each.is_crowd is None else each.is_crowd for each in read]
        columns["is_crowd"] = np.concatenate(crowds)
    return ObjectTable(np.repeat(np.arange(len(counts)), counts), columns, len(counts))
