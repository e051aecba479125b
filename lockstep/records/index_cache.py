"""The cache: what can be made again from data files, kept so that it is made once, and never beside the data.

It is the folder that a reader's `cache` names, by default the user's: $XDG_CACHE_HOME/lockstep, or ~/.cache/lockstep.
What is read of objects in a store again and again is in `remote-blocks`, see `lockstep.storage.block_cache`.
Whole files of an object store are copied into `copies/KEY`, the key made of their addresses and etags.
The index of a file of records or of a tar archive is `record-index/KEY` in it, the key made of the file's whole path.
It holds for one size and one time of change of the file, to the nanosecond, or one etag. Several processes may write it
at once: each writes a file of its own and renames it. Nothing is ever deleted, and all of it may be.

8 bytes     the kind of index
16 bytes    size and time of change of the file, little-endian
...         the content
4 bytes     CRC-32C of all before
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import google_crc32c

from lockstep.errors import DataError
from lockstep.listing import shorten
from lockstep.records.open_files import Version
from lockstep.records.shards import check_local
from lockstep.screen import log
from lockstep.storage.cached_ranges import CachedRanges
from lockstep.storage.ranges import ObjectRange, fetch_ranges
from lockstep.storage.remote_path import AnyPath, ObjectStat, RemotePath

Index = TypeVar("Index")


class LimitedCache(NamedTuple):
    """A cache of which it is said how much of objects in a store it keeps."""

    folder: str | Path | None
    """None: the user's."""
    gb: float | None
    """Its size in 10**9 bytes; 0: nothing; None: 20, and at most half of what is free."""


Cache = str | Path | LimitedCache | None
"""The folder of the cache, or what is said of it; None: the user's."""

_HEAD = struct.Struct("<8sqq")
_COPIED_BYTES = 1 << 26
_CRC = struct.Struct("<I")

_told: dict[Path | None, OSError] = {}
"""The caches that could not be written: a process logs each of them once."""


def cache_folder(cache: Cache = None) -> Path | None:
    """Return the folder of the cache; None where none is given and the user has no home."""
    if isinstance(cache, LimitedCache):
        cache = cache.folder
    if cache is not None:
        check_local(cache)
        return Path(cache)
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    with suppress(RuntimeError):  # a user without a home
        # A relative path is invalid, by the specification of base directories.
        return (given if given.is_absolute() else Path.home() / ".cache") / "lockstep"
    return None


def ranges_through(cache: Cache = None) -> CachedRanges:
    """Return what reads objects of a store through the blocks of a cache."""
    return CachedRanges(cache_folder(cache), cache.gb if isinstance(cache, LimitedCache) else None)


def local_copy(path: AnyPath, cache: Cache = None) -> Path:
    """Return a file of this machine with the content of a file: of an object a copy in the cache, made once an etag.

    Raises:
        DataError: there is no room for it, or no cache.
        FileNotFoundError: there is no such object.
    """
    return local_copies([path], cache)[0] if isinstance(path, RemotePath) else path


def local_copies(paths: Sequence[RemotePath], cache: Cache = None) -> list[Path]:
    """Copy objects that belong together into one folder of the cache, under their names, as `local_copy` does."""
    if (kept := cache_folder(cache)) is None:  # not among the temporary files, where anybody could put another one
        raise DataError(
            f"{paths[0]} cannot be copied: there is no cache.",
            given="a user without a home",
            expected="a folder for what is copied of an object store",
            hint="set XDG_CACHE_HOME to a folder of this user's, or name one: data.cache of a recipe",
        )
    stats = [path.stat() for path in paths]
    told = "\n".join(f"{path} {stat}" for path, stat in zip(paths, stats, strict=True))
    folder = kept / "copies" / hashlib.sha256(told.encode()).hexdigest()[:32]
    copies = [folder / path.name for path in paths]
    is_there = folder.is_dir()
    if not all(_has_size(copy, stat.st_size) for copy, stat in zip(copies, stats, strict=True)):
        if is_there:
            shutil.rmtree(folder, ignore_errors=True)  # what a power cut has left
        num_bytes = sum(stat.st_size for stat in stats)
        log.info(
            "Copying %s into %s, once: %.1f MB", shorten([str(path) for path in paths], 1), folder, num_bytes / 1e6
        )
        partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
        try:
            partial.mkdir(parents=True)
            for path, stat in zip(paths, stats, strict=True):
                _download(path, stat, partial / path.name)
            with suppress(OSError):  # another process was faster
                partial.rename(folder)
        except OSError as error:
            raise DataError(
                f"{shorten([str(path) for path in paths], 1)} cannot be copied into the cache.",
                given=str(error),
                expected=f"{num_bytes} bytes free in {folder.parent}",
                hint="make room, or name another folder: data.cache of a recipe, or XDG_CACHE_HOME",
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return copies


def _has_size(file: Path, size: int) -> bool:
    try:
        return file.stat().st_size == size
    except OSError:
        return False


def _download(path: RemotePath, stat: ObjectStat, file: Path) -> None:
    with file.open("wb") as written:
        for start in range(0, stat.st_size, _COPIED_BYTES):
            written.writelines(fetch_ranges([ObjectRange(path, stat, start, _COPIED_BYTES)]))
        written.flush()
        os.fsync(written.fileno())  # before the folder gets its name


def load_index(
    path: AnyPath, kind: bytes, version: Version, decode: Callable[[bytes], Index | None], cache: Cache = None
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


def save_index(path: AnyPath, kind: bytes, version: Version, content: bytes, cache: Cache = None) -> None:
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


def _place(folder: Path, path: AnyPath) -> Path:
    return folder / "record-index" / hashlib.sha256(os.fsencode(str(path.absolute()))).hexdigest()[:32]
