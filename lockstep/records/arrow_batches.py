"""What the heads of record batches say: how many rows, and how large they are in memory, before any is decompressed.

pyarrow tells the rows of a batch only once it has decoded it, and then takes as much memory as the file asks for. The
heads are FlatBuffers: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

Parts = Callable[[Sequence[tuple[int, int]]], list[bytes]]
"""Reads parts of a file, each of so many bytes from an offset on, fewer at its end."""

_CONTINUES = b"\xff\xff\xff\xff"
_TRAILER = struct.Struct("<i6s")
_BLOCK = struct.Struct("<qi4xq")
_BUFFER = struct.Struct("<qq")
_SIZE = struct.Struct("<q")
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3


class BatchHead(NamedTuple):
    """What a record batch, or the batch of a dictionary, says of itself."""

    num_rows: int
    is_compressed: bool
    buffers: tuple[tuple[int, int], ...]
    """Where each buffer begins in the body of the batch, and its size there."""


class StoredBatch(NamedTuple):
    """A record batch of a file."""

    head: BatchHead
    body: int
    """Where in the file its body begins."""


def batches_of_file(parts: Parts, file_bytes: int) -> tuple[list[StoredBatch], list[StoredBatch]]:
    """Find the batches of dictionaries and of records in a file, by its footer and their heads.

    Raises:
        ValueError, IndexError, struct.error: it is none, or damaged.
    """
    (end,) = parts([(_TRAILER.size, file_bytes - _TRAILER.size)])
    size, _ = _TRAILER.unpack(end)
    if not 0 < size <= file_bytes - _TRAILER.size:
        raise ValueError(f"a footer of {size} bytes")
    (content,) = parts([(size, file_bytes - _TRAILER.size - size)])
    footer = _Table.root(content)
    blocks = [[*_BLOCK.iter_unpack(footer.vector(field, _BLOCK.size))] for field in (2, 3)]
    places = [(size, start) for each in blocks for start, size, _ in each]
    is_within = all(start >= 0 and 0 < size <= file_bytes - start for size, start in places)
    if not is_within or sum(size for size, _ in places) > file_bytes:  # those that overlap would be read many times
        raise ValueError("a batch beyond the end of the file")
    heads = [StoredBatch(_head(data), start + size) for data, (size, start) in zip(parts(places), places, strict=True)]
    return heads[: len(blocks[0])], heads[len(blocks[0]) :]


def _head(data: bytes) -> BatchHead:
    """Read the head of a batch as it is in a file, behind its length."""
    return head_of(data[8 if data.startswith(_CONTINUES) else 4 :])


def head_of(metadata: bytes) -> BatchHead:
    """Read the head of a batch: the metadata of a message."""
    message = _Table.root(metadata)
    kind, batch = message.number(1, "<B"), message.table(2)
    if kind == _DICTIONARY_BATCH:
        batch = batch.table(1)
    elif kind != _RECORD_BATCH:
        raise ValueError(f"a message of the kind {kind} in place of a batch")
    buffers = tuple(_BUFFER.iter_unpack(batch.vector(2, _BUFFER.size)))
    if (num_rows := batch.number(0, "<q")) < 0 or any(min(each) < 0 for each in buffers):
        raise ValueError(f"a batch of {num_rows} rows in {len(buffers)} buffers")
    return BatchHead(num_rows, batch.has(3), buffers)


def decoded_bytes(parts: Parts, batch: StoredBatch) -> int:
    """Return how much memory the buffers of a batch take once they are decompressed, as they say themselves."""
    stored = [(start, size) for start, size in batch.head.buffers if size]
    if not batch.head.is_compressed:
        return sum(size for _, size in stored)
    sizes = parts([(_SIZE.size, batch.body + start) for start, _ in stored])
    told = [_SIZE.unpack(data)[0] for data in sizes]
    # -1: it is stored as it is.
    return sum(size if each < 0 else each for each, (_, size) in zip(told, stored, strict=True))


class _Table(NamedTuple):
    """A table of FlatBuffers: fields by number, each where the table of offsets before it says."""

    data: bytes
    place: int

    @classmethod
    def root(cls, data: bytes) -> _Table:
        return cls(data, *struct.unpack_from("<I", data))

    def _field(self, number: int) -> int:
        """Return where a field is; 0: it is left out."""
        (back,) = struct.unpack_from("<i", self.data, self.place)
        offsets = self.place - back
        if offsets < 0:
            raise ValueError("a table without offsets")
        (size,) = struct.unpack_from("<H", self.data, offsets)
        if 4 + 2 * number >= size:
            return 0
        (offset,) = struct.unpack_from("<H", self.data, offsets + 4 + 2 * number)
        return self.place + offset if offset else 0

    def has(self, number: int) -> bool:
        return self._field(number) > 0

    def number(self, number: int, kind: str) -> int:
        """Return a field that is a number, 0 if it is left out; `kind` as in `struct`."""
        value: int = struct.unpack_from(kind, self.data, place)[0] if (place := self._field(number)) else 0
        return value

    def table(self, number: int) -> _Table:
        if not (place := self._field(number)):
            raise ValueError(f"no field {number}")
        return _Table(self.data, place + struct.unpack_from("<I", self.data, place)[0])

    def vector(self, number: int, size: int) -> bytes:
        """Return the entries of a field that is a vector, each of so many bytes."""
        if not (place := self._field(number)):
            return b""
        start = place + struct.unpack_from("<I", self.data, place)[0]
        (count,) = struct.unpack_from("<I", self.data, start)
        if start + 4 + count * size > len(self.data):
            raise ValueError(f"a vector of {count} entries")
        return self.data[start + 4 : start + 4 + count * size]
