"""TFRecord files from their start to their end: written whole, and read in turn."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lockstep.checks import check_one_of
from lockstep.durable import atomic_write
from lockstep.errors import DataError
from lockstep.records.compressed import Inflated, InflateError, compression_of, deflating
from lockstep.records.framing import (
    FRAME_BYTES,
    HEAD_BYTES,
    TAIL_BYTES,
    Compression,
    Source,
    frame,
    payload_length,
    payload_of,
)
from lockstep.records.shards import check_local

LARGEST_RECORD_BYTES = 1 << 31
"""No message of protocol buffers is longer."""

_seeking = threading.Lock()


def write_records(path: str | Path, payloads: Iterable[bytes], compression: Compression | None = None) -> int:
    """Write a file of records, whole or not at all, and return their number.

    The same payloads make the same bytes. TensorFlow reads them; a compressed file only if it is told so
    (`compression_type="GZIP"` or "ZLIB").

    Raises:
        InputError: there is no such compression, or the path is none.
        DataError: the system refuses to write it.
    """
    check_local(path)
    if compression is not None:
        check_one_of("compression", compression, ("gzip", "zlib"))
    deflate, rest = deflating(compression)
    count = 0
    with atomic_write(Path(path), parents=True, failure=DataError) as file:
        for payload in payloads:
            file.write(deflate(frame(payload)))
            count += 1
        file.write(rest())
    return count


def read_all(
    path: str | Path, *, verify: bool = True, largest_record_bytes: int = LARGEST_RECORD_BYTES
) -> Iterator[tuple[int, bytes]]:
    """Yield (byte where its frame ends, payload) of every record in turn, plain or compressed.

    Of a compressed file the bytes are counted after decompression, and one record at a time is in memory.

    Args:
        path: of the file.
        verify: compare the checksums of payloads; those of lengths always are.
        largest_record_bytes: refuse a longer one in a compressed file before it is read: it may expand from nothing.

    Raises:
        InputError: the path is none.
        DataError: the file cannot be opened, or is none of records; or, after what is whole before it, a record that
            is cut short, damaged or too large.
    """
    check_local(path)
    path = Path(path)
    with opened(path, buffering=-1) as file:
        source = Source(path, compression_of(file.read(HEAD_BYTES), Source(path)))
        file.seek(0)
        if source.compression:
            records = _Records(Inflated(file), source, largest_record_bytes)
        else:
            records = _Records(file, source, largest_record_bytes, os.fstat(file.fileno()).st_size)
        while (payload := records.next(verify)) is not None:
            yield records.start, payload


def opened(path: Path, buffering: int = 0) -> BinaryIO:
    """A file of records, to be read.

    Raises:
        DataError: the system refuses.
    """
    try:
        return path.open("rb", buffering=buffering)
    except OSError as error:
        raise DataError(
            f"{path} cannot be opened.",
            given=str(error),
            expected="a file of records that may be read",
            hint="check the path, and who may read it",
        ) from error


def read_at(file: BinaryIO, size: int, offset: int) -> bytes:
    """Bytes of an unbuffered file from an offset on, fewer at its end; by several threads and processes at once."""
    data = _read_once(file, size, offset)
    while 0 < len(data) < size:  # The system gives at most 2 GiB at once.
        if not (more := _read_once(file, size - len(data), offset + len(data))):
            break
        data += more
    return data


def _read_once(file: BinaryIO, size: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), size, offset)
    with _seeking:  # Windows has no pread.
        file.seek(offset)
        return file.read(size)


@dataclass
class _Records:
    """The records of a stream, and how far they have been read."""

    stream: BinaryIO | Inflated
    source: Source
    largest_record_bytes: int
    file_bytes: int | None = None
    """Where a plain file ends; what is appended while it is read is left alone."""
    record: int = 0
    start: int = 0

    def next(self, verify: bool) -> bytes | None:
        """The next payload, or None after the last."""
        if self.start == self.file_bytes:
            return None
        try:
            head = self.stream.read(HEAD_BYTES)
            if not head:
                return None
            length = payload_length(head, self.source, self.record, self.start)
            self._check_size(length)
            data = self.stream.read(length + TAIL_BYTES)
        except InflateError as error:
            raise error.of(self.source, self.record, self.start) from None
        if len(data) < length + TAIL_BYTES:
            raise self.source.cut_short(self.record, self.start, FRAME_BYTES + length, HEAD_BYTES + len(data))
        payload = payload_of(data, verify, self.source, self.record, self.start)
        self.start += FRAME_BYTES + length
        self.record += 1
        return payload

    def _check_size(self, length: int) -> None:
        """Refuse a length that lies, before memory is taken for it."""
        if self.file_bytes is not None:
            left = self.file_bytes - self.start
            if FRAME_BYTES + length > left:
                raise self.source.cut_short(self.record, self.start, FRAME_BYTES + length, left)
        elif length > self.largest_record_bytes:
            raise self.source.damaged(
                "is too large",
                self.record,
                self.start,
                given=f"{length} bytes",
                expected=f"at most {self.largest_record_bytes} bytes in a compressed file",
                hint="write the file uncompressed, if it can be trusted",
            )
