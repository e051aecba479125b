"""The index of a TFRecord file: offsets and lengths of its records, and a checksum. Built once, and kept."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.records.index_cache import Cache, load_index, ranges_through, save_index
from lockstep.records.open_files import Version, open_file, read_at, reader_at, version_of
from lockstep.records.tfrecord import (
    FRAME_BYTES,
    HEAD_BYTES,
    LARGEST_RECORD_BYTES,
    TAIL_BYTES,
    Compression,
    RecordSource,
    checked_lengths,
    compression_of,
    read_all,
)
from lockstep.storage.remote_path import AnyPath, RemotePath

Int64s = npt.NDArray[np.int64]

MEMORY_LIMIT_BYTES = 1 << 32
"""Memory that compressed files may take together once they are decompressed."""

_BLOCK_BYTES = 1 << 18
_HEADS_AT_ONCE = 1 << 12
_WIDE_HEAD_BYTES = TAIL_BYTES + HEAD_BYTES
# From this length on it is faster to read the headers alone than all that lies between them.
_LONG_RECORD_BYTES = 1 << 13
# A smaller plain file is counted in about the time that its index is read in.
_WORTH_KEEPING_BYTES = 1 << 20

_KIND = b"LSINDEX2"
_ENDING_BYTES = 8
_LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct(f"<qq{_ENDING_BYTES}s")  # which compression, the checksum, the ending of the file
_COMPRESSIONS: tuple[Compression | None, ...] = (None, "gzip", "zlib")


class RecordIndex(NamedTuple):
    """Places of the payloads in a file."""

    offsets: Int64s
    """Offset of each payload from the start of the file, in bytes; of a compressed file, after decompression."""
    lengths: Int64s
    """Length of each payload, in bytes."""
    compression: Compression | None
    version: Version
    checksum: int
    """CRC-32C of the lengths and of the checksums that the records have; of a compressed file, in place of the latter,
    of the checksum that ends it."""
    ending: bytes
    """The last bytes of the file: they end in the checksum of the last payload, or of all that was compressed."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all records with their frames; after decompression."""
        return int(self.lengths.sum()) + FRAME_BYTES * len(self.lengths)


def index_of(path: AnyPath, limit_bytes: int, cache: Cache = None) -> RecordIndex:
    """Load the index of a file from the cache if it still holds; else build it, and keep it if that is worth it."""
    with open_file(path, ranges=ranges_through(cache)) as file:
        version = version_of(file)
        index = load_index(path, _KIND, version, partial(_decoded, version), cache)
        # Files packed alike have one size and, copied with their times, one time of change; but not one etag.
        is_same = index is not None and (isinstance(path, RemotePath) or index.ending == _ending(file, version))
    if index is not None and is_same:
        if index.compression and index.size_bytes > limit_bytes:
            raise too_large(str(path), f"{index.size_bytes} bytes", f"at most {limit_bytes} bytes")
        return index
    index = build_index(path, limit_bytes, cache)
    if index.compression or index.version.size_bytes >= _WORTH_KEEPING_BYTES:
        _keep(index, path, cache)
    return index


def build_index(path: AnyPath, limit_bytes: int = MEMORY_LIMIT_BYTES, cache: Cache = None) -> RecordIndex:
    """Find all records by reading their headers; of a compressed file all of it, unless it expands beyond the limit."""
    with open_file(path, ranges=ranges_through(cache)) as file:
        version = version_of(file)
        compression = compression_of(file.read(HEAD_BYTES), RecordSource(path))
        ending = _ending(file, version)
        if compression:
            lengths, checksums = _compressed_lengths(path, limit_bytes), ending
        else:
            lengths, checksums = _plain_lengths(file, path)
    checksum = google_crc32c.value(lengths.astype("<i8").tobytes() + checksums)
    return _index(lengths, compression, version, checksum, ending)


def too_large(files: str, size: str, expected: str) -> DataError:
    """Make the error for compressed files that would take too much memory."""
    return DataError(
        f"{files} cannot be decompressed into memory, which reading compressed records in any order needs.",
        given=f"{size} after decompression",
        expected=f"{expected} (memory_limit_bytes, for all compressed files)",
        hint="raise the limit, or write them uncompressed: write_records(new, (record for _, record in read_all(old)))",
    )


def _index(
    lengths: Int64s, compression: Compression | None, version: Version, checksum: int, ending: bytes
) -> RecordIndex:
    ends = np.cumsum(lengths + FRAME_BYTES)
    return RecordIndex(ends - TAIL_BYTES - lengths, lengths, compression, version, checksum, ending)


