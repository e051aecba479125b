"""Files that are read at any offset, few of them open at a time, and never after they have changed.

Those of this machine are read one by one, as they are wanted; those in an object store many at once, before.
"""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from lockstep.errors import DataError
from lockstep.storage.cached_ranges import CachedRanges
from lockstep.storage.ranges import ObjectRange, RemoteFile, fetch_ranges
from lockstep.storage.remote_path import AnyPath, ObjectStat, RemotePath

_MOST_OPEN = 128
_MOST_FETCHED = 512
_MOST_AT_ONCE = 1 << 30
"""Linux reads at most 2 GiB in one call; macOS refuses to read more."""


class Version(NamedTuple):
    """The state of a file's content, as far as the file system tells: its index holds for one version."""

    size_bytes: int
    mtime_ns: int
    """The time of its last change; the number of its etag, if it is an object of a store."""


class FilePart(NamedTuple):
    """A part of a file, of one version of it."""

    path: AnyPath
    version: Version
    size: int
    offset: int


class OpenFiles:
    """Opens a file when it is first read, and closes the least recently used one when too many are open in a process.

    Several threads may read, and processes forked from this one share what is open. Pickled, it has none open. `ranges`
    reads those of a store; by default nothing of them is kept.
    """

    def __init__(self, most: int = _MOST_OPEN, ranges: CachedRanges | None = None) -> None:
        self._most = most
        self.ranges = ranges or CachedRanges(None)
        self._open = lru_cache(most)(_OpenFile)

    def read(self, path: AnyPath, version: Version, size: int, offset: int) -> bytes:
        """Read a file from an offset on, fewer bytes at its end; refused if the file is of another version."""
        if isinstance(path, RemotePath):
            return read_stored(self.ranges, [FilePart(path, version, size, offset)])[0]
        opened = self._open(path, version)  # as long as it is held here, no other thread's reading closes it
        data = read_at(opened.file, size, offset)
        check_unchanged(opened.file, path, version)  # each time, and last: it may be written in place
        return data

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[int, CachedRanges]]:
        return OpenFiles, (self._most, self.ranges)


class _OpenFile:
    """A file that was opened for one version of it, closed when nobody holds it."""

    def __init__(self, path: Path, _: Version) -> None:
        self.file = open_file(path)
        weakref.finalize(self, self.file.close)


def content_of(path: AnyPath, most_bytes: int | None = None) -> bytes:
    """Read a whole file, or its beginning; a pipe that nobody writes to is not waited for.

    Raises:
        OSError: the system has no such file; of a store it is FileNotFoundError.
    """
    if isinstance(path, RemotePath):
        there = path.stat()
        size_bytes = there.st_size if most_bytes is None else most_bytes
        (content,) = fetch_ranges([ObjectRange(path, there, 0, size_bytes)])
        return content
    with open(path, "rb", opener=_opened_at_once) as file:
        is_pipe = stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
        if is_pipe:
            os.set_blocking(file.fileno(), True)  # whoever writes to it may not have begun
        content = file.read(-1 if most_bytes is None else most_bytes)
        if is_pipe and not content:
            raise OSError(f"{path} is a pipe that nobody writes to")
        return content


def _opened_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def fetched(paths: Sequence[AnyPath]) -> Iterator[bytes | None]:
    """Yield the contents of files in an object store; None for those of this machine, which are read when wanted."""
    for first in range(0, len(paths), _MOST_FETCHED):
        some = paths[first : first + _MOST_FETCHED]
        stats = {path: path.stat() for path in some if isinstance(path, RemotePath)}
        contents = iter(fetch_ranges([ObjectRange(path, stat, 0, stat.st_size) for path, stat in stats.items()]))
        yield from (next(contents) if isinstance(path, RemotePath) else None for path in some)


def read_stored(ranges: CachedRanges, places: Sequence[FilePart]) -> list[bytes]:
    """Read parts of objects of a store, all at once; fewer bytes at their ends."""
    return ranges.read([stored_range(place) for place in places])


def stored_range(place: FilePart) -> ObjectRange:
    """Return the range of an object that a place in a store is."""
    return ObjectRange(cast("RemotePath", place.path), ObjectStat(*place.version), place.offset, place.size)


def open_file(path: AnyPath, buffering: int = 0, ranges: CachedRanges | None = None) -> BinaryIO:
    """Open a file for reading, as bytes; a DataError if the system refuses. `ranges` reads one of a store."""
    try:
        if isinstance(path, RemotePath):
            return cast("BinaryIO", RemoteFile(path, ranges.read if ranges else None))
        return path.open("rb", buffering=buffering)
    except OSError as error:
        raise DataError(
            f"{path} cannot be opened.",
            given=str(error),
            expected="a file of records that may be read",
            hint="check the path, and who may read it",
        ) from error


def version_of(file: BinaryIO) -> Version:
    """Return the version of an open file now; of an object, that which is read."""
    if isinstance(file, RemoteFile):
        return Version(*file.version)
    status = os.fstat(file.fileno())
    return Version(status.st_size, status.st_mtime_ns)


def check_unchanged(file: BinaryIO, path: AnyPath, version: Version) -> None:
    """Refuse a file that has changed since its index was made, by its size or its time of change."""
    if (now := version_of(file)) != version:
        raise DataError(
            f"{path} has changed since its index was made.",
            given=f"{now.size_bytes} bytes, changed at {now.mtime_ns} ns",
            expected=f"{version.size_bytes} bytes, changed at {version.mtime_ns} ns",
            hint="start again, and leave the files alone while they are read",
        )


def read_at(file: BinaryIO, size: int, offset: int) -> bytes:
    """Read an unbuffered file from an offset on, fewer bytes at its end; several threads may do so at once.

    Of an object only one thread may.
    """
    if isinstance(file, RemoteFile):
        return file.read_at(size, offset)
    data = os.pread(file.fileno(), min(size, _MOST_AT_ONCE), offset)
    while 0 < len(data) < size:
        if not (more := os.pread(file.fileno(), min(size - len(data), _MOST_AT_ONCE), offset + len(data))):
            break
        data += more
    return data


def reader_at(file: BinaryIO) -> Callable[[int, int], bytes]:
    """Return what reads so many bytes from an offset on, few enough for one call, of an unbuffered file."""
    if isinstance(file, RemoteFile):
        return partial(read_at, file)
    return partial(os.pread, file.fileno())
