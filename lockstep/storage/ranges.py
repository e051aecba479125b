"""Ranges of objects: those near each other in one request, many requests at once, each of the version that was listed.

All that is read of data files in object stores is read by `fetch_ranges`.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from lockstep.errors import DataError, LockstepError, StoreRefusedError
from lockstep.storage.remote_path import (
    EXTRAS,
    MOST_CONNECTIONS,
    DataPath,
    ObjectStat,
    RemotePath,
    filesystem,
    forget_credentials,
    stat_of,
    store_error,
)
from lockstep.storage.retries import has_expired, with_retries

_LARGEST_REQUEST_BYTES = 1 << 22
_GAP_BYTES = 1 << 17
"""A request takes as long as so many bytes, roughly: what lies between two ranges is read with them."""
_REQUEST_SECONDS = 300.0
"""For a whole request; one without a byte fails much earlier."""
_FIRST_AHEAD_BYTES, _MOST_AHEAD_BYTES = 1 << 16, 1 << 24
_MORE_AHEAD = 4
Result = TypeVar("Result")
_free_in: dict[int, threading.Semaphore] = {}
"""What counts the free connections to stores whose file system blocks, by the process."""


class ObjectRange(NamedTuple):
    """A part of an object that is wanted; fewer bytes where it reaches beyond the end."""

    path: RemotePath
    version: ObjectStat
    """What the object was when it was listed."""
    offset: int
    size: int


class _Piece(NamedTuple):
    """What one request asks for."""

    path: RemotePath
    version: ObjectStat
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.path}, bytes {self.start} to {self.stop}"


class _FailedError(Exception):
    """Raised for a request that another try may mend; it names file and offset."""

    def __init__(self, piece: _Piece, error: BaseException) -> None:
        text = f"{error}" or ("no whole answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
        super().__init__(f"{piece}: {text}")
        self.piece, self.error = piece, error


def fetch_ranges(wanted: Sequence[ObjectRange]) -> list[bytes]:
    """Read ranges of objects, all at once, and return them in the order of `wanted`.

    Raises:
        DataError: an object is gone, or has changed since it was listed.
        StoreError: the store has not answered, however often it was asked.
        StoreRefusedError: it may not be read.
    """
    contents: dict[_Piece, bytes] = {}
    pieces = _pieces(wanted)
    for scheme, of_scheme in groupby((piece for each in pieces.values() for piece in each), lambda p: p.path.scheme):
        _read(scheme, [*of_scheme], contents)
    return [_joined(each, pieces[each.path, each.version], contents) for each in wanted]


class RemoteFile(io.RawIOBase):
    """An object that is read from start to end, or at rising offsets; the further it goes, the more it reads ahead.

    Raises:
        FileNotFoundError: there is none.
    """

    def __init__(self, path: RemotePath, read: Callable[[Sequence[ObjectRange]], list[bytes]] | None = None) -> None:
        self.path, self.version = path, path.stat()
        self._read_ranges = read or fetch_ranges
        self._place = 0
        self._window, self._window_start = b"", 0
        self._ahead_bytes = _FIRST_AHEAD_BYTES

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, fewer at the end; all that are left where `size` is negative."""
        data = self.read_at(self.version.st_size if size < 0 else size, self._place)
        self._place += len(data)
        return data

    def readable(self) -> bool:
        """Whether it may be read."""
        return True

    def seekable(self) -> bool:
        """Whether it may be read from anywhere."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte to be read."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Read on from another offset."""
        self._place = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place}.get(whence, self.version.st_size))
        return self._place

    def read_at(self, size: int, offset: int) -> bytes:
        """Read from an offset on, fewer bytes at the end."""
        size = max(0, min(size, self.version.st_size - offset))
        start = offset - self._window_start
        if not 0 <= start <= len(self._window) - size:
            self._move_window(size, offset)
            start = 0
        return self._window[start : start + size]

    def _move_window(self, size: int, offset: int) -> None:
        """Have the window begin at an offset; bytes that it has already are not read again."""
        end = self._window_start + len(self._window)
        kept = self._window[offset - self._window_start :] if self._window_start <= offset < end else b""
        goes_on = end > 0 and 0 <= offset + len(kept) - end <= max(self._ahead_bytes, _GAP_BYTES)
        more = self._ahead_bytes * _MORE_AHEAD if goes_on else _FIRST_AHEAD_BYTES
        self._ahead_bytes = min(_MOST_AHEAD_BYTES, more)
        wanted = max(size - len(kept), self._ahead_bytes)
        (data,) = self._read_ranges([ObjectRange(self.path, self.version, offset + len(kept), wanted)])
        self._window, self._window_start = kept + data, offset


