"""What lies at a path of data, found out by names; no file is opened for it but a table, a `data.yaml` and JSON."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from lockstep.errors import DataError
from lockstep.listing import hint_for_path, shorten
from lockstep.readers.label_tables import files_by_label, is_table_of_boxes, label_table_among
from lockstep.readers.split_folders import ENDINGS, RECORDS, TAR, find_split
from lockstep.records.open_files import content_of
from lockstep.records.shards import absence_of, data_path, expand_braces, find_shards
from lockstep.storage.remote_path import AnyPath, RemotePath, is_url

ANNOTATED = (
    "VOC's folder, or one of images and XML; YOLO's data.yaml, or a folder with images and labels; a table of CSV "
    "(filename,class,xmin,ymin,xmax,ymax); or COCO's annotations.json, with :FOLDER after it where its images are not "
    "beside it"
)
"""What `annotations_at` finds, in words."""
KNOWN = (
    "a folder with a folder of images for each class, or with a table of CSV (filename,label); "
    "TFRecord files, tar shards, Parquet or Arrow files, their folder or a pattern; "
    "a data set that Hugging Face's datasets or TFDS (tfds:NAME/VERSION) keep, with /SPLIT after it; " + ANNOTATED
)
"""What `open_source` opens, in words."""

MIRRORED = ("images", "labels")
"""Where YOLO's tools have images, and the folder beside it with a text of the same name for each."""
DARKNET = "obj.data"
"""The file with which Darknet's folders, as CVAT exports them, say where classes and lists of images are."""
_NAMES_IN_YAML = re.compile(r"""(^(---\s*)?|\A\s*(---\s*)?\{([^#]*,)?\s*)["']?(names|nc)["']?\s*:""", re.MULTILINE)
_WORD, _MOST_BYTES = re.compile("[a-z]+"), 1 << 20
_KINDS: Mapping[str, Literal["coco", "yolo", "table"]] = {
    ".json": "coco",
    ".yaml": "yolo",
    ".yml": "yolo",
    ".csv": "table",
}

SETS = frozenset(("train", "validation", "valid", "val", "test"))
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
    is_other = shards_among(entries) or annotations_at(folder)
    return () if is_other else classes_among(data_path(folder), entries)


class AnnotationsAt(NamedTuple):
    """Annotations of objects on images, found by names."""

    kind: Literal["coco", "voc", "yolo", "table"]
    place: AnyPath
    """COCO's file, the folder of VOC, YOLO's `data.yaml` or folder, the table of CSV."""
    images: AnyPath | None = None
    """The folder of COCO's images, where the path names it."""


def annotations_at(path: str | Path) -> AnnotationsAt | None:
    """Find annotations of objects by the names of files; of a table the first line is read. None: there are none.

    Raises:
        DataError: a folder has several files of COCO's annotations, or cannot be listed.
    """
    annotations, colon, images = str(path).rpartition(".json:")
    whole = data_path(path)
    if colon and not whole.exists():
        return AnnotationsAt("coco", data_path(f"{annotations}.json"), data_path(images))
    if not whole.is_dir():
        kind = "yolo" if whole.name == DARKNET else _KINDS.get(whole.suffix.lower())
        return AnnotationsAt(kind, whole) if kind else None
    entries = entries_of(whole)
    if shards_among(entries):
        return None
    if inside := annotations_among(entries):
        files = sorted(file for file in inside.glob("*.json") if "captions" not in file.name)
    else:
        files = coco_sets_among(entries)
    if len(files) > 1:
        raise unknown_data(str(path), held(entries), f"name one of its files of annotations: {files[0]}")
    if files or inside:
        return AnnotationsAt("coco", files[0]) if files else AnnotationsAt("voc", whole)
    return _annotations_among(whole, entries)


