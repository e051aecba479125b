"""Images in one folder, with a table of CSV beside them that says the class of each."""

from __future__ import annotations

import csv
import posixpath
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from lockstep.errors import DataError
from lockstep.listing import shorten
from lockstep.storage.remote_path import AnyPath

FILE_COLUMNS = ("file", "filename", "file_name", "image", "image_id", "image_path", "path", "filepath", "name", "id")
LABEL_COLUMNS = ("label", "class", "class_name", "category", "label_name", "species", "target")
_OF_BOXES = frozenset(("xmin", "ymin", "xmax", "ymax", "bbox"))


def label_table_among(entries: Sequence[AnyPath]) -> Path | None:
    """Return the table of classes in a folder that has one file of CSV, and images beside it or in one folder."""
    tables = [entry for entry in entries if isinstance(entry, Path) and entry.suffix.lower() == ".csv"]
    folders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return tables[0] if len(tables) == 1 and len(folders) <= 1 else None


def files_by_label(table: Path) -> dict[str, list[str]]:
    """Return the images of each class, as paths within the table's folder; classes and images are sorted.

    The columns are found by their names, as `FILE_COLUMNS` and `LABEL_COLUMNS` have them. A file is looked for beside
    the table, and in the one folder that is there; its ending may be left out.

    Raises:
        DataError: a column is missing, the table is of boxes, a file is not there, or has no class or several.
    """
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file)
            columns = _columns(table, [name.strip() for name in next(lines, [])])
            named = [_of_line(table, lines.line_num, line, columns) for line in lines if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{table} cannot be read.",
            given=str(error),
            expected="a table of CSV in UTF-8, with a line for each image",
            hint="write it again with the columns filename,label",
        ) from error
    files = _files(table, named)
    found: dict[str, list[str]] = {}
    for name, label in sorted(files.items()):
        found.setdefault(label, []).append(name)
    return dict(sorted(found.items()))


def _files(table: Path, named: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the class of each file, by its path within the table's folder."""
    inside = [entry for entry in table.parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    places = {path.name: path.name for path in table.parent.iterdir() if path.is_file()}
    for folder in inside:
        below = {entry.name: f"{folder.name}/{entry.name}" for entry in folder.iterdir()}
        places = below | {f"{folder.name}/{name}": path for name, path in below.items()} | places
    without_ending = [(PurePosixPath(name).with_suffix("").as_posix(), path) for name, path in places.items()]
    times = Counter(name for name, _ in without_ending)
    places = {name: path for name, path in without_ending if times[name] == 1} | places
    wanted = [(posixpath.normpath(name), label) for name, label in named]
    if missing := [name for name, _ in wanted if name not in places]:
        raise DataError(
            f"{table} names images that are not there.",
            given=f"{len(missing)} of {len(named)}: {shorten(missing, 3)}",
            expected=f"the names of files in {table.parent}" + "".join(f", or in {each}" for each in inside),
            hint="copy these images there, or take their lines out",
        )
    if not wanted:
        raise _unusable(table, "no line but the first", "write a line for each image")
    files: dict[str, str] = {}
    for name, label in wanted:
        if files.setdefault(places[name], label) != label:
            raise _unusable(table, f"{name!r} as {files[places[name]]!r} and as {label!r}", "take one of the lines out")
    return files


def _of_line(table: Path, number: int, line: Sequence[str], columns: Sequence[int]) -> list[str]:
    """Return the file and the class that a line names."""
    values = [line[column].strip() if column < len(line) else "" for column in columns]
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
    """Return the places of the columns of files and of labels."""
    lower = [name.lower() for name in header]
    found = [
        next((lower.index(name) for name in names if name in lower), None) for names in (FILE_COLUMNS, LABEL_COLUMNS)
    ]
    if _OF_BOXES & {*lower}:
        raise DataError(
            f"{table} is a table of boxes, and boxes are read from annotations.",
            given=f"the columns {shorten(header)}",
            expected="a folder of PASCAL VOC, or COCO's annotations.json",
            hint="export the annotations as VOC or COCO from the tool that made the table",
        )
    columns = [place for place in found if place is not None]
    if len(columns) < 2:
        raise DataError(
            f"{table} does not say the class of each image.",
            given=f"the columns {shorten(header) or '(none)'}",
            expected=f"a column of files ({', '.join(FILE_COLUMNS[:3])}) and one of classes "
            f"({', '.join(LABEL_COLUMNS[:3])})",
            hint="name the columns so in the first line: filename,label",
        )
    return columns
