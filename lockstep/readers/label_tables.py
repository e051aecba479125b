"""Images in one folder, with a table of CSV beside them that says the class of each."""

from __future__ import annotations

import csv
import io
import posixpath
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from lockstep.errors import DataError
from lockstep.listing import shorten
from lockstep.records.open_files import content_of
from lockstep.storage.remote_path import AnyPath

FILE_COLUMNS = ("file", "filename", "file_name", "image", "image_id", "image_path", "path", "filepath", "name", "id")
LABEL_COLUMNS = ("label", "class", "class_name", "category", "label_name", "species", "target")
EDGE_COLUMNS = (
    ("ymin", "y_min", "y1", "top"),
    ("xmin", "x_min", "x1", "left"),
    ("ymax", "y_max", "y2", "bottom"),
    ("xmax", "x_max", "x2", "right"),
)
"""The names that the columns of a box's edges may have: top, left, bottom and right, in pixels."""

_FIRST_LINE_BYTES = 1 << 16


def label_table_among(entries: Sequence[AnyPath]) -> Path | None:
    """Return the table of classes in a folder that has one file of CSV, and images beside it or in one folder."""
    tables = [entry for entry in entries if isinstance(entry, Path) and entry.suffix.lower() == ".csv"]
    folders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return tables[0] if len(tables) == 1 and len(folders) <= 1 else None


def is_table_of_boxes(table: Path) -> bool:
    """Whether the first line of a table of CSV names edges of boxes; no more than its beginning is read."""
    return any(columns_of(header, EDGE_COLUMNS) for _, header in read_table(table, _FIRST_LINE_BYTES)[:1])


def columns_of(header: Sequence[str], wanted: Sequence[Sequence[str]]) -> list[int]:
    """Find the columns of which each has one of some names; none unless all are there. Upper case is as lower case."""
    lower = [name.lower() for name in header]
    found = [next((lower.index(name) for name in names if name in lower), -1) for names in wanted]
    return [] if -1 in found else found


def read_table(table: AnyPath, most_bytes: int | None = None) -> list[tuple[int, list[str]]]:
    """Read the lines of a table of CSV with their numbers, but for empty ones; values are stripped.

    With `most_bytes` no more is read of it, and the last line may be a part of one.

    Raises:
        DataError: it cannot be read.
    """
    try:
        text = content_of(table, most_bytes).decode("utf-8-sig", "replace" if most_bytes else "strict")
        lines = csv.reader(io.StringIO(text, newline=""))
        return [(lines.line_num, [value.strip() for value in line]) for line in lines if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{table} cannot be read.",
            given=str(error),
            expected="a table of CSV in UTF-8, with a line for each image or object",
            hint="write it again with the columns filename,label, or filename,class,xmin,ymin,xmax,ymax",
        ) from error


def files_by_label(table: Path) -> dict[str, list[str]]:
    """Return the images of each class, as paths within the table's folder; classes and images are sorted.

    The columns are found by their names, as `FILE_COLUMNS` and `LABEL_COLUMNS` have them. A file is looked for beside
    the table, and in the one folder that is there; its ending may be left out.

    Raises:
        DataError: a column is missing, the table is of boxes, a file is not there, or has no class or several.
    """
    (_, header), *lines = read_table(table) or [(1, [])]
    columns = _columns(table, header)
    found: dict[str, list[str]] = {}
    for name, label in sorted(_files(table, [_of_line(table, *line, columns) for line in lines]).items()):
        found.setdefault(label, []).append(name)
    return dict(sorted(found.items()))


def files_named(table: AnyPath, names: Sequence[str]) -> list[str]:
    """Find the files that a table names beside it, and in the folders that are there, as paths within its folder.

    Raises:
        DataError: a file is not there, or is in several folders, such as those of sets, and the table does not say one.
    """
    inside = [entry for entry in table.parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    places = {path.name: path.name for path in table.parent.iterdir() if path.is_file()}
    below = [(entry.name, f"{folder.name}/{entry.name}") for folder in inside for entry in folder.iterdir()]
    folders = Counter(name for name, _ in below if name not in places)
    places = dict(below) | {path: path for _, path in below} | places
    without_ending = [(PurePosixPath(name).with_suffix("").as_posix(), path) for name, path in places.items()]
    times = Counter(name for name, _ in without_ending)
    places = {name: path for name, path in without_ending if times[name] == 1} | places
    wanted = [posixpath.normpath(name) for name in names]
    if missing := [name for name in dict.fromkeys(wanted) if name not in places]:
        raise DataError(
            f"{table} names images that are not there.",
            given=f"{len(missing)} of {len({*wanted})}: {shorten(missing, 3)}",
            expected=f"the names of files in {table.parent}" + "".join(f", or in {each}" for each in inside),
            hint="copy these images there, or take their lines out",
        )
    if several := [
        name for name in dict.fromkeys(wanted) if folders[PurePosixPath(places[name]).name] > 1 and "/" not in name
    ]:
        raise DataError(
            f"{table} does not say which images it names.",
            given=f"{shorten(several, 3)}, in {' and in '.join(str(each) for each in inside)}",
            expected="each name in one folder, or with its folder before it",
            hint=f"write {places[several[0]]} if it is that, or move the table into the folder of its images",
        )
    return [places[name] for name in wanted]


def _files(table: Path, named: Sequence[Sequence[str]]) -> dict[str, str]:
    places = files_named(table, [name for name, _ in named])
    if not places:
        raise _unusable(table, "no line but the first", "write a line for each image")
    files: dict[str, str] = {}
    for (name, label), place in zip(named, places, strict=True):
        if files.setdefault(place, label) != label:
            raise _unusable(table, f"{name!r} as {files[place]!r} and as {label!r}", "take one of the lines out")
    return files


def _of_line(table: Path, number: int, line: Sequence[str], columns: Sequence[int]) -> list[str]:
    values = [line[column] if column < len(line) else "" for column in columns]
    if not all(values):
        raise _unusable(table, f"line {number}: {','.join(line)}", "fill it in, or take the line out")
    return values


def _unusable(table: Path, given: str, hint: str) -> DataError:
    return DataError(
        f"{table} does not say the class of each image.",
        given=given,
        expected="lines with a file and its class, one class for each file",
        hint=hint,
    )


def _columns(table: Path, header: Sequence[str]) -> list[int]:
    if {"bbox", *(names[0] for names in EDGE_COLUMNS)} & {name.lower() for name in header}:
        raise DataError(
            f"{table} is a table of boxes, and does not say them as such are read.",
            given=f"the columns {shorten(header)}",
            expected="filename,class,xmin,ymin,xmax,ymax, with the edges in pixels",
            hint="name the columns so in the first line",
        )
    columns = columns_of(header, (FILE_COLUMNS, LABEL_COLUMNS))
    if not columns:
        raise DataError(
            f"{table} does not say the class of each image.",
            given=f"the columns {shorten(header) or '(none)'}",
            expected=f"a column of files ({', '.join(FILE_COLUMNS[:3])}) and one of classes "
            f"({', '.join(LABEL_COLUMNS[:3])})",
            hint="name the columns so in the first line: filename,label",
        )
    return columns
