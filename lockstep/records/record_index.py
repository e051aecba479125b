"""Where the records of a file lie: counted once, and kept for the next time.

The index of `folder/name` is kept as `folder/.lockstep-index/name`; where that folder cannot be written, in the user's
cache ($XDG_CACHE_HOME/lockstep/record-index, by default in ~/.cache). It holds for one size and one time of change
of the file, to the nanosecond. Several processes may write it at once: each writes a file of its own and renames it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import struct
import uuid
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.records.compressed import compression_of
from lockstep.records.framing import FRAME_BYTES, HEAD_BYTES, TAIL_BYTES, Compression, Source, payload_length
from lockstep.records.record_streams import LARGEST_RECORD_BYTES, opened, read_all, read_at

Int64s = npt.NDArray[np.int64]

MEMORY_LIMIT_BYTES = 1 << 32
"""What compressed files may take together once they are decompressed."""

_BLOCK_BYTES = 1 << 18
# From this length on it is faster to read the headers alone than all that lies between them.
_LONG_RECORD_BYTES = 1 << 13
# A smaller plain file is counted in about the time that its index is read in.
_WORTH_KEEPING_BYTES = 1 << 20

_MAGIC = b"LSINDEX1"
_KEPT = struct.Struct("<8sqqq")
_CRC = struct.Struct("<I")
_COMPRESSIONS: tuple[Compression | None, ...] = (None, "gzip", "zlib")

_ANYBODY_WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH

_logger = logging.getLogger("lockstep")


class Version(NamedTuple):
    """What a file was when its records were counted."""

    size_bytes: int
    mtime_ns: int


class RecordIndex(NamedTuple):
    """Where the payloads of a file lie."""

    offsets: Int64s
    """Of each payload from the start of the file, in bytes; of a compressed file, after decompression."""
    lengths: Int64s
    """Of each payload, in bytes."""
    compression: Compression | None
    version: Version

    @property
    def size_bytes(self) -> int:
        """All records with their frames; after decompression."""
        return int(self.lengths.sum()) + FRAME_BYTES * len(self.lengths)


def index_of(path: Path, limit_bytes: int) -> RecordIndex:
    """The index of a file: the one that was kept if it still holds, else built, and kept if that is worth it.

    Raises:
        DataError: as `build_index`.
    """
    with opened(path) as file:
        version = _version(file)
    found = (_kept(place, version) for place in _places(path))
    if index := next(filter(None, found), None):
        if index.compression and index.size_bytes > limit_bytes:
            raise too_large(str(path), f"{index.size_bytes} bytes", f"at most {limit_bytes} bytes")
        return index
    index = build_index(path, limit_bytes)
    if index.compression or index.version.size_bytes >= _WORTH_KEEPING_BYTES:
        _keep(index, path)
    return index


def build_index(path: Path, limit_bytes: int = MEMORY_LIMIT_BYTES) -> RecordIndex:
    """Find all records: from their headers alone, but in a compressed file by reading all of it.

    Args:
        path: of the file.
        limit_bytes: refuse a compressed file that expands to more; it is read no further.

    Raises:
        DataError: the file cannot be opened, is cut short, holds something else than records, or expands to more.
    """
    with opened(path) as file:
        version = _version(file)
        compression = compression_of(file.read(HEAD_BYTES), Source(path))
        lengths = _compressed_lengths(path, limit_bytes) if compression else _plain_lengths(file, path)
    return _index(np.array(lengths, dtype=np.int64), compression, version)


def check_version(file: BinaryIO, path: Path, version: Version) -> None:
    """Refuse a file that is not what it was when its records were counted.

    Raises:
        DataError: it has another size, or was changed at another time.
    """
    if (now := _version(file)) != version:
        raise DataError(
            f"{path} has changed since its records were counted.",
            given=f"{now.size_bytes} bytes, changed at {now.mtime_ns} ns",
            expected=f"{version.size_bytes} bytes, changed at {version.mtime_ns} ns",
            mend="start again, and leave the files alone while they are read",
        )


def too_large(files: str, size: str, expected: str) -> DataError:
    """The error for compressed files that would take too much memory."""
    return DataError(
        f"{files} cannot be decompressed into memory, which reading compressed records in any order needs.",
        given=f"{size} after decompression",
        expected=f"{expected} (memory_limit_bytes, for all compressed files)",
        mend="raise the limit, or write them uncompressed: write_records(new, (record for _, record in read_all(old)))",
    )


def _version(file: BinaryIO) -> Version:
    status = os.fstat(file.fileno())
    return Version(status.st_size, status.st_mtime_ns)


def _index(lengths: Int64s, compression: Compression | None, version: Version) -> RecordIndex:
    ends = np.cumsum(lengths + FRAME_BYTES)
    return RecordIndex(ends - TAIL_BYTES - lengths, lengths, compression, version)


def _plain_lengths(file: BinaryIO, path: Path) -> array[int]:
    source, size = Source(path), os.fstat(file.fileno()).st_size
    lengths = array("q")
    start, block_bytes = 0, _BLOCK_BYTES
    while (left := size - start) > 0:
        block = read_at(file, block_bytes, start)
        place, last = 0, max(0, len(block) - HEAD_BYTES)
        while place <= last:
            length = payload_length(block[place : place + HEAD_BYTES], source, len(lengths), start + place)
            if FRAME_BYTES + length > left - place:
                raise source.cut_short(len(lengths), start + place, FRAME_BYTES + length, left - place)
            lengths.append(length)
            place += FRAME_BYTES + length
        start += place
        block_bytes = HEAD_BYTES if length > _LONG_RECORD_BYTES else _BLOCK_BYTES
    return lengths


def _compressed_lengths(path: Path, limit_bytes: int) -> array[int]:
    lengths = array("q")
    for end, payload in read_all(path, verify=False, largest_record_bytes=min(limit_bytes, LARGEST_RECORD_BYTES)):
        if end > limit_bytes:
            raise too_large(str(path), f"more than {limit_bytes} bytes", f"at most {limit_bytes} bytes")
        lengths.append(len(payload))
    return lengths


def _places(path: Path) -> Iterator[Path]:
    """Where the index of a file may be kept, the best place first."""
    whole = path.absolute()
    yield whole.parent / ".lockstep-index" / path.name
    with suppress(RuntimeError):  # a user without a home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        yield cache / "lockstep" / "record-index" / hashlib.sha256(os.fsencode(whole)).hexdigest()[:32]


def _kept(place: Path, version: Version) -> RecordIndex | None:
    """The index that is kept there, if it is one of the file as it is now."""
    try:
        data = place.read_bytes()
    except OSError:
        return None
    end = len(data) - _CRC.size
    if end >= _KEPT.size and google_crc32c.value(data[:end]) == _CRC.unpack_from(data, end)[0]:
        magic, *kept_version, compression = _KEPT.unpack_from(data)
        if (magic, *kept_version) != (_MAGIC, *version):
            return None
        lengths = np.frombuffer(data[_KEPT.size : end], dtype="<i8").astype(np.int64)
        index = _index(lengths, _COMPRESSIONS[compression], version)
        if index.compression or index.size_bytes == version.size_bytes:
            return index
    _logger.warning("%s is damaged: the records are counted again", place)
    return None


def _keep(index: RecordIndex, path: Path) -> None:
    """Write the index where it can be written, without waiting for the disk: damage is seen when it is read."""
    head = _KEPT.pack(_MAGIC, *index.version, _COMPRESSIONS.index(index.compression))
    data = head + index.lengths.astype("<i8").tobytes()
    data += _CRC.pack(google_crc32c.value(data))
    for place in _places(path):
        with suppress(OSError):
            _make_folder(place.parent)
            temporary = place.with_name(f".{place.name}.{uuid.uuid4().hex}.partial")
            temporary.write_bytes(data)
            temporary.replace(place)
            return


def _make_folder(folder: Path) -> None:
    """Have the folder; a parent that says of itself that it is not to be written is not, even if root could."""
    if folder.parent.is_dir() and not folder.parent.stat().st_mode & _ANYBODY_WRITES:
        raise PermissionError(folder)
    folder.mkdir(parents=True, exist_ok=True)