def _ending(file: BinaryIO, version: Version) -> bytes:
    return read_at(file, _ENDING_BYTES, max(0, version.size_bytes - _ENDING_BYTES))


def _plain_lengths(file: BinaryIO, path: AnyPath) -> tuple[Int64s, bytes]:
    """Return the lengths of the payloads, and their checksums one after the other."""
    source, size = RecordSource(path), version_of(file).size_bytes
    lengths, checksums = [np.empty(0, np.int64)], bytearray()
    start, count = 0, 0  # of the next frame, in the file; of the records before it
    for heads in _heads(file, size):
        # Each with the checksum that ends the frame before it; of the first frame nothing.
        rows = np.frombuffer(heads, np.uint8).reshape(-1, _WIDE_HEAD_BYTES)
        checksums += rows[:, :TAIL_BYTES].tobytes()[0 if start else TAIL_BYTES :]
        found = checked_lengths(rows[:, TAIL_BYTES:], source, count, start)
        before = start + int(found[:-1].sum()) + FRAME_BYTES * (len(found) - 1)
        start, count = before + FRAME_BYTES + int(found[-1]), count + len(found)
        if start > size:
            raise source.cut_short(count - 1, before, start - before, size - before)
        lengths.append(found.astype(np.int64))
    if start < size:
        raise source.cut_short(count, start, FRAME_BYTES, size - start)
    checksums += read_at(file, TAIL_BYTES, max(0, size - TAIL_BYTES))
    return np.concatenate(lengths), bytes(checksums)


def _heads(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the heads of all frames, many at a time, each after the 4 bytes before it (zeros before the first).

    Lengths are not verified: after a wrong one heads are read from anywhere in the file.
    """
    read = reader_at(file)
    block, heads, start = bytes(TAIL_BYTES) + read(_BLOCK_BYTES, 0), [], 0  # the block begins at start - 4
    while len(block) >= _WIDE_HEAD_BYTES:
        offset, last = 0, len(block) - _WIDE_HEAD_BYTES
        while offset <= last:
            heads.append(block[offset : offset + _WIDE_HEAD_BYTES])
            (length,) = _LENGTH.unpack_from(block, offset + TAIL_BYTES)
            offset += FRAME_BYTES + length
        start += offset
        # Long records follow long ones: their heads are read by themselves, and with nothing else to do for each.
        while length > _LONG_RECORD_BYTES and start < size and len(heads) < _HEADS_AT_ONCE:
            block = read(_WIDE_HEAD_BYTES, start - TAIL_BYTES)
            if len(block) < _WIDE_HEAD_BYTES:
                break
            heads.append(block)
            (length,) = _LENGTH.unpack_from(block, TAIL_BYTES)
            start += FRAME_BYTES + length
        if start >= size:
            break
        if len(heads) >= _HEADS_AT_ONCE:
            yield b"".join(heads)
            heads = []
        block = read(TAIL_BYTES + _BLOCK_BYTES, start - TAIL_BYTES)
    if heads:
        yield b"".join(heads)


def _compressed_lengths(path: AnyPath, limit_bytes: int) -> Int64s:
    lengths = array("q")
    for end, payload in read_all(path, verify=False, largest_record_bytes=min(limit_bytes, LARGEST_RECORD_BYTES)):
        if end > limit_bytes:
            raise too_large(str(path), f"more than {limit_bytes} bytes", f"at most {limit_bytes} bytes")
        lengths.append(len(payload))
    return np.array(lengths, dtype=np.int64)


def _keep(index: RecordIndex, path: AnyPath, cache: Cache) -> None:
    head = _HEAD.pack(_COMPRESSIONS.index(index.compression), index.checksum, index.ending)
    save_index(path, _KIND, index.version, head + index.lengths.astype("<i8").tobytes(), cache)


def _decoded(version: Version, content: bytes) -> RecordIndex | None:
    """Decode an index; None if it does not match the size of the file."""
    if len(content) < _HEAD.size:
        return None
    compression, checksum, ending = _HEAD.unpack_from(content)
    lengths = np.frombuffer(content[_HEAD.size :], dtype="<i8").astype(np.int64)
    index = _index(lengths, _COMPRESSIONS[compression], version, checksum, ending)
    return index if index.compression or index.size_bytes == version.size_bytes else None
