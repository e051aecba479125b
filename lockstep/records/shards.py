"""Expands patterns (train-*) and ranges in braces (train-{000..127}.tar) to files, none of them missing."""

from __future__ import annotations

import glob
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice, product
from pathlib import Path
from typing import TypeAlias

from lockstep.checks import check_type, wrong_type
from lockstep.errors import DataError
from lockstep.listing import shorten
from lockstep.storage.remote_path import AnyPath, DataPath, RemotePath, is_url

# TensorFlow's names of shards, such as train-00003-of-00128 or data-00000-of-00001.gz
_SHARD = re.compile(r"(.*?(?<!\d))(\d{1,7})-of-(\d{1,7})(?!\d)(.*)", re.DOTALL)
_RANGE = re.compile(r"\{(\d{1,18}\.\.\d{1,18})\}")
_MOST_PATHS = 1_000_000
_REMOTE = re.compile(r"([a-z][a-z0-9+.-]+):/", re.IGNORECASE)
_MOUNTS = {
    "s3": "mount the bucket (mount-s3 BUCKET FOLDER), or copy it (aws s3 sync),",
    "gs": "mount the bucket (gcsfuse BUCKET FOLDER), or copy it (gcloud storage rsync),",
}
_LONGEST_PATH_BYTES, _LONGEST_PART_BYTES = 4095, 255
_MOST_NAMED = 5
_MOST_SHOWN = 100

Paths: TypeAlias = "str | AnyPath | Sequence[str | AnyPath]"
"""A path or a pattern, or several of them."""


def find_shards(paths: Paths) -> list[AnyPath]:
    """List the files of a path, of a pattern, or of several of these, in turn.

    A pattern is one of the shell: * for any characters, ? for one, [a-z] for one of these. Its files come sorted by
    name, without hidden ones. Where files are named like "train-00003-of-00128", all that the pattern names must be
    there: "train-*" stands for all 128, "train-0000?-of-00128" for the first ten. A path that exists is taken as it is,
    whatever characters it has.
    """
    given = [data_path(path) for path in list_of_paths(paths)]
    return [file for path in _listed_together(given) for file in _matching(path)]


def expand_braces(path: str | AnyPath) -> list[str]:
    """Expand the ranges {first..last} in a path, as users of WebDataset write them; other paths are left as they are.

    Of several ranges the last one runs fastest. If one of its two numbers begins with a zero, all numbers of a range
    have as many digits as the longer one. A path that exists is taken as it is, whatever characters it has.
    """
    is_remote = isinstance(data_path(path), RemotePath)
    path = str(path)
    texts = _RANGE.split(path)  # in turn: text outside of a range, and in one
    # os.path: that of pathlib raises where it may not look.
    if len(texts) == 1 or (not is_remote and os.path.exists(path)):  # noqa: PTH110
        return [path]
    spans = [tuple(map(int, text.split(".."))) for text in texts[1::2]]
    count = math.prod(max(0, last + 1 - first) for first, last in spans)
    if not 0 < count <= _MOST_PATHS:
        raise DataError(
            f"{path} cannot be expanded.",
            given=f"{count} paths" if count else "a range that falls",
            expected=f"ranges that rise, for at most {_MOST_PATHS} paths",
            hint="write the first shard's number, two dots and the last one's: {000000..000999}",
        )
    choices = [_numbers(text) if place % 2 else [text] for place, text in enumerate(texts)]
    return ["".join(parts) for parts in product(*choices)]


def list_of_paths(paths: Paths) -> Sequence[str | AnyPath]:
    """Make a list of one path or several."""
    if isinstance(paths, str | Path | RemotePath):
        return [paths]
    given: object = paths
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise wrong_type("paths", paths, expected="a path, or a list of paths", hint='write "train-*", or a list')
    return list(paths)


def data_path(path: str | AnyPath) -> AnyPath:
    """Return the path of data, which is on this machine or, if it is a URL, in an object store; refuse any other."""
    if isinstance(path, RemotePath) or is_url(path):
        return path if isinstance(path, DataPath) else DataPath(str(path))
    check_local(path)
    return Path(path)


def check_local(path: str | Path) -> None:
    """Refuse a path that no system takes, and the address of a remote file, such as s3://bucket/file."""
    check_type("path", path, (str, Path), expected="a path: text, or a Path", hint="write it as text")
    if problem := _problem_of(str(path)):
        raise DataError(
            f"{str(path)[:_MOST_SHOWN]!r} cannot be the path of a file.",
            given=problem,
            expected=f"at most {_LONGEST_PATH_BYTES} bytes, at most {_LONGEST_PART_BYTES} between slashes, and no zero",
            hint="check the path",
        )
    if remote := _REMOTE.match(str(path)):
        scheme = remote[1].lower()
        raise DataError(
            f"{path} is not on this machine.",
            given=f"an address that begins with {scheme}:",
            expected="a path in the file system",
            hint=f"{_MOUNTS.get(scheme, 'mount it, or copy it,')} and give the path of the folder",
        )


