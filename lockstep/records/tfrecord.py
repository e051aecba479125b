"""TFRecord files, as TensorFlow writes them: written whole, and read from start to end.

A record is a frame around a payload, as in TensorFlow's `core/lib/io/record_writer.h`:

    8 bytes         length of the payload, little-endian
    4 bytes         masked CRC-32C of these 8 bytes
    length bytes    the payload
    4 bytes         masked CRC-32C of the payload

A file is such frames, plain or all of them in gzip or zlib; its first bytes tell which, whatever its name. Several
compressed streams may follow one another, as `cat` joins them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from lockstep.checks import check_one_of, wrong_type
from lockstep.durable import atomic_write
from lockstep.errors import DataError
from lockstep.records.open_files import open_file, version_of
from lockstep.records.shards import check_local, data_path
from lockstep.storage.remote_path import AnyPath

Compression = Literal["gzip", "zlib"]
UInt8s = npt.NDArray[np.uint8]
UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]

LARGEST_RECORD_BYTES = 1 << 31
"""No message of protocol buffers is longer."""

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<QI")
_CRC_MASK = 0xA282EAD8
HEAD_BYTES, TAIL_BYTES = _HEAD.size, _CRC.size
FRAME_BYTES = HEAD_BYTES + TAIL_BYTES

_WINDOW_BITS: dict[Compression, int] = {"gzip": 16 + zlib.MAX_WBITS, "zlib": zlib.MAX_WBITS}
_ANY_WINDOW_BITS = 32 + zlib.MAX_WBITS
_BLOCK_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b\x08"
_DEFLATE, _WIDEST_WINDOW, _WITH_DICTIONARY = 8, 7, 32


_ENCODE = "encode it, as text.encode() or example.SerializeToString() do"
_HINTS: dict[type, str] = {
    tuple: "take the second value of each pair of read_all: (payload for _, payload in read_all(path))",
    bytearray: "write bytes(payload)",
    memoryview: "write bytes(payload)",
}


def write_records(path: str | Path, payloads: Iterable[bytes], compression: Compression | None = None) -> int:
    """Write a file of records, whole or not at all, and return their number.

    The same payloads make the same bytes. TensorFlow reads a compressed file only if it is told so
    (`compression_type="GZIP"` or "ZLIB").

    Raises:
        InputError: the payloads are no bytes.
        DataError: the file cannot be written.
    """
    check_local(path)
    if isinstance(payloads, str | bytes | bytearray | memoryview) or not isinstance(payloads, Iterable):
        hint = "write [payload] for a file of one record"
        raise wrong_type("payloads", payloads, expected="bytes for each record, one after the other", hint=hint)
    if compression is not None:
        check_one_of("compression", compression, ("gzip", "zlib"))
    deflate, flush = deflating(compression)
    count = 0
    with atomic_write(Path(path), parents=True, failure=DataError) as file:
        for payload in payloads:
            if not isinstance(payload, bytes):
                raise wrong_type(
                    f"payloads[{count}]", payload, expected="bytes", hint=_HINTS.get(type(payload), _ENCODE)
                )
            file.write(deflate(frame(payload)))
            count += 1
        file.write(flush())
    return count


def read_all(
    path: str | AnyPath, *, verify: bool = True, largest_record_bytes: int = LARGEST_RECORD_BYTES
) -> Iterator[tuple[int, bytes]]:
    """Yield (byte where its frame ends, payload) of every record in turn, with one record at a time in memory.

    Bytes of a compressed file are counted after decompression. Records before a damaged one are yielded.

    Args:
        path: of the file, plain or compressed.
        verify: compare the checksums of payloads; those of lengths always are.
        largest_record_bytes: refuse a longer one in a compressed file before it is read: it may expand from nothing.
    """
    path = data_path(path)
    with open_file(path, buffering=-1) as file:
        source = RecordSource(path, compression_of(file.read(HEAD_BYTES), RecordSource(path)))
        file.seek(0)
        if source.compression:
            yield from _records_in(Inflated(file), source, verify, largest_record_bytes)
        else:
            yield from _records_in(file, source, verify, largest_record_bytes, version_of(file).size_bytes)


class RecordSource(NamedTuple):
    """The file that records come from, for errors."""

    path: AnyPath
    compression: Compression | None = None

    def describe(self, record: int, start: int) -> str:
        """Name a record by its number, and by the byte where its frame starts: the subject of a sentence."""
        after = " after decompression" if self.compression else ""
        return f"Record {record} of {self.path}, at byte {start}{after},"

    def damaged(self, what: str, record: int, start: int, *, given: str, expected: str, hint: str) -> DataError:
        """Make the error for a record; `what` is wrong with it."""
        return DataError(f"{self.describe(record, start)} {what}.", given=given, expected=expected, hint=hint)

    def cut_short(self, record: int, start: int, length: int, left: int) -> DataError:
        """Make the error for a record whose frame of `length` bytes has only `left` of them."""
        after = " after decompression" if self.compression else ""
        return DataError(
            f"{self.path} is cut short: record {record}, at byte {start}{after}, is not whole.",
            given=f"{left} bytes up to the end of the file",
            expected=f"at least {length} bytes",
            hint="copy or convert the file again",
        )


def masked_crc32c(data: bytes) -> int:
    """Compute the format's checksum: CRC-32C rotated by 15 bits plus a constant."""
    crc: int = google_crc32c.value(data)
    return (crc >> 15 | crc << 17) + _CRC_MASK & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """Frame a payload as a record."""
    length = _LENGTH.pack(len(payload))
    return length + _CRC.pack(masked_crc32c(length)) + payload + _CRC.pack(masked_crc32c(payload))


