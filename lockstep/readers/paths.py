"""What lies at a path of data, found out by names alone: no file is opened for it but a table of labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import DataError
from lockstep.listing import hint_for_path, shorten
from lockstep.readers.label_tables import files_by_label, label_table_among
from lockstep.readers.split_folders import ENDINGS, RECORDS, TAR, find_split
from lockstep.records.shards import absence_of, data_path, expand_braces, find_shards
from lockstep.storage.remote_path import AnyPath, is_url

KNOWN = (
    "a folder with a folder of images for each class, or with a table of CSV (filename,label); "
    "TFRecord files, tar shards, Parquet or Arrow files, their folder or a pattern; "
    "a data set that Hugging Face's datasets or TFDS (tfds:NAME/VERSION) keep, with /SPLIT after it; "
    "VOC's folder; or COCO's annotations.json, with :FOLDER after it where its images are not beside it"
)
"""What `open_source` opens, in words."""

_SETS = frozenset(("train", "validation", "valid", "val", "test"))
"""Names of folders of sets, which hold the folders of classes."""


def check_there(path: str | Path, expected: str = KNOWN) -> None:
    """Refuse a path or a pattern that leads nowhere, without opening the data; `expected` says what it may lead to."""
    file = str(path).partition(".json:")[0] + ".json" if ".json:" in str(path) else str(path)
    if data_path(file).exists() or find_split(file):
        return
    files = find_shards(expand_braces(file))
    if missing := [found for found in files if not found.exists()]:
        raise DataError(
            f"There is no data at {path}.",
            given=absence_of(missing[0]),
            expected=expected,
            hint=hint_for_path(file) if len(files) == 1 else "check the path",
        )


def is_folder(path: str | AnyPath) -> bool:
    """Whether there is such a folder; there is none for a name that is too long."""
    if is_url(path):
        return data_path(path).is_dir()
    return os.path.isdir(str(path))  # noqa: PTH112 (that of pathlib raises)


def class_folders(folder: str | Path) -> tuple[str, ...]:
    """Return the names of the classes if `open_source` would read this folder as an `ImageFolder`; else none.

    The folder alone is listed. One without any kind of data that is known is a DataError.
    """
    if find_split(folder):
        return ()
    entries = entries_of(data_path(folder))
    is_other = shards_among(entries) or annotations_among(entries)
    return () if is_other else classes_among(data_path(folder), entries)


def found_from(folder: Path, path: str) -> str:
    """Return a path as it is, or if it leads nowhere, and in another folder somewhere, the one in that folder."""
    if is_url(path):
        return path
    annotations, colon, images = path.partition(".json:")
    parts = [f"{annotations}.json", images] if colon else [path]
    other = ":".join(str(folder / part) for part in parts)
    return path if _is_there(path) or not _is_there(other) else other


def _is_there(path: str) -> bool:
    try:
        check_there(path)
    except DataError:
        return False
    return True


def entries_of(folder: AnyPath) -> Sequence[AnyPath]:
    """List a folder, in order; one that cannot be listed is a DataError."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise unknown_data(str(folder), str(error)) from error


def held(entries: Sequence[AnyPath]) -> str:
    """Say what a folder holds, for messages."""
    return shorten([entry.name for entry in entries]) if entries else "an empty folder"


def shards_among(entries: Sequence[AnyPath]) -> list[str]:
    """Return the names that are those of record files or of tar archives."""
    return [entry.name for entry in entries if RECORDS.search(entry.name) or TAR.search(entry.name)]


def annotations_among(entries: Sequence[AnyPath]) -> AnyPath | None:
    """Return the folder of annotations of VOC or COCO, if it is there."""
    return next((entry for entry in entries if entry.name.lower() == "annotations"), None)


def classes_among(folder: AnyPath, entries: Sequence[AnyPath]) -> tuple[str, ...]:
    """Return the names of the folders of classes; images without any, and folders of sets, are refused."""
    names = tuple(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    images = [entry.name for entry in entries if entry.name.lower().endswith(ENDINGS)]
    if table := label_table_among(entries):
        return tuple(files_by_label(table))
    if not names and images:
        raise DataError(
            f"The images in {folder} are not in folders of their classes.",
            given=f"{len(images)} images ({shorten(images, 2)}) and no folders",
            expected="a folder of images for each class",
            hint=f"move the images of each class into a folder with its name, such as {folder / 'CLASS' / images[0]}; "
            f"or put one table beside them, {folder / 'labels.csv'}, with the columns filename,label",
        )
    if not names:
        raise unknown_data(str(folder), held(entries))
    if _SETS.issuperset(names):
        raise DataError(
            f"{folder} holds sets of images, each with folders of classes.",
            given=f"the folders {', '.join(names)}",
            expected="a folder of images for each class",
            hint=f"name one of them: {' or '.join(str(folder / name) for name in names)}",
        )
    return names


def unknown_data(
    path: str, given: str, hint: str = "check the path; `lockstep convert --help` makes records"
) -> DataError:
    """Make the error of a path that leads to nothing that `open_source` opens."""
    return DataError(f"{path} is no data that is known.", given=given, expected=KNOWN, hint=hint)
