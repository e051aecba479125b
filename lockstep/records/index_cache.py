"""The cache: what can be made again from data files, kept so that it is made once, and never beside the data.

It is the folder that a reader's `cache` names, by default the user's: $XDG_CACHE_HOME/lockstep, or ~/.cache/lockstep.
The index of a file of records or of a tar archive is `record-index/KEY` in it, the key made of the file's whole path.
It holds for one size and one time of change of the file, to the nanosecond. Several processes may write it at once:
each writes a file of its own and renames it. Nothing is ever deleted, and all of it may be.

8 bytes     the kind of index
16 bytes    size and time of change of the file, little-endian
...         the content
4 bytes     CRC-32C of all before
"""

from __future__ import annotations

import hashlib
import os
import struct
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import google_crc32c

from lockstep.records.open_files import Version
from lockstep.records.shards import check_local
from lockstep.screen import log

Index = TypeVar("Index")
Cache = str | Path | None
"""The folder of the cache; None: the user's."""

_HEAD = struct.Struct("<8sqq")
_CRC = struct.Struct("<I")

_told: dict[Path | None, OSError] = {}
"""The caches that could not be written: a process logs each of them once."""


def cache_folder(cache: Cache = None) -> Path | None:
    """Return the folder of the cache; None where none is given and the user has no home."""
    if cache is not None:
        check_local(cache)
        return Path(cache)
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    with suppress(RuntimeError):  # a user without a home
        # A relative path is invalid, by the specification of base directories.
        return (given if given.is_absolute() else Path.home() / ".cache") / "lockstep"
    return None


def load_index(
    path: Path, kind: bytes, version: Version, decode: Callable[[bytes], Index | None], cache: Cache = None
) -> Index | None:
    """Load the index of a file; None where none is kept for this version of it.

    `kind` is 8 bytes. `decode` makes the index from its content, or returns None for content that is no index.
    """
    if (folder := cache_folder(cache)) is None:
        return None
    place = _place(folder, path)
    try:
        data = place.read_bytes()
    except OSError:
        return None
    end = len(data) - _CRC.size
    if end >= _HEAD.size and google_crc32c.value(data[:end]) == _CRC.unpack_from(data, end)[0]:
        if _HEAD.unpack_from(data) != (kind, *version):
            return None
        if (index := decode(data[_HEAD.size : end])) is not None:
            return index
    log.warning("%s is damaged: the index of %s is made again", place, path)
    return None


def save_index(path: Path, kind: bytes, version: Version, content: bytes, cache: Cache = None) -> None:
    """Save an index, without waiting for the disk: damage is noticed on loading. Say so if it cannot be written."""
    folder = cache_folder(cache)
    data = _HEAD.pack(kind, *version) + content
    try:
        if folder is None:
            raise OSError("the user has no home")
        _write(_place(folder, path), data + _CRC.pack(google_crc32c.value(data)))
    except OSError as error:
        if _told.setdefault(folder, error) is error:
            log.warning(
                "Indices of data files cannot be kept, and are made again at each start: %s. "
                "Name a folder that may be written: data.cache of a recipe, cache= of a reader, or XDG_CACHE_HOME",
                error,
            )


def _write(place: Path, data: bytes) -> None:
    temporary = place.with_name(f".{place.name}.{uuid.uuid4().hex}.partial")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(place)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _place(folder: Path, path: Path) -> Path:
    return folder / "record-index" / hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]