def is_head(head: bytes) -> bool:
    """Check that 12 bytes are a length and its checksum."""
    return len(head) == HEAD_BYTES and masked_crc32c(head[: _LENGTH.size]) == _CRC.unpack(head[_LENGTH.size :])[0]


def payload_length(head: bytes, source: RecordSource, record: int, start: int) -> int:
    """Read the length of a payload in bytes from the first 12 bytes of its frame, and verify their checksum."""
    if len(head) < HEAD_BYTES:
        raise source.cut_short(record, start, FRAME_BYTES, len(head))
    length: int
    length, crc = _HEAD.unpack(head)
    if masked_crc32c(head[: _LENGTH.size]) != crc:
        raise _bad_head(head, source, record, start)
    return length


def checked_lengths(heads: UInt8s, source: RecordSource, record: int, start: int) -> UInt64s:
    """Read the lengths in many heads at once, shape (records, 12), and verify their checksums.

    Their frames follow one another in the file, from record number `record` on, whose frame begins at `start`.
    """
    numbers = np.ascontiguousarray(heads[:, : _LENGTH.size])
    lengths = numbers.view("<u8")[:, 0].astype(np.uint64)
    crcs = np.full(len(heads), 0xFFFFFFFF, np.uint32)
    for column in numbers.T:
        crcs = _crc32c_table()[(crcs ^ column) & 0xFF] ^ crcs >> 8
    crcs = ~crcs
    expected = np.ascontiguousarray(heads[:, _LENGTH.size :]).view("<u4")[:, 0]
    wrong = np.flatnonzero((crcs >> 15 | crcs << 17) + np.uint32(_CRC_MASK) != expected)
    if len(wrong):
        first = int(wrong[0])
        place = start + int(lengths[:first].sum()) + FRAME_BYTES * first
        raise _bad_head(heads[first].tobytes(), source, record + first, place)
    return lengths


@cache
def _crc32c_table() -> UInt32s:
    """The CRC-32C of each byte, by Castagnoli's polynomial, reflected."""
    table: UInt32s = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = table >> np.uint32(1) ^ np.uint32(0x82F63B78) * (table & np.uint32(1))
    return table


def verify_payload(data: bytes, source: RecordSource, record: int, start: int) -> None:
    """Compare the checksum of a payload with the one that follows it: `data` is both, of the frame at `start`.

    The payload is not cut out of it, which would copy it: the checksum of all goes on from that of the payload.
    """
    tail = data[-TAIL_BYTES:]
    (expected,) = _CRC.unpack(tail)
    rotated = expected - _CRC_MASK & 0xFFFFFFFF
    if google_crc32c.extend((rotated >> 17 | rotated << 15) & 0xFFFFFFFF, tail) != google_crc32c.value(data):
        payload = data[:-TAIL_BYTES]
        raise source.damaged(
            "is damaged",
            record,
            start,
            given=f"{len(payload)} bytes with the checksum {masked_crc32c(payload):#010x}",
            expected=f"the checksum {expected:#010x}, which was written with them",
            hint="copy or convert the file again",
        )


def compression_of(head: bytes, source: RecordSource) -> Compression | None:
    """Find how a file is compressed, from its first 12 bytes (fewer if it is shorter)."""
    if not head or is_head(head):
        return None
    if head.startswith(_GZIP_MAGIC[: len(head)]):
        return "gzip"
    if _is_zlib(head):
        return "zlib"
    if len(head) < HEAD_BYTES:
        return None
    raise _bad_head(head, source, 0, 0)


