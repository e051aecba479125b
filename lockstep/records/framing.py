"""The frame of a record: its length and two checksums.

8 bytes         length of the payload, little-endian
4 bytes         masked CRC-32C of these 8 bytes
length bytes    the payload
4 bytes         masked CRC-32C of the payload

As in TensorFlow's `core/lib/io/record_writer.h`.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Literal, NamedTuple

import google_crc32c

from lockstep.errors import DataError

Compression = Literal["gzip", "zlib"]

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<QI")
HEAD_BYTES, TAIL_BYTES = _HEAD.size, _CRC.size
FRAME_BYTES = HEAD_BYTES + TAIL_BYTES


class Source(NamedTuple):
    """Where records come from, to be named in errors."""

    path: Path
    compression: Compression | None = None

    def place(self, record: int, start: int) -> str:
        """A record by its number, and by the byte where its frame starts: the subject of a sentence."""
        return f"Record {record} of {self.path}, at byte {start}{self._after},"

    def damaged(self, what: str, record: int, start: int, *, given: str, expected: str, hint: str) -> DataError:
        """The error for a record of which `what` is true."""
        return DataError(f"{self.place(record, start)} {what}.", given=given, expected=expected, hint=hint)

    def cut_short(self, record: int, start: int, length: int, left: int) -> DataError:
        """The error for a record whose frame of `length` bytes has only `left` of them."""
        return DataError(
            f"{self.path} is cut short: record {record}, at byte {start}{self._after}, is not whole.",
            given=f"{left} bytes up to the end of the file",
            expected=f"at least {length} bytes",
            hint="copy or convert the file again",
        )

    @property
    def _after(self) -> str:
        return " after decompression" if self.compression else ""


def masked_crc32c(data: bytes) -> int:
    """The checksum of the format: CRC-32C rotated by 15 bits plus a constant."""
    crc: int = google_crc32c.value(data)
    return (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """A payload as a record."""
    length = _LENGTH.pack(len(payload))
    return length + _CRC.pack(masked_crc32c(length)) + payload + _CRC.pack(masked_crc32c(payload))


def is_head(head: bytes) -> bool:
    """Whether 12 bytes are a length and its checksum."""
    return len(head) == HEAD_BYTES and masked_crc32c(head[: _LENGTH.size]) == _CRC.unpack(head[_LENGTH.size :])[0]


def payload_length(head: bytes, source: Source, record: int, start: int) -> int:
    """The length of a payload in bytes, from the first 12 bytes of its frame.

    Raises:
        DataError: there are fewer, or their checksum is another.
    """
    if len(head) < HEAD_BYTES:
        raise source.cut_short(record, start, FRAME_BYTES, len(head))
    length: int
    length, crc = _HEAD.unpack(head)
    if masked_crc32c(head[: _LENGTH.size]) != crc:
        raise bad_head(head, source, record, start)
    return length


def bad_head(head: bytes, source: Source, record: int, start: int) -> DataError:
    """The error for a frame that does not begin with a length and its checksum."""
    return source.damaged(
        "has no valid header",
        record,
        start,
        given=f"the bytes {head.hex(' ')}",
        expected="the length of a record and its checksum" + ("" if start else "; or all of it in gzip or zlib"),
        hint="copy or convert the file again" if record else "check that this is a TFRecord file",
    )


def payload_of(data: bytes, verify: bool, source: Source, record: int, start: int) -> bytes:
    """The payload of (payload, checksum), the rest of a frame that starts at `start`.

    Raises:
        DataError: it is to be verified, and its checksum is another.
    """
    payload = data[:-TAIL_BYTES]
    if verify:
        (expected,) = _CRC.unpack(data[-TAIL_BYTES:])
        if (crc := masked_crc32c(payload)) != expected:
            raise source.damaged(
                "is damaged",
                record,
                start,
                given=f"{len(payload)} bytes with the checksum {crc:#010x}",
                expected=f"the checksum {expected:#010x}, which was written with them",
                hint="copy or convert the file again",
            )
    return payload