def _annotations_among(folder: AnyPath, entries: Sequence[AnyPath]) -> AnnotationsAt | None:
    """Find annotations that lie among images, or in a folder beside theirs."""
    folders = {entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")}
    if yaml_among(entries) or folders.issuperset(MIRRORED) or _has_labels(folder, entries):
        return AnnotationsAt("yolo", folder)
    if not folders <= {"images", "JPEGImages", "xmls", "xml"}:
        return None
    if folders & {"xmls", "xml"} or any(entry.suffix.lower() == ".xml" for entry in entries):
        return AnnotationsAt("voc", folder)
    if table := label_table_among(entries):
        return AnnotationsAt("table", table) if is_table_of_boxes(table) else None
    files = [entry for entry in entries if entry.suffix == ".json"]
    return AnnotationsAt("coco", files[0]) if len(files) == 1 else None


def yaml_among(entries: Sequence[AnyPath]) -> AnyPath | None:
    """Return YOLO's `data.yaml`, or the one file of YAML in a folder with labels, too; else Darknet's obj.data."""
    files = [entry for entry in entries if entry.suffix in (".yaml", ".yml")]
    named = next((file for file in files if file.stem == "data" and _is_of_yolo(file)), None)
    has_labels = any(entry.name == MIRRORED[1] and entry.is_dir() for entry in entries)
    darknet = next((entry for entry in entries if entry.name == DARKNET), None)
    return named or (files[0] if len(files) == 1 and has_labels else None) or darknet


def _is_of_yolo(file: AnyPath) -> bool:
    """Whether a file of YAML names classes, or says how many; of one that cannot be read its reader says why."""
    try:
        return _NAMES_IN_YAML.search(content_of(file, _MOST_BYTES).decode("utf-8-sig")) is not None
    except (OSError, UnicodeDecodeError):
        return True


def coco_sets_among(entries: Sequence[AnyPath]) -> list[AnyPath]:
    """Return COCO's files of annotations, such as train.json, that lie beside the folders of their images.

    There are none beside a folder of other images, which may be of a class. Where there are some, one that is cut short
    is among them, for its reader to say so.
    """
    usual = {"images", *SETS}
    visible = [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    folders = {entry.name.lower() for entry in visible}
    is_usual = not usual.isdisjoint(folders) and not any(
        has_images(entry) for entry in visible if entry.name.lower() not in usual
    )
    if not is_usual or yaml_among(entries):
        return []
    files = [entry for entry in entries if entry.suffix == ".json" and not SETS.isdisjoint(_WORD.findall(entry.name))]
    whole = [file for file in files if is_url(file) or all(words_in(file, b'"categories"', b'"bbox"'))]
    return [file for file in files if file in whole or _is_cut_short(file)] if whole else []


def _is_cut_short(file: AnyPath) -> bool:
    """Whether a file of this machine does not end as JSON's objects do."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - 64))
        return not opened.read().rstrip().endswith(b"}")


def words_in(path: AnyPath, *words: bytes) -> list[bool]:
    """Tell for each word whether it is in a file; no for an unreadable one, as its reader will say why."""
    try:
        if isinstance(path, RemotePath):
            content = content_of(path)
            return [word in content for word in words]
        if not path.is_file():  # to open a pipe is to wait for who writes to it
            raise OSError
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return [mapped.find(word) >= 0 for word in words]
    except (OSError, ValueError):  # the second for an empty file
        return [False] * len(words)


def mirrored(images: AnyPath) -> AnyPath | None:
    """Return the folder that is named as that of images, but for `labels` in place of the last `images`, if any is."""
    tail, above = [], images
    while above.name and above.name != MIRRORED[0]:
        tail.append(above.name)
        above = above.parent
    if not above.name:
        return None
    found = above.parent / MIRRORED[1]
    for name in reversed(tail):
        found = found / name
    return found if found.is_dir() else None


def has_images(folder: AnyPath) -> bool:
    """Whether images are in a folder itself; not in one that cannot be listed."""
    try:
        return any(entry.name.lower().endswith(ENDINGS) for entry in folder.iterdir())
    except OSError:
        return False


def _has_labels(folder: AnyPath, entries: Sequence[AnyPath]) -> bool:
    """Whether images are among these entries, and a text of labels for one, beside it or where it is mirrored."""
    stems = {entry.stem for entry in entries if entry.name.lower().endswith(ENDINGS)}
    there = any(entry.suffix == ".txt" and entry.stem in stems for entry in entries)
    return there or (bool(stems) and mirrored(folder) is not None)


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
    check_no_sets(folder, names)
    return names


def check_no_sets(folder: AnyPath, names: Sequence[str]) -> None:
    """Refuse folders that are all named as sets: they are no classes."""
    if names and SETS.issuperset(names):
        raise DataError(
            f"{folder} holds sets of images, each with folders of classes.",
            given=f"the folders {', '.join(names)}",
            expected="a folder of images for each class",
            hint=f"name one of them: {' or '.join(str(folder / name) for name in names)}",
        )


def unknown_data(
    path: str, given: str, hint: str = "check the path; `lockstep convert --help` makes records"
) -> DataError:
    """Make the error of a path that leads to nothing that `open_source` opens."""
    return DataError(f"{path} is no data that is known.", given=given, expected=KNOWN, hint=hint)