class InflateError(Exception):
    """Raised for a compressed stream that is damaged or cut short."""

    def of(self, source: RecordSource, record: int, start: int) -> DataError:
        """Make the error that names the first record that is not known to be whole."""
        return source.damaged(
            "cannot be decompressed",
            record,
            start,
            given=str(self),
            expected=f"a whole {source.compression} stream of records",
            hint="copy or convert the file again",
        )


class Inflated:
    """The decompressed content of a file, read from start to end."""

    def __init__(self, file: BinaryIO) -> None:
        self._blocks = inflated_blocks(file)
        self._block, self._offset = b"", 0

    def read(self, size: int) -> bytes:
        """Return the next bytes, fewer at the end; an `InflateError` where the stream is damaged."""
        parts = []
        while size > 0:
            if self._offset == len(self._block):
                self._block, self._offset = next(self._blocks, b""), 0
                if not self._block:
                    break
            parts.append(self._block[self._offset : self._offset + size])
            self._offset += len(parts[-1])
            size -= len(parts[-1])
        return b"".join(parts)


def inflated_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the decompressed content of a file in blocks of at most 64 KiB, however far it expands."""
    stream = zlib.decompressobj(_ANY_WINDOW_BITS)
    data = b""
    while True:
        data = data or file.read(_BLOCK_BYTES)
        if stream.eof:
            if not data:
                return
            stream = zlib.decompressobj(_ANY_WINDOW_BITS)
        try:
            block = stream.decompress(data, _BLOCK_BYTES)
        except zlib.error as error:
            raise InflateError(str(error)) from None
        if block:
            yield block
        elif not data and not stream.eof:
            raise InflateError("the compressed stream ends before its end mark")
        data = stream.unused_data if stream.eof else stream.unconsumed_tail


def deflating(compression: Compression | None) -> tuple[Callable[[bytes], bytes], Callable[[], bytes]]:
    """Return two functions: one compresses the next bytes of a file, the other returns its last bytes."""
    if compression is None:
        return bytes, bytes
    stream = zlib.compressobj(wbits=_WINDOW_BITS[compression])
    return stream.compress, stream.flush


def _is_zlib(head: bytes) -> bool:
    """Check that bytes begin with the two-byte header of a zlib stream (RFC 1950)."""
    if len(head) < 2:
        return False
    method, window, flags = head[0] & 15, head[0] >> 4, head[1]
    whole = (head[0] << 8 | flags) % 31 == 0
    return method == _DEFLATE and window <= _WIDEST_WINDOW and whole and not flags & _WITH_DICTIONARY


def _bad_head(head: bytes, source: RecordSource, record: int, start: int) -> DataError:
    return source.damaged(
        "has no valid header",
        record,
        start,
        given=f"the bytes {head.hex(' ')}",
        expected="the length of a record and its checksum" + ("" if start else "; or all of it in gzip or zlib"),
        hint="copy or convert the file again" if record else "check that this is a TFRecord file",
    )


def _records_in(
    stream: BinaryIO | Inflated, source: RecordSource, verify: bool, largest_bytes: int, file_bytes: int | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield the records of a stream as `read_all` does; of a plain file, none that was appended since it was opened.

    A false length is refused before memory is taken for it.
    """
    record, start = 0, 0
    while start != file_bytes:
        try:
            head = stream.read(HEAD_BYTES)
            if not head:
                return
            length = payload_length(head, source, record, start)
            if file_bytes is not None and start + FRAME_BYTES + length > file_bytes:
                raise source.cut_short(record, start, FRAME_BYTES + length, file_bytes - start)
            if file_bytes is None and length > largest_bytes:
                raise source.damaged(
                    "is too large",
                    record,
                    start,
                    given=f"{length} bytes",
                    expected=f"at most {largest_bytes} bytes in a compressed file",
                    hint="write the file uncompressed, if it can be trusted",
                )
            data = stream.read(length + TAIL_BYTES)
        except InflateError as error:
            raise error.of(source, record, start) from None
        if len(data) < length + TAIL_BYTES:
            raise source.cut_short(record, start, FRAME_BYTES + length, HEAD_BYTES + len(data))
        if verify:
            verify_payload(data, source, record, start)
        start += FRAME_BYTES + length
        record += 1
        yield start, data[:-TAIL_BYTES]
