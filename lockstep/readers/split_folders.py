"""Folders of data sets whose splits have names, as Hugging Face's datasets and TFDS make them, found by their names.

- a folder that save_to_disk made, of a Dataset (state.json) or of a DatasetDict (dataset_dict.json)
- a folder of Parquet or Arrow files, or with them in "data" as in repositories of the hub: train-00000-of-00005.parquet
- a folder of a version of TFDS (features.json and dataset_info.json), or the folder above it if it holds no other
  version; "tfds:mnist/3.0.1" is that folder in TFDS_DATA_DIR, or in ~/tensorflow_datasets

A split is named after a slash: "folder/train", "tfds:mnist/3.0.1/train". No library of theirs is needed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lockstep.errors import DataError
from lockstep.listing import hint_for_path, shorten

TFDS = "tfds:"
"""What the name of a data set of TFDS begins with."""
TABLE = re.compile(r"\.(parquet|arrow|feather)$")
"""Endings of the names of tables."""
RECORDS = re.compile(r"-\d+-of-\d+|\.(tfrecord|record)s?(\.|-|$)")
"""What is in the names of files of records."""
TAR = re.compile(r"\.tar$")
"""The ending of tar archives."""
ENDINGS = (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
"""Endings of the names of image files."""

FEATURES = "features.json"
_INFO, _STATE, _DICT = "dataset_info.json", "state.json", "dataset_dict.json"
_LARGEST_JSON_BYTES = 1 << 26
_MOST_NAMED = 5
_SHARD_OF_TABLE = re.compile(r"(.+?)-(\d{1,7})-of-(\d{1,7})")
_NAMED_SPLIT = re.compile(r"(train|test|validation|valid|val|dev)(?=[-_.])")
_HELD_OUT = re.compile(r"test|validation|valid|val|dev", re.IGNORECASE)
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_NAME = re.compile(r"[\w][\w.+-]*")
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"


class NamedSplit(NamedTuple):
    """A split of a data set."""

    kind: Literal["tfds", "tables"]
    folder: Path
    """The folder of a version of TFDS, which holds what is known of it."""
    name: str
    """"" where there is but one, without a name."""
    files: tuple[Path, ...]
    num_examples: int | None = None
    """As many as the data set says that there are."""


def find_split(path: str | Path) -> NamedSplit | None:
    """Find the files of a split by a path; None where the path leads to no folder of these kinds.

    Raises:
        DataError: there are several splits or versions, and the path names none; there is none of the name; files are
            missing.
    """
    is_named = str(path).startswith(TFDS)
    place = _data_dir() / str(path).removeprefix(TFDS) if is_named else Path(str(path))
    folder, split = (place, None) if _is_folder(place) else (place.parent, place.name)
    if split is not None and (not _NAME.fullmatch(split) or TABLE.search(split) or os.path.exists(place)):  # noqa: PTH110
        return None
    if is_named and folder == _data_dir():
        raise _no_data_set(str(path), place)
    splits = _splits_of(folder) if _is_folder(folder) else None
    if splits is None and _is_folder(folder) and (version := _only_version(folder, str(path), split)):
        splits = _splits_of(version)
    if not splits:
        if is_named:
            raise _no_data_set(str(path), folder)
        return None
    if split is None and len(splits) == 1 and not _HELD_OUT.fullmatch(next(iter(splits))):
        return _whole(next(iter(splits.values())))
    if split is not None and split in splits:
        return _whole(splits[split])
    if split is not None and not is_named and not _may_be_split(folder, split, splits):
        return None
    raise DataError(
        f"{path} names none of the splits."
        if split
        else f"{path} has {'several splits' if len(splits) > 1 else 'no split to train on'}.",
        given=split or f"the split{'s' * (len(splits) > 1)} {', '.join(splits)}",
        expected=f"one of {', '.join(splits)}",
        hint=f"name one: {_without_split(path, split)}/{next(iter(splits))}",
    )


def split_names(path: str | Path) -> tuple[str, ...]:
    """Return the names of the splits in a folder of these kinds; none where a path leads to no such folder."""
    place = _data_dir() / str(path).removeprefix(TFDS) if str(path).startswith(TFDS) else Path(str(path))
    if not _is_folder(place):
        return ()
    splits = _splits_of(place)
    if splits is None and (version := _only_version(place, str(path), None)):
        splits = _splits_of(version)
    return tuple(splits or ())


def _may_be_split(folder: Path, name: str, splits: Iterable[str]) -> bool:
    """Whether a name that is none of the splits is likely to be meant as one, not as that of a file."""
    if any((folder / file).exists() for file in (FEATURES, _DICT)):
        return True
    return any(splits) and "." not in name and not any(file.name.startswith(name) for file in folder.iterdir())


def _without_split(path: str | Path, split: str | None) -> str:
    """Return a path without the split at its end."""
    return (str(path).rstrip("/").removesuffix(f"/{split}") if split else str(path)).rstrip("/")


def _whole(split: NamedSplit) -> NamedSplit:
    """Refuse a split with files missing, of tables by the names of the others, which may end in a hash."""
    if split.kind == "tfds":
        _there(split.folder, [file.name for file in split.files], _INFO)
        return split
    shards = [found for file in split.files if (found := _SHARD_OF_TABLE.match(file.name))]
    if not shards:
        return split
    counts = sorted({int(shard[3]) for shard in shards})
    there = {int(shard[2]) for shard in shards}
    missing = list(islice((number for number in range(counts[0]) if number not in there), _MOST_NAMED))
    if len(counts) > 1 or missing:
        of = " and ".join(f"-of-{count:05d}" for count in counts)
        raise DataError(
            f"Files are missing in {split.files[0].parent}."
            if len(counts) == 1
            else f"There are two sets of shards in {split.files[0].parent}.",
            given=f"files that are named {of}"
            + (f", and none with the number {', '.join(f'{number:05d}' for number in missing)}" if missing else ""),
            expected=f"all {counts[0]}" if len(counts) == 1 else "one set: the other may hold the same examples",
            hint="copy the missing ones, or name files by a pattern",
        )
    return split


def read_json(path: Path) -> Any:
    """Read a file of JSON that a data set has beside its data."""
    try:
        if (size := path.stat().st_size) > _LARGEST_JSON_BYTES:
            raise ValueError(f"{size} bytes")
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read.",
            given=str(error),
            expected="the JSON that was written with the data set",
            hint="copy the folder again",
        ) from error


def _splits_of(folder: Path) -> Mapping[str, NamedSplit] | None:
    """Find the splits of a folder by their names; None if it is none of such a data set."""
    if (folder / FEATURES).is_file() and (folder / _INFO).is_file():
        return _splits_of_tfds(folder)
    if (folder / _STATE).is_file():
        return {"": _saved(folder, "")}
    if (folder / _DICT).is_file():
        names = _names(folder / _DICT, read_json(folder / _DICT), "splits")
        return {name: _saved(folder / name, name) for name in names}
    found: dict[str, list[Path]] = {}
    for file in _loose_tables(folder):
        shard = _SHARD_OF_TABLE.match(file.name) or _NAMED_SPLIT.match(file.name)
        found.setdefault(shard[1] if shard else "", []).append(file)
    return {name: NamedSplit("tables", folder, name, tuple(files)) for name, files in found.items()} or None


def _saved(folder: Path, name: str) -> NamedSplit:
    """Find the files of a data set that save_to_disk wrote."""
    state = read_json(folder / _STATE)
    entries = state.get("_data_files") if isinstance(state, dict) else None
    of_files = entries if isinstance(entries, list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in of_files]
    return NamedSplit("tables", folder, name, _there(folder, _checked(folder / _STATE, names, "_data_files"), _STATE))


def _splits_of_tfds(folder: Path) -> dict[str, NamedSplit]:
    info = read_json(folder / _INFO)
    try:
        kind = str(info.get("fileFormat") or "tfrecord")
        splits = {
            str(split["name"]): (split.get("filepathTemplate") or _TEMPLATE, [*map(int, split["shardLengths"])])
            for split in info["splits"]
            if split.get("shardLengths")
        }
        dataset = str(info["name"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_info(folder / _INFO, f"{type(error).__name__}: {error}") from error
    if kind != "tfrecord":
        raise DataError(
            f"{folder} is not stored in a format that is read.",
            given=f"files of {kind}",
            expected="TFRecord files",
            hint="prepare it with file_format=tfrecord",
        )
    found = {}
    for name, (template, lengths) in splits.items():
        shards = (
            template.replace("{DATASET}", dataset)
            .replace("{SPLIT}", name)
            .replace("{FILEFORMAT}", kind)
            .replace("{SHARD_X_OF_Y}", f"{number:05d}-of-{len(lengths):05d}")
            for number in range(len(lengths))
        )
        files = _checked(folder / _INFO, list(shards), "filepathTemplate")
        found[name] = NamedSplit("tfds", folder, name, tuple(folder / file for file in files), sum(lengths))
    return found


def _only_version(folder: Path, path: str, split: str | None) -> Path | None:
    """Return the one version in a folder of TFDS, below the one configuration; None if it is no such folder."""
    inside = sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    found = [entry for entry in inside if _VERSION.fullmatch(entry.name) and (entry / FEATURES).is_file()]
    what, why = "versions", ": the newest is not taken by itself, as a run is to stay with its data"
    found.sort(key=lambda entry: [*map(int, entry.name.split("."))])
    if not found and path.startswith(TFDS):
        found = [entry for entry in inside if any((below / FEATURES).is_file() for below in entry.iterdir())]
        what, why = "configurations", ""
        if len(found) == 1:
            return _only_version(found[0], path, split)
    if len(found) > 1:
        after = f"/{split}" if split and not _VERSION.fullmatch(split) else ""
        raise DataError(
            f"There are several {what} of {path}.",
            given=f"{', '.join(entry.name for entry in found)} in {folder}",
            expected=f"one of them{why}",
            hint=f"name one: {_without_split(path, split)}/{found[-1].name}{after}",
        )
    return found[0] if found else None


def _data_dir() -> Path:
    return Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def _tables_in(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if TABLE.search(entry.name) and entry.name[0] != ".")
    except OSError:
        return []


def _loose_tables(folder: Path) -> list[Path]:
    """Return the tables in a folder, or in "data" within; none where the folder is another kind of data beside them."""
    for place in (folder, folder / "data"):
        if tables := _tables_in(place):
            return [] if _is_other_data(folder) or _is_other_data(place) else tables
    return []


def _is_other_data(folder: Path) -> bool:
    """Whether a folder holds shards, annotations, or images in each of its folders, as those of classes."""
    try:
        shown = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    except OSError:
        return False
    others = [entry.name for entry in shown if not TABLE.search(entry.name)]
    if any(RECORDS.search(name) or TAR.search(name) or name.lower() == "annotations" for name in others):
        return True
    folders = [entry for entry in shown if _is_folder(entry)]
    return bool(folders) and all(map(_has_images, folders))


def _has_images(folder: Path) -> bool:
    names = (name for _, _, names in os.walk(folder) for name in names)
    return any(name.lower().endswith(ENDINGS) and not name.startswith(".") for name in names)


def _names(path: Path, content: Any, key: str) -> Sequence[str]:
    names = content.get(key) if isinstance(content, dict) else None
    return _checked(path, names if isinstance(names, list) else [], key)


def _checked(path: Path, names: Sequence[Any], key: str) -> Sequence[str]:
    """Refuse names of files and folders that are not in the folder, and none at all."""
    if bad := [name for name in names if not isinstance(name, str) or "/" in name or name in ("", ".", "..")]:
        raise _no_info(path, f"{key} with {bad[0]!r}")
    if not names:
        raise _no_info(path, f"no {key}")
    return names


def _there(folder: Path, names: Iterable[str], named_in: str) -> tuple[Path, ...]:
    files = tuple(folder / name for name in names)
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(
            f"Files are missing in {folder}.",
            given=f"no {shorten(missing)}",
            expected=f"all {len(files)} that its {named_in} names",
            hint="copy the folder again",
        )
    return files


def _no_info(path: Path, given: str) -> DataError:
    return DataError(
        f"{path} does not say what the data is.",
        given=given,
        expected="what Hugging Face's datasets or TFDS write there",
        hint="copy the folder again, or name its files by a pattern",
    )


def _no_data_set(path: str, folder: Path) -> DataError:
    return DataError(
        f"There is no data set {path}.",
        given=f"no {FEATURES} in {folder} or its versions" if folder.is_dir() else f"no folder {folder}",
        expected="a prepared data set: tfds:NAME/VERSION or tfds:NAME/CONFIG/VERSION, with /SPLIT after it",
        hint=f"{hint_for_path(folder)}; TFDS_DATA_DIR names the folder of all of them, here {_data_dir()}",
    )


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 (that of pathlib raises)
