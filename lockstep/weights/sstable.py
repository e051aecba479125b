"""TensorFlow's tables: sorted keys, each with a value, in blocks with a checksum. The format is that of LevelDB.

    file:       blocks; a block of metadata (unused); the index; the footer
    footer:     two handles, zeros up to 40 bytes, 8 bytes of magic number
    handle:     offset and size of a block, as varints
    index:      a block; its keys are no less than the last of each block in turn, its values the blocks' handles
    block:      entries; 4 bytes for each restart, which are offsets of entries with a whole key; 4 for how many
                after it, not counted in its size: 1 byte for its compression, 4 for the masked CRC-32C of all before
    entry:      varints: bytes shared with the last key, other bytes of the key, bytes of the value; then these two

As in LevelDB's `doc/table_format.md` and in TensorFlow's `core/lib/io/table_builder.cc`.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lockstep.errors import CheckpointError
from lockstep.records.framing import masked_crc32c
from lockstep.records.wire import MalformedError, Span, read_varint
from lockstep.weights.tf_errors import damaged, unreadable
from lockstep.weights.snappy import decompress

MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
FOOTER_BYTES = 48

_CRC = struct.Struct("<I")
_COUNT = struct.Struct("<I")
_PLAIN, _SNAPPY = 0, 1
# Every 16th key is written whole, so that keys take at most 16 times the bytes of their block.
_MOST_KEYS = 32


class Handle(NamedTuple):
    """Where a block lies."""

    offset: int
    size: int

    @property
    def stop(self) -> int:
        """Where what belongs to the block ends: its compression and checksum."""
        return self.offset + self.size + 1 + _CRC.size


class Table:
    """The entries of a file, read block by block when they are asked for. Opening it reads the footer and the index.

    Args:
        path: of the file.

    Raises:
        CheckpointError: the file cannot be read, or is no table; or its index is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                handle = self._footer(file, size)
                self._end = size - FOOTER_BYTES
                index = self._read(file, handle)
        except OSError as error:
            raise unreadable(path, error) from error
        places = self._entries(index, handle)
        self._last_keys = list(places)
        self._handles = [self._handle(index[slice(*span)]) for span in places.values()]
        self._check_order()
        self._places: dict[int, dict[bytes, Span]] = {}

    def get(self, key: bytes) -> memoryview | None:
        """The value of a key, if there is one.

        Raises:
            CheckpointError: its block is damaged.
        """
        number = bisect_left(self._last_keys, key)
        if number == len(self._handles):
            return None
        block = self._block(number)
        if number not in self._places:
            self._places[number] = self._entries(block, self._handles[number])
        span = self._places[number].get(key)
        return None if span is None else memoryview(block)[slice(*span)]

    def items(self) -> Iterator[tuple[bytes, memoryview]]:
        """Yield all keys and their values, in order.

        Raises:
            CheckpointError: a block is damaged.
        """
        for number, handle in enumerate(self._handles):
            block = self._block(number)
            view = memoryview(block)
            for key, span in self._entries(block, handle).items():
                yield key, view[slice(*span)]

    def _footer(self, file: BinaryIO, size: int) -> Handle:
        """Where the index is."""
        footer = b""
        if size >= FOOTER_BYTES:
            file.seek(size - FOOTER_BYTES)
            footer = file.read(FOOTER_BYTES)
        if footer[-len(MAGIC) :] != MAGIC:
            raise damaged(
                self.path,
                "is no table of TensorFlow's, or is cut short",
                given=f"{size} bytes, of which the last are {footer[-len(MAGIC) :].hex(' ') or 'too few'}",
                expected=f"a file that ends with {MAGIC.hex(' ')}",
            )
        try:
            handles, end = footer, FOOTER_BYTES - len(MAGIC)
            return _handle(handles, _handle(handles, 0, end)[1], end)[0]
        except MalformedError as fault:
            raise self._malformed(fault, size - FOOTER_BYTES) from None

    def _handle(self, value: bytes) -> Handle:
        try:
            return _handle(value, 0, len(value))[0]
        except MalformedError as fault:
            raise self._malformed(fault, self._end) from None

    def _check_order(self) -> None:
        """Refuse blocks that overlap: a small file could stand for a large one."""
        end = 0
        for handle in self._handles:
            if handle.offset < end:
                raise self._malformed(MalformedError("a block within another", handle.offset), 0)
            end = handle.stop

    def _block(self, number: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                return self._read(file, self._handles[number])
        except OSError as error:
            raise unreadable(self.path, error) from error

    def _read(self, file: BinaryIO, handle: Handle) -> bytes:
        """What a block holds, verified and decompressed."""
        if handle.stop > self._end:
            raise damaged(
                self.path,
                "is damaged or cut short",
                given=f"a block of {handle.size} bytes at byte {handle.offset}",
                expected=f"one within the {self._end} bytes before the footer",
            )
        file.seek(handle.offset)
        content = file.read(handle.size + 1)
        found, (written,) = masked_crc32c(content), _CRC.unpack(file.read(_CRC.size).ljust(_CRC.size, b"\0"))
        if len(content) <= handle.size or found != written:
            raise damaged(
                self.path,
                "is damaged",
                given=f"a block of {len(content)} bytes at byte {handle.offset} with the checksum {found:#010x}",
                expected=f"{handle.size + 1} bytes with the checksum {written:#010x}, which was written with them",
            )
        return self._plain(content[:-1], content[-1], handle)

    def _plain(self, content: bytes, compression: int, handle: Handle) -> bytes:
        if compression == _PLAIN:
            return content
        if compression != _SNAPPY:
            raise damaged(
                self.path,
                "cannot be read",
                given=f"a block with compression {compression} at byte {handle.offset}",
                expected="none (0), or Snappy (1)",
            )
        try:
            return decompress(content)
        except MalformedError as fault:
            raise self._malformed(fault, handle.offset) from None

    def _entries(self, block: bytes, handle: Handle) -> dict[bytes, Span]:
        try:
            return _entries(block)
        except MalformedError as fault:
            raise self._malformed(fault, handle.offset) from None

    def _malformed(self, fault: MalformedError, start: int) -> CheckpointError:
        return damaged(
            self.path,
            "is no whole table of TensorFlow's",
            given=f"{fault.what} at byte {fault.place} of the block at byte {start}",
            expected="blocks of keys and values",
        )


def _handle(data: bytes, start: int, end: int) -> tuple[Handle, int]:
    offset, start = read_varint(data, start, end)
    size, start = read_varint(data, start, end)
    return Handle(offset, size), start


def _entries(block: bytes) -> dict[bytes, Span]:
    """Where the value of each key starts and stops.

    Raises:
        MalformedError: these are no entries.
    """
    end = _end_of_entries(block)
    entries: dict[bytes, Span] = {}
    key, place, key_bytes = b"", 0, 0
    while place < end:
        shared, start = read_varint(block, place, end)
        others, start = read_varint(block, start, end)
        size, start = read_varint(block, start, end)
        stop = start + others + size
        if shared > len(key) or stop > end:
            raise MalformedError("an entry longer than its block, or with more of the last key than there is,", place)
        key = key[:shared] + block[start : start + others]
        key_bytes += len(key)
        if key_bytes > _MOST_KEYS * len(block):
            raise MalformedError(f"keys of more than {_MOST_KEYS} times the bytes of their block", place)
        entries[key] = start + others, stop
        place = stop
    return entries


def _end_of_entries(block: bytes) -> int:
    if len(block) >= _COUNT.size:
        end = len(block) - _COUNT.size
        count: int = _COUNT.unpack_from(block, end)[0]
        if count * _COUNT.size <= end:
            return end - count * _COUNT.size
    raise MalformedError("more restarts than there is room for", len(block))
