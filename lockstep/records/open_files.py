"""Files that are read in any order, few of them open at a time."""

from __future__ import annotations

import weakref
from functools import lru_cache
from pathlib import Path

from lockstep.records.kept_index import Version, check_version
from lockstep.records.record_streams import opened, read_at

_MOST_OPEN = 128


class OpenFiles:
    """Opens a file when it is first read, and closes the one that was not read for longest.

    Several threads may read, and processes forked from this one share what is open. Pickled, it has none open.

    Args:
        most: files that are open at a time, for each process.
    """

    def __init__(self, most: int = _MOST_OPEN) -> None:
        self._most = most
        self._open = lru_cache(most)(_OpenFile)

    def read(self, path: Path, version: Version, size: int, offset: int) -> bytes:
        """Bytes of a file from an offset on, fewer at its end.

        Raises:
            DataError: it cannot be opened, or is not what it was, by its size and its time of change.
        """
        file = self._open(path, version)  # as long as it is read here, no other thread's reading closes it
        return file.read(size, offset)

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[int]]:
        return OpenFiles, (self._most,)


class _OpenFile:
    """An open file, closed when nobody holds it."""

    def __init__(self, path: Path, version: Version) -> None:
        self._file = opened(path)
        weakref.finalize(self, self._file.close)
        self._path, self._version = path, version

    def read(self, size: int, offset: int) -> bytes:
        data = read_at(self._file, size, offset)
        check_version(self._file, self._path, self._version)  # each time, and last: it may be written in place
        return data
