"""TFRecord files, as TensorFlow writes them: one record after the other, each framed by its length and two checksums.

8 bytes         length of the payload, little-endian
4 bytes         masked CRC-32C of these 8 bytes
length bytes    the payload
4 bytes         masked CRC-32C of the payload
"""

from __future__ import annotations

import os
import struct
import weakref
from array import array
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import numpy as np
import numpy.typing as npt

from lockstep.data.atomic import replacing
from lockstep.errors import DataError

Int64s = npt.NDArray[np.int64]

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<QI")
HEAD_BYTES, TAIL_BYTES = _HEAD.size, _CRC.size


def masked_crc32c(data: bytes) -> int:
    """The checksum of the format: CRC-32C rotated by 15 bits plus a constant."""
    crc: int = google_crc32c.value(data)
    return (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """A payload as a record."""
    length = _LENGTH.pack(len(payload))
    return length + _CRC.pack(masked_crc32c(length)) + payload + _CRC.pack(masked_crc32c(payload))


def write_records(path: Path, payloads: Iterable[bytes]) -> int:
    """Write a file of records, whole or not at all, and return their number.

    Raises:
        DataError: the system refuses to write it.
    """
    count = 0
    with replacing(path) as file:
        for payload in payloads:
            file.write(frame(payload))
            count += 1
    return count


def build_index(path: Path) -> tuple[Int64s, Int64s]:
    """Offset and length in bytes of every payload, from the headers alone.

    Raises:
        DataError: the file cannot be opened, is cut short, or holds something else than records.
    """
    offsets, lengths = array("q"), array("q")
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = 0
        while start < size:
            length = _payload_length(_read_at(file, HEAD_BYTES, start), path, len(offsets), start, size)
            offsets.append(start + HEAD_BYTES)
            lengths.append(length)
            start += HEAD_BYTES + length + TAIL_BYTES
    return np.array(offsets, dtype=np.int64), np.array(lengths, dtype=np.int64)


def read_all(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (offset of its end in the file, payload) of every record in turn.

    Raises:
        DataError: the file cannot be opened; or, after all that is whole before it, a record that is cut short or
            damaged.
    """
    with _opened(path, buffering=-1) as file:
        size = os.fstat(file.fileno()).st_size
        start = record = 0
        while start < size:
            length = _payload_length(file.read(HEAD_BYTES), path, record, start, size)
            payload = _verified(file.read(length + TAIL_BYTES), path, record, start)
            start += HEAD_BYTES + length + TAIL_BYTES
            record += 1
            yield start, payload


class RecordFile:
    """The records of one file, in any order. It may be forked, and read by several threads.

    Raises:
        DataError: as `build_index`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offsets, self.lengths = build_index(path)
        """Of the payloads, in bytes."""

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, record: int, verify: bool = True) -> bytes:
        """The payload of a record, its checksum verified.

        Raises:
            DataError: the record is damaged, or the file was cut short since it was opened.
        """
        offset, length = int(self.offsets[record]), int(self.lengths[record])
        data = _read_at(self._file, length + TAIL_BYTES, offset)
        start = offset - HEAD_BYTES
        if len(data) < length + TAIL_BYTES:
            raise _cut_short(self.path, record, start, length, len(data) + HEAD_BYTES)
        return _verified(data, self.path, record, start) if verify else data[:-TAIL_BYTES]

    @cached_property
    def _file(self) -> BinaryIO:
        file = _opened(self.path)
        weakref.finalize(self, file.close)
        return file


def _opened(path: Path, buffering: int = 0) -> BinaryIO:
    try:
        return path.open("rb", buffering=buffering)
    except OSError as error:
        raise DataError(
            f"{path} cannot be opened.",
            given=str(error),
            expected="a file of records that may be read",
            mend="check the path, and who may read it",
        ) from error


def _read_at(file: BinaryIO, size: int, offset: int) -> bytes:
    """Bytes from an offset on, fewer at the end of the file."""
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), size, offset)
    file.seek(offset)  # Windows has no pread.
    return file.read(size)


def _payload_length(head: bytes, path: Path, record: int, start: int, size: int) -> int:
    """The length that a header tells, once it is known to be true and to fit into the file."""
    left = size - start
    if len(head) < HEAD_BYTES:
        raise _cut_short(path, record, start, 0, left)
    length: int
    length, crc = _HEAD.unpack(head)
    if masked_crc32c(head[: _LENGTH.size]) != crc:
        raise DataError(
            f"Record {record} of {path}, at byte {start}, has no valid header.",
            given=f"the bytes {head.hex(' ')}",
            expected="the length of a record and its checksum",
            mend="copy or convert the file again"
            if record
            else "check that this is a TFRecord file, and not a compressed one",
        )
    if HEAD_BYTES + length + TAIL_BYTES > left:
        raise _cut_short(path, record, start, length, left)
    return length


def _verified(data: bytes, path: Path, record: int, start: int) -> bytes:
    """The payload of (payload, checksum)."""
    payload = data[:-TAIL_BYTES]
    (expected,) = _CRC.unpack(data[-TAIL_BYTES:])
    if (crc := masked_crc32c(payload)) != expected:
        raise DataError(
            f"Record {record} of {path}, at byte {start}, is damaged.",
            given=f"{len(payload)} bytes with the checksum {crc:#010x}",
            expected=f"the checksum {expected:#010x}, which was written with them",
            mend="copy or convert the file again",
        )
    return payload


def _cut_short(path: Path, record: int, start: int, length: int, left: int) -> DataError:
    return DataError(
        f"{path} is cut short: record {record}, at byte {start}, is not whole.",
        given=f"{left} bytes up to the end of the file",
        expected=f"at least {HEAD_BYTES + length + TAIL_BYTES} bytes",
        mend="copy or convert the file again",
    )
