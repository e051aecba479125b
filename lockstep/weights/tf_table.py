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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lockstep.records.protobuf import MalformedError, Span, read_varint
from lockstep.records.tfrecord import masked_crc32c
from lockstep.weights.source import damaged_file, readable

# A copy of 64 bytes takes 3: nothing expands to more than this.
_MOST_EXPANSION = 22
# In a tag the lowest two bits: what follows. A copy's offset is written in so many bytes.
_LITERAL = 0
_OFFSET_BYTES = {1: 1, 2: 2, 3: 4}
# A literal of more than 60 bytes has its length in the 1 to 4 bytes after the tag.
_LONGEST_IN_TAG = 60


def decompress(data: bytes) -> bytes:
    """Decompress a block of Snappy's; its length is compared with what it can be before memory is taken.

    Raises:
        MalformedError: this is no such block.
    """
    length, place = read_varint(data, 0, len(data))
    if length > _MOST_EXPANSION * len(data):
        raise MalformedError(f"{length} bytes announced in {len(data)}", 0)
    output = bytearray()
    while place < len(data):
        if data[place] & 3 == _LITERAL:
            start, stop = _literal(data, place)
            output += data[start:stop]
            place = stop
        else:
            offset, size, place = _copy(data, place)
            if not 0 < offset <= len(output):
                raise MalformedError("a copy of what is not there", place)
            start = len(output) - offset
            chunk = output[start : start + size]
            # A copy may reach into itself: its bytes repeat.
            output += (chunk * (size // len(chunk) + 1))[:size]
        if len(output) > length:
            raise MalformedError(f"more than the {length} bytes announced", place)
    if len(output) < length:
        raise MalformedError(f"{len(output)} bytes, where {length} are announced,", place)
    return bytes(output)


def _literal(data: bytes, place: int) -> tuple[int, int]:
    """The start and stop of a literal's bytes."""
    size, start = (data[place] >> 2) + 1, place + 1
    if size > _LONGEST_IN_TAG:
        start += size - _LONGEST_IN_TAG
        size = int.from_bytes(data[place + 1 : start], "little") + 1
    if start + size > len(data):
        raise MalformedError("a literal longer than its block", place)
    return start, start + size


def _copy(data: bytes, place: int) -> tuple[int, int, int]:
    """The offset of a copy, its size, and the end of its tag."""
    tag, kind = data[place], data[place] & 3
    stop = place + 1 + _OFFSET_BYTES[kind]
    if stop > len(data):
        raise MalformedError("a copy without its offset", place)
    offset = int.from_bytes(data[place + 1 : stop], "little")
    if kind == 1:
        return tag >> 5 << 8 | offset, (tag >> 2 & 7) + 4, stop
    return offset, (tag >> 2) + 1, stop


INDEX = ".index"
"""The ending of the file that is the table of a checkpoint of version 2."""
TABLE_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
FOOTER_BYTES = 48

_UINT32 = struct.Struct("<I")
_PLAIN, _SNAPPY = 0, 1
# Every 16th key is written whole, so that keys take at most 16 times the bytes of their block.
_MOST_KEYS = 32


class Handle(NamedTuple):
    """The place of a block in its file."""

    offset: int
    size: int

    @property
    def stop(self) -> int:
        """The end of the block with its compression and checksum."""
        return self.offset + self.size + 1 + _UINT32.size


class Table:
    """The entries of a file, read block by block on demand. Opening it reads the footer and the index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _faults_of(path, "the file"), path.open("rb") as file:
            end = file.seek(0, 2) - FOOTER_BYTES
            index = _read_block(file, _index_handle(file, end), end)
        with _faults_of(path, "its index"):
            places = _entries(index)
            self._last_keys = list(places)
            self._handles = [_handle(index, *span)[0] for span in places.values()]
            _check_order(self._handles, end)
        self._end = end
        self._places: dict[int, dict[bytes, Span]] = {}

    def get(self, key: bytes) -> memoryview | None:
        """The value of a key; None if there is none."""
        number = bisect_left(self._last_keys, key)
        if number == len(self._handles):
            return None
        block = self._block(number)
        if number not in self._places:
            self._places[number] = self._entries(number, block)
        span = self._places[number].get(key)
        return None if span is None else memoryview(block)[slice(*span)]

    def items(self) -> Iterator[tuple[bytes, memoryview]]:
        """Yield all keys and their values, in order."""
        for number in range(len(self._handles)):
            block = self._block(number)
            view = memoryview(block)
            for key, span in self._entries(number, block).items():
                yield key, view[slice(*span)]

    def _block(self, number: int) -> bytes:
        with _faults_of(self.path, "the file"), self.path.open("rb") as file:
            return _read_block(file, self._handles[number], self._end)

    def _entries(self, number: int, block: bytes) -> dict[bytes, Span]:
        with _faults_of(self.path, f"the block at byte {self._handles[number].offset}"):
            return _entries(block)


@contextmanager
def _faults_of(path: Path, part: str) -> Iterator[None]:
    """Name the file and the part of it in errors."""
    try:
        with readable(path):
            yield
    except MalformedError as fault:
        raise damaged_file(
            path,
            "is damaged or cut short, or is no table of TensorFlow's",
            given=f"{fault.what} at byte {fault.place} of {part}",
            expected="blocks of keys and values, each with its checksum, and at the end where they are",
        ) from None


def _index_handle(file: BinaryIO, end: int) -> Handle:
    """Read the place of the index from the footer at `end`."""
    if end < 0:
        raise MalformedError(f"no footer of {FOOTER_BYTES} bytes, but the end", end + FOOTER_BYTES)
    file.seek(end)
    footer = file.read(FOOTER_BYTES)
    if not footer.endswith(TABLE_MAGIC):
        raise MalformedError(f"a footer without {TABLE_MAGIC.hex(' ')}", end)
    stop = FOOTER_BYTES - len(TABLE_MAGIC)
    return _handle(footer, _handle(footer, 0, stop)[1], stop)[0]


def _read_block(file: BinaryIO, handle: Handle, end: int) -> bytes:
    """Read, verify and decompress a block of the file with its footer at `end`."""
    if handle.stop > end:
        raise MalformedError(f"a block of {handle.size} bytes, more than there are,", handle.offset)
    file.seek(handle.offset)
    content = file.read(handle.size + 1)
    found, written = masked_crc32c(content), int.from_bytes(file.read(_UINT32.size), "little")
    if found != written:
        raise MalformedError(
            f"a block with the checksum {found:#010x}, where {written:#010x} was written with it,", handle.offset
        )
    compression = content[-1]
    if compression not in (_PLAIN, _SNAPPY):
        raise MalformedError(f"a block with the unknown compression {compression}", handle.offset)
    return content[:-1] if compression == _PLAIN else decompress(content[:-1])


def _check_order(handles: Sequence[Handle], end: int) -> None:
    """Refuse blocks that overlap: a small file could stand for a large one."""
    for handle, following in pairwise([*handles, Handle(end, 0)]):
        if handle.stop > following.offset:
            raise MalformedError("a block that is too long, or out of turn,", handle.offset)


def _handle(data: bytes, start: int, end: int) -> tuple[Handle, int]:
    offset, start = read_varint(data, start, end)
    size, start = read_varint(data, start, end)
    return Handle(offset, size), start


def _entries(block: bytes) -> dict[bytes, Span]:
    """The start and stop of each key's value."""
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
        key_bytes += shared + others
        if key_bytes > _MOST_KEYS * len(block):
            raise MalformedError(f"keys of more than {_MOST_KEYS} times the bytes of their block", place)
        key = key[:shared] + block[start : start + others]
        entries[key] = start + others, stop
        place = stop
    return entries


def _end_of_entries(block: bytes) -> int:
    """The start of the restarts."""
    if len(block) >= _UINT32.size:
        end = len(block) - _UINT32.size
        count: int = _UINT32.unpack_from(block, end)[0]
        if count * _UINT32.size <= end:
            return end - count * _UINT32.size
    raise MalformedError("more restarts than there is room for", len(block))
