"""The files that a pattern stands for, with none of them missing."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from lockstep.errors import DataError

# TensorFlow's names of shards, such as train-00003-of-00128 or data-00000-of-00001.gz
_SHARD = re.compile(r"(.*?(?<!\d))(\d{1,7})-of-(\d{1,7})(?!\d)(.*)", re.DOTALL)
_REMOTE = re.compile(r"([a-z][a-z0-9+.-]+):/", re.IGNORECASE)
_MOUNTS = {
    "s3": "mount the bucket (mount-s3 BUCKET FOLDER), or copy it (aws s3 sync),",
    "gs": "mount the bucket (gcsfuse BUCKET FOLDER), or copy it (gcloud storage rsync),",
}
_MOST_NAMED = 5


def find_shards(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files of a path, of a pattern, or of several of these, in turn.

    A pattern is one of the shell: * for any characters, ? for one, [a-z] for one of these. Its files come sorted by
    name; hidden ones are none of them. Where files are named like "train-00003-of-00128", all that the pattern names
    must be there: "train-*" stands for all 128, "train-0000?-of-00128" for the first ten. A path that exists is a file,
    whatever characters it has.

    Raises:
        DataError: there is no such file; shards are missing, or there are two sets of them; or a path is not on this
            machine.
    """
    if isinstance(paths, str | Path):
        return _matching(str(paths))
    return [file for path in paths for file in _matching(str(path))]


def check_local(path: str | Path) -> None:
    """Refuse the address of a file that is not on this machine, such as s3://bucket/file.

    Raises:
        DataError: saying what to mount.
    """
    if remote := _REMOTE.match(str(path)):
        scheme = remote[1].lower()
        raise DataError(
            f"{path} is not on this machine.",
            given=f"an address that begins with {scheme}:",
            expected="a path in the file system",
            mend=f"{_MOUNTS.get(scheme, 'mount it, or copy it,')} and give the path of the folder",
        )


def _matching(pattern: str) -> list[Path]:
    check_local(pattern)
    path = Path(pattern)
    if path.is_dir():
        raise DataError(
            f"{path} is a folder.",
            given=_held(path),
            expected="a file, or a pattern of files",
            mend=f"name its files, such as {path}/train-*",
        )
    if path.exists() or not glob.has_magic(pattern):
        return [path]
    found = glob.glob(pattern, recursive=True)  # noqa: PTH207 (that of pathlib takes hidden files too)
    files = [path for path in map(Path, sorted(found)) if path.is_file()]
    if not files:
        raise DataError(
            f"No file is named like {pattern}",
            given=_held(path.parent),
            expected="one file or more",
            mend="check the pattern",
        )
    _check_complete(files, path.name)
    return files


def _held(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}"
    return f"a folder that holds {_listed(sorted(path.name for path in folder.iterdir())) or 'nothing'}"


def _listed(names: Iterable[str]) -> str:
    first = list(islice(names, _MOST_NAMED + 1))
    return ", ".join(first[:_MOST_NAMED]) + (" and more" if len(first) > _MOST_NAMED else "")


def _check_complete(files: Sequence[Path], pattern: str) -> None:
    """Refuse shards some of which are missing, and two sets of them in one place."""
    counts: dict[tuple[Path, str, str], str] = {}
    found: dict[tuple[Path, str, str], dict[int, str]] = {}
    for path in files:
        if shard := _SHARD.fullmatch(path.name):
            before, number, count, after = shard.groups()
            key = path.parent, before, after
            if counts.setdefault(key, count) != count:
                raise _two_sets(path, counts[key], count)
            found.setdefault(key, {})[int(number)] = number
    for key, count in counts.items():
        (folder, before, after), numbers = key, found[key]
        width = min(map(len, numbers.values()))
        names = (
            f"{before}{number:0{width}}-of-{count}{after}" for number in range(int(count)) if number not in numbers
        )
        if missing := _listed(name for name in names if fnmatchcase(name, pattern)):
            raise DataError(
                f"Shards are missing in {folder}: {missing}",
                given=f"{len(numbers)} files that are named -of-{count}",
                expected=f"all {int(count)} of them, or those that {pattern} stands for",
                mend="copy the missing ones, or name fewer by the pattern, such as train-0000?-of-00128",
            )


def _two_sets(path: Path, one: str, other: str) -> DataError:
    return DataError(
        f"There are two sets of shards in {path.parent}.",
        given=f"files that are named -of-{one}, and {path.name}",
        expected="one set: the other may hold the same examples",
        mend=f"name one by the pattern, such as *-of-{other}*",
    )