def _pieces(wanted: Sequence[ObjectRange]) -> dict[tuple[RemotePath, ObjectStat], list[_Piece]]:
    """Plan the requests for each object: ranges that are near each other are merged, and large ones cut."""
    spans: dict[tuple[RemotePath, ObjectStat], list[tuple[int, int]]] = defaultdict(list)
    for path, version, offset, size in wanted:
        of_object = spans[path, version]
        if (stop := min(offset + size, version.st_size)) > offset:
            of_object.append((offset, stop))
    return {
        (path, version): [
            _Piece(path, version, start, min(start + _LARGEST_REQUEST_BYTES, stop))
            for first, stop in _merged(sorted(of_object))
            for start in range(first, stop, _LARGEST_REQUEST_BYTES)
        ]
        for (path, version), of_object in sorted(spans.items())
    }


def _merged(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    first = last = -1
    for start, stop in spans:
        if last >= 0 and start <= last + _GAP_BYTES:
            last = max(last, stop)
            continue
        if last >= 0:
            yield first, last
        first, last = start, stop
    if last >= 0:
        yield first, last


def _joined(wanted: ObjectRange, pieces: Sequence[_Piece], contents: dict[_Piece, bytes]) -> bytes:
    """Put a range together from the pieces that it lies in."""
    start, stop = wanted.offset, min(wanted.offset + wanted.size, wanted.version.st_size)
    parts = []
    place = max(0, bisect_right(pieces, start, key=lambda piece: piece.start) - 1)
    while start < stop:
        piece = pieces[place]
        parts.append(contents[piece][start - piece.start : stop - piece.start])
        start, place = piece.stop, place + 1
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _read(scheme: str, pieces: Sequence[_Piece], contents: dict[_Piece, bytes]) -> None:
    """Read pieces into `contents`; those that fail are asked for again, all at once."""

    def ask() -> None:
        left = [piece for piece in pieces if piece not in contents]
        failed = []
        for piece, answer in zip(left, _answers(filesystem(scheme), left), strict=True):
            if isinstance(answer, bytes):
                contents[piece] = answer
            else:
                failed.append((piece, answer))
        for piece, error in failed:
            _refuse(piece, error)
        if failed:
            raise _FailedError(*failed[0]) from failed[0][1]

    try:
        with_retries(ask, f"{scheme}://{pieces[0].path.parts[0]}")
    except _FailedError as failure:
        raise store_error(str(failure.piece), failure) from failure.error


def _refuse(piece: _Piece, error: BaseException) -> None:
    """Raise an error that another try does not mend."""
    if has_expired(error):
        forget_credentials()
        raise error
    if isinstance(error, LockstepError) or not isinstance(error, Exception):
        raise error
    if isinstance(error, FileNotFoundError):
        raise _changed(piece, "no such object") from error
    if _is_beyond_the_end(error):
        try:
            _check_version(piece, DataPath(str(piece.path)).stat())
        except FileNotFoundError:
            raise _changed(piece, "no such object") from error
    if isinstance(refused := store_error(str(piece), error), StoreRefusedError):
        raise refused from error


def _is_beyond_the_end(error: BaseException) -> bool:
    """Tell whether an object has no such bytes (416): most likely it is a shorter one by now."""
    code = getattr(error, "status", None) or getattr(error, "code", None) or getattr(error, "status_code", None)
    response = getattr(error, "response", None)
    name = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return code in (416, "416") or name == "InvalidRange" or getattr(error, "errno", None) == errno.EINVAL


def _answers(fs: Any, pieces: Sequence[_Piece]) -> Sequence[bytes | BaseException]:
    """Ask for all pieces once, many at a time."""
    if not fs.async_impl:
        return _answers_of_blocking(fs, pieces)
    from fsspec.asyn import sync

    answers: Sequence[bytes | BaseException] = sync(fs.loop, _gathered, fs, pieces)
    return answers


@lru_cache(4)
def _free_on(loop: asyncio.AbstractEventLoop, count: int) -> asyncio.Semaphore:
    """Return what counts the free connections of all reads on a loop, which a process has one of."""
    return asyncio.Semaphore(count)


async def _gathered(fs: Any, pieces: Sequence[_Piece]) -> Sequence[bytes | BaseException]:
    free = _free_on(asyncio.get_running_loop(), MOST_CONNECTIONS)
    read = _of_s3 if EXTRAS.get(pieces[0].path.scheme) == "s3" else _of_another

    async def answer(piece: _Piece) -> bytes:
        async with free:
            return await asyncio.wait_for(read(fs, piece), _REQUEST_SECONDS)

    return await asyncio.gather(*map(answer, pieces), return_exceptions=True)


async def _of_s3(fs: Any, piece: _Piece) -> bytes:
    """Read a piece from S3, whose answer tells the etag and the size of the object that it comes from."""
    bucket, key, _ = fs.split_path(piece.path.key)
    told = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={piece.start}-{piece.stop - 1}")
    async with told["Body"] as body:
        whole = told["ContentRange"].rpartition("/")[2] if "ContentRange" in told else told["ContentLength"]
        _check_version(piece, stat_of({"ETag": told["ETag"], "size": whole}))
        _check_size(piece, told["ContentLength"])  # before memory is taken
        data: bytes = await body.read()
    _check_size(piece, len(data))
    return data


async def _of_another(fs: Any, piece: _Piece) -> bytes:
    """Read a piece from a store whose answer does not tell the version, which is asked for at the same time."""
    key, start, stop = piece.path.key, piece.start, piece.stop
    data, found = await asyncio.gather(fs._cat_file(key, start=start, end=stop), fs._info(key))
    _check_version(piece, stat_of(found))
    _check_size(piece, len(data))
    return bytes(data)


def _answers_of_blocking(fs: Any, pieces: Sequence[_Piece]) -> Sequence[bytes | BaseException]:
    """Read pieces by a file system that blocks; then look, once an object, whether they are of its version."""
    free = _free_in.setdefault(os.getpid(), threading.Semaphore(MOST_CONNECTIONS))

    def tried(request: Callable[[], Result]) -> Result | Exception:
        try:
            with free:
                return request()
        except Exception as error:
            return error

    def read(piece: _Piece) -> bytes | Exception:
        return tried(lambda: fs.cat_file(piece.path.key, start=piece.start, end=piece.stop))

    def look(path: RemotePath) -> ObjectStat | Exception:
        # The hub's file system keeps what it has listed, and tells the version only with what it knows besides.
        return tried(lambda: stat_of(fs.info(path.key, refresh=True, expand_info=True)))

    def checked(piece: _Piece, data: bytes | Exception, found: ObjectStat | Exception) -> bytes | Exception:
        if isinstance(found, Exception):
            return found
        try:
            _check_version(piece, found)
            if not isinstance(data, Exception):
                _check_size(piece, len(data))
        except (DataError, OSError) as error:
            return error
        return data

    with ThreadPoolExecutor(min(MOST_CONNECTIONS, len(pieces))) as pool:
        contents = [*pool.map(read, pieces)]
        paths = [*dict.fromkeys(piece.path for piece in pieces)]
        found = dict(zip(paths, pool.map(look, paths), strict=True))
    return [checked(piece, data, found[piece.path]) for piece, data in zip(pieces, contents, strict=True)]


def _check_version(piece: _Piece, found: ObjectStat) -> None:
    if found != piece.version:
        same = "another version" if found.st_size == piece.version.st_size else f"{found.st_size} bytes"
        raise _changed(piece, f"{same} at bytes {piece.start} to {piece.stop}")


def _check_size(piece: _Piece, size: int) -> None:
    if size != piece.stop - piece.start:
        raise OSError(f"an answer of {size} bytes in place of {piece.stop - piece.start}")


def _changed(piece: _Piece, given: str) -> DataError:
    return DataError(
        f"{piece.path} has changed since it was listed.",
        given=given,
        expected=f"the object of {piece.version.st_size} bytes that was there",
        hint="start again, and leave the files alone while they are read",
    )
