"""The reader for a path, whatever lies there: found out by looking."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from lockstep.errors import DataError
from lockstep.readers.coco import Coco
from lockstep.readers.detection_schema import DetectionSchema
from lockstep.readers.image_folder import ImageFolder
from lockstep.readers.image_records import ImageRecords
from lockstep.readers.imagenet_schema import ImageNetSchema
from lockstep.readers.mnist_schema import mnist_records
from lockstep.readers.reader import Reader
from lockstep.readers.tar_shards import TarShards
from lockstep.readers.voc import Voc
from lockstep.records.braces import expand_braces
from lockstep.records.example import scan_example
from lockstep.records.record_streams import read_all
from lockstep.records.shards import check_local, find_shards

KNOWN = (
    "a folder with a folder of images for each class; TFRecord files or tar shards, their folder or a pattern; "
    "VOC's folder; or COCO's annotations.json, with :FOLDER after it where its images are not beside it"
)
"""What `open_source` opens, in words."""

_RECORDS = re.compile(r"-\d+-of-\d+|\.(tfrecord|record)s?(\.|-|$)")
_TAR = re.compile(r"\.tar$")
_NUMBER_OF_SHARD = re.compile(r"\d+(?=-of-\d|\.tar$|\.(tfrecord|record))")
_MOST_NAMED = 5

_IMAGE, _PIXELS, _LABEL = "image/encoded", "image_raw", "image/class/label"
_OBJECTS = "image/object/"


def open_source(path: str | Path) -> Reader:
    """The reader of what a path names: known by the names in a folder, and by the first record of a file of records.

    - a folder with a folder of images for each class: `ImageFolder`
    - TFRecord files, a pattern of them, or the folder of one set of shards: `ImageRecords` with an `ImageNetSchema` or
      a `DetectionSchema`, or the records of MNIST
    - tar archives, a pattern or a range of them, or their folder: `TarShards`
    - a folder with annotations in XML: `Voc`, its split "train" where it has one, else all of it
    - a file of annotations.json: `Coco`; its images are in the folder named after a colon, else in one beside the file
      that is named like the split or "images", else beside the file itself

    Raises:
        DataError: it is none of these; there are several sets of shards; or as the reader says.
    """
    check_local(path)
    text, whole = str(path), Path(path)
    annotations, colon, images = text.rpartition(":")
    if colon and annotations.endswith(".json") and not whole.exists():
        return Coco(annotations, images)
    if whole.is_dir():
        return _open_folder(whole)
    if whole.suffix == ".json":
        return Coco(whole, _images_beside(whole))
    return _open_files(find_shards(expand_braces(text)), text)


def _open_folder(folder: Path) -> Reader:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise _unknown(str(folder), str(error)) from error
    names = [entry.name for entry in entries]
    if shards := [name for name in names if _RECORDS.search(name) or _TAR.search(name)]:
        return _open_files(_one_set(folder, shards), str(folder))
    if annotations := next((entry for entry in entries if entry.name.lower() == "annotations"), None):
        # Those of captions have no categories, and come last.
        if files := sorted(annotations.glob("*.json"), key=lambda file: ("captions" in file.name, file)):
            raise _unknown(str(folder), _listed(names), f"name one of its files of annotations: {files[0]}")
        has_lists = (folder / "ImageSets" / "Main" / "train.txt").is_file()
        return Voc(folder, "train" if has_lists else None)
    if any(entry.is_dir() and not entry.name.startswith(".") for entry in entries):
        return ImageFolder(folder)
    raise _unknown(str(folder), _listed(names) if names else "an empty folder")


def _one_set(folder: Path, names: Sequence[str]) -> list[Path]:
    """All files of the one set of shards that these names belong to."""
    patterns = sorted({_NUMBER_OF_SHARD.sub("*", glob.escape(name), count=1) for name in names})
    if len(patterns) > 1:
        raise DataError(
            f"There are several sets of shards in {folder}.",
            given=_listed(patterns),
            expected="one set: others may be there to validate or to test",
            mend=f"name one by a pattern: '{folder / patterns[0]}'",
        )
    return find_shards(f"{glob.escape(str(folder))}/{patterns[0]}")


def _open_files(files: Sequence[Path], given: str) -> Reader:
    if missing := next((file for file in files if not file.is_file()), None):
        raise _unknown(given, f"no file {missing}")
    if _TAR.search(files[0].name):
        return TarShards(files)
    features = _first_features(files, given)
    if _PIXELS in features:
        return mnist_records(files)
    if _IMAGE not in features:
        raise _unknown(given, f"records with the features {_listed(sorted(features)) or '(none)'}")
    has_objects = any(name.startswith(_OBJECTS) for name in features)
    return ImageRecords(files, DetectionSchema() if has_objects and _LABEL not in features else ImageNetSchema())


def _first_features(files: Sequence[Path], given: str) -> set[str]:
    """The names of the features of the first record there is."""
    for file in files:
        try:
            first = next(read_all(file), None)
        except DataError as error:
            if _RECORDS.search(file.name):
                raise
            raise _unknown(given, f"{file}, which is no file of records") from error
        if first:
            return {*scan_example(first[1], f"The first record of {file}")}
    raise DataError(
        f"There are no records in {given}.",
        given=f"{len(files)} {'file' if len(files) == 1 else 'files'} without a record",
        expected="one record or more",
        mend="check the path or the pattern; write the records again",
    )


def _images_beside(annotations: Path) -> Path:
    """Where the images of COCO's instances_train2017.json are: in train2017, in images, or in its own folder."""
    split = annotations.stem.rpartition("_")[2]
    here, above = annotations.parent, annotations.parent.parent
    folders = (above / split, here / split, above / "images" / split, above / "images", here / "images")
    return next((folder for folder in folders if folder.is_dir()), here)


def _unknown(path: str, given: str, mend: str = "check the path; or read it by a reader of its own") -> DataError:
    return DataError(f"{path} is no data that is known.", given=given, expected=KNOWN, mend=mend)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(islice(names, _MOST_NAMED)) + (f" and {more} more" if more > 0 else "")