def _problem_of(path: str) -> str:
    """Say why no system takes this text as a path; "" if it may be one."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "a character that no file name has"
    if len(encoded) > _LONGEST_PATH_BYTES:
        return f"a path of {len(encoded)} bytes"
    if len(encoded) > _LONGEST_PART_BYTES and (longest := max(map(len, encoded.split(b"/")))) > _LONGEST_PART_BYTES:
        return f"a part of {longest} bytes"
    return "a zero in it" if b"\0" in encoded else ""


def _listed_together(paths: Sequence[AnyPath]) -> list[AnyPath]:
    """List the folders that hold several of these objects, so that no request is made for each of them."""
    plain = Counter(path.parent for path in paths if isinstance(path, RemotePath) and not glob.has_magic(str(path)))
    folders = [folder for folder, count in plain.items() if count > 1]
    known: dict[AnyPath, AnyPath] = {}
    for folder in folders:
        with suppress(FileNotFoundError):
            known.update((path, path) for path in folder.iterdir())
    missing = [path for path in paths if path.parent in folders and path not in known and not glob.has_magic(str(path))]
    if missing:
        raise DataError(
            f"Files are missing in {missing[0].parent}.",
            given=f"no {shorten([path.name for path in missing])}",
            expected=f"all of {len(paths)} files",
            hint="copy the missing ones, or name fewer",
        )
    return [known.get(path, path) for path in paths]


def _matching(path: AnyPath) -> list[AnyPath]:
    if isinstance(path, RemotePath):
        return _matching_in_store(path)
    pattern = str(path)
    if os.path.isdir(path):  # noqa: PTH112 (that of pathlib raises where a folder may not be looked into)
        raise _is_folder(path)
    if os.path.exists(path) or not glob.has_magic(pattern):  # noqa: PTH110
        return [path]
    found = glob.glob(pattern, recursive=True)  # noqa: PTH207 (that of pathlib takes hidden files too)
    files: list[AnyPath] = [path for path in map(Path, sorted(found)) if path.is_file()]
    if not files:
        raise DataError(
            f"No file is named like {pattern}",
            given=_held(path.parent),
            expected="one file or more",
            hint="check the pattern" + ("" if path.is_absolute() else f"; it is read from {Path.cwd()}"),
        )
    _check_complete(files, path.name)
    return files


def _matching_in_store(path: RemotePath) -> list[AnyPath]:
    """List what is at a URL, or named like it."""
    if not glob.has_magic(str(path)):
        path = path.looked_up()
        if path.is_dir():
            raise _is_folder(path)
        return [path]
    above = path.parent
    while glob.has_magic(str(above)) and above.parent != above:
        above = above.parent
    try:
        found = [*above.glob(str(path.relative_to(above)))]
    except FileNotFoundError:
        found = []
    is_hidden = [any(part.startswith(".") for part in each.relative_to(above).parts) for each in found]
    files = [each for each, hidden in zip(found, is_hidden, strict=True) if each.is_file() and not hidden]
    if not files:
        raise DataError(
            f"No file is named like {path}", given=_held(above), expected="one file or more", hint="check the pattern"
        )
    _check_complete(files, path.name)
    return [*files]


def _is_folder(path: AnyPath) -> DataError:
    return DataError(
        f"{path} is a folder.",
        given=_held(path),
        expected="a file, or a pattern of files",
        hint=f"name its files, such as {path}/train-*",
    )


def absence_of(path: AnyPath, what: str = "file") -> str:
    """Say that nothing is at a path: no such file or folder, or in a store no such bucket."""
    bucket = path.bucket if isinstance(path, RemotePath) else None
    return f"no {what} {path}" if bucket is None or bucket.exists() else f"no bucket {bucket}"


def _held(folder: AnyPath) -> str:
    if not folder.is_dir():
        return f"there is {absence_of(folder, 'folder')}"
    return f"a folder that holds {shorten(sorted(path.name for path in folder.iterdir())) or 'nothing'}"


def _check_complete(files: Sequence[AnyPath], pattern: str) -> None:
    """Refuse sets of shards with some missing, and two sets in one place."""
    counts: dict[tuple[AnyPath, str, str], str] = {}
    found: dict[tuple[AnyPath, str, str], dict[int, str]] = {}
    for path in files:
        if shard := _SHARD.fullmatch(path.name):
            before, number, count, after = shard.groups()
            key = path.parent, before, after
            if counts.setdefault(key, count) != count:
                raise DataError(
                    f"There are two sets of shards in {path.parent}.",
                    given=f"files that are named -of-{counts[key]}, and {path.name}",
                    expected="one set: the other may hold the same examples",
                    hint=f"name one by the pattern, such as *-of-{count}*",
                )
            found.setdefault(key, {})[int(number)] = number
    for key, count in counts.items():
        (folder, before, after), numbers = key, found[key]
        width = min(map(len, numbers.values()))
        names = (
            f"{before}{number:0{width}}-of-{count}{after}" for number in range(int(count)) if number not in numbers
        )
        # A name can claim any number of shards: only the first few missing ones are looked for.
        missing = list(islice((name for name in names if fnmatchcase(name, pattern)), _MOST_NAMED + 1))
        if missing:
            more = ", ..." if len(missing) > _MOST_NAMED else ""
            raise DataError(
                f"Shards are missing in {folder}: {', '.join(missing[:_MOST_NAMED])}{more}",
                given=f"{len(numbers)} files that are named -of-{count}",
                expected=f"all {int(count)} of them, or those that {pattern} stands for",
                hint="copy the missing ones, or name fewer by the pattern, such as train-0000?-of-00128",
            )


def _numbers(text: str) -> list[str]:
    first, last = text.split("..")
    is_padded = any(len(number) > 1 and number.startswith("0") for number in (first, last))
    width = max(len(first), len(last)) if is_padded else 1
    return [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]
