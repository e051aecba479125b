"""Byte strings of a Parquet column by their row, of which no more is read than the row, or the page that it is in.

pyarrow reads no less than a row group of a column: tens of megabytes of images for one that is wanted. This module
finds the pages of a column chunk, and takes one byte string out of a page: of a column without repetition, of byte
arrays that are stored plain or by a dictionary. All others are left to pyarrow. Pages are found by the offset index
that a writer may have left for them, or else by their headers, each of which tells where the next one is. Of a page
without compression it keeps the places of the values alone, and reads them from the file. Snappy compresses blocks of
64 KiB by themselves, and leaves images nearly as they are: of such a page it keeps the places of the blocks, too.

The formats: https://parquet.apache.org/docs/file-format/, with headers in Thrift's compact protocol, and
https://github.com/google/snappy/blob/main/format_description.txt.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Read = Callable[[int, int], bytes]
"""Reads so many bytes of the file from an offset on, fewer at its end."""

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_PLAIN, _BY_DICTIONARY = 0, (2, 8)
_KNOWN_ENCODINGS = frozenset(("PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"))
_CODECS = {"UNCOMPRESSED": None, "SNAPPY": "snappy", "ZSTD": "zstd", "GZIP": "gzip", "BROTLI": "brotli"}
_FIRST_READ, _LARGEST_HEADER = 1 << 10, 1 << 20
_FIRST_AHEAD = 1 << 16
_MOST_DEPTH = 16
_BLOCK, _LEAST_LITERAL = 1 << 16, 256


class PageError(ValueError):
    """Raised for a page that is not as the format has it."""


class DamagedPageError(PageError):
    """Raised for a page that is not as it was written: cut short, or with another checksum."""


class ColumnChunk(NamedTuple):
    """One column of one row group, as the footer has it."""

    start: int
    """Where its first page begins."""
    stop: int
    num_rows: int
    codec: str | None
    size_bytes: int
    """Size of all pages, decompressed."""
    max_level: int
    """The definition level of a byte string that is there."""


def chunk_of(column: Any, leaf: Any) -> ColumnChunk | None:
    """Describe a column chunk by pyarrow's metadata of it and of its leaf; None if it is left to pyarrow."""
    is_plain = column.physical_type == "BYTE_ARRAY" and not leaf.max_repetition_level
    if not is_plain or column.compression not in _CODECS or not _KNOWN_ENCODINGS.issuperset(column.encodings):
        return None
    start = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset:
        start = min(start, column.dictionary_page_offset)
    stop, codec = start + column.total_compressed_size, _CODECS[column.compression]
    size_bytes = column.total_uncompressed_size
    return ColumnChunk(start, stop, column.num_values, codec, size_bytes, leaf.max_definition_level)


class _Page(NamedTuple):
    """One page of a chunk, by its header."""

    kind: int
    header_bytes: int
    stored_bytes: int
    """Size of what comes after the header."""
    size_bytes: int
    """Decompressed."""
    crc: int | None
    num_values: int
    encoding: int
    level_bytes: tuple[int, int]
    """Sizes of repetition and definition levels, which the second version of data pages has before the values."""
    is_compressed: bool


class _Place(NamedTuple):
    """Where a page is, its header included."""

    start: int
    stop: int


class _Found(NamedTuple):
    """The pages of a chunk."""

    dictionary: _Place | None
    pages: list[_Place]
    starts: list[int]
    """The first row of each page, and at the end the number of rows."""


class Values(Protocol):
    """The byte strings of a page, by number."""

    @property
    def size_bytes(self) -> int:
        """How much memory they take."""
        ...

    def __getitem__(self, number: int) -> bytes | None:
        """Return one; None where the value is null."""
        ...


class Pages:
    """The pages of a chunk.

    Args:
        chunk: the pages of which are wanted.
        decompress: returns data decompressed, by its size then and the name of the codec.
        index: the chunk's part of the file's page index, which tells where its pages are; none: it has no such part.
        ahead_bytes: read so much at most beyond a header to find the next ones, where each request takes long.

    Raises:
        PageError: a header that is none, or pages that do not make up the chunk.
    """

    def __init__(
        self,
        read: Read,
        chunk: ColumnChunk,
        decompress: Callable[[bytes, int, str], bytes],
        index: bytes = b"",
        ahead_bytes: int = 0,
    ) -> None:
        self._read, self._chunk, self._decompress = read, chunk, decompress
        self._found = _by_index(index, chunk) if index else _by_headers(read, chunk, ahead_bytes)

    @property
    def size_bytes(self) -> int:
        """How much memory this takes, about."""
        return 200 * len(self._found.pages)

    def find(self, row: int) -> tuple[int, int]:
        """Return the number of the page that holds a row of the chunk, and the row's number in it."""
        page = bisect_right(self._found.starts, row) - 1
        return page, row - self._found.starts[page]

    def values(self, number: int) -> Values:
        """Decode a page; only the places of its values are kept, if they can be read from the file one by one."""
        content = self._content(self._found.pages[number])
        page, levels, body = content.page, content.levels, content.body
        starts = self._found.starts
        if page.kind not in (_DATA, _DATA_V2) or page.num_values != starts[number + 1] - starts[number]:
            raise PageError(f"a page with {page.num_values} values, in place of {starts[number + 1] - starts[number]}")
        present = np.full(page.num_values, True) if levels is None else levels == self._chunk.max_level
        places, count = np.where(present, present.cumsum() - 1, -1), int(present.sum())
        start = content.start
        if page.encoding in _BY_DICTIONARY:
            if self._found.dictionary is None:
                raise PageError("no dictionary page")
            words = self._content(self._found.dictionary)
            bounds = _plain_bounds(words.body, 0, words.page.num_values)
            numbers = _hybrid(body[start + 1 :], body[start] if len(body) > start else 0, count)
            if len(numbers) and numbers.max() >= len(bounds):
                raise PageError(f"the value {numbers.max()} of a dictionary of {len(bounds)}")
            return self._at(words, _with_null(bounds)[np.append(numbers, -1)[places]])
        if page.encoding != _PLAIN:
            raise PageError(f"the encoding {page.encoding}")
        return self._at(content, _with_null(_plain_bounds(body, start, count))[places])

    def _at(self, content: _Content, bounds: npt.NDArray[np.int64]) -> Values:
        """Return the values that are in a page at these bounds, of what is decompressed."""
        if not (self._chunk.codec and content.page.is_compressed):
            return _InFile(self._read, content.base, bounds)
        if self._chunk.codec == "snappy" and (blocks := _snappy_blocks(content.stored)) is not None:
            return _InBlocks(self._read, self._decompress, content.base, bounds, blocks, len(content.body))
        return _Decoded(content.body, bounds)

    def _content(self, place: _Place) -> _Content:
        """Read a page, decompressed."""
        data = self._read(place.stop - place.start, place.start)
        try:
            page = _page_in(data, place.start, self._chunk)
        except IndexError:
            raise PageError(f"no page header at byte {place.start}") from None
        whole = data[page.header_bytes : page.header_bytes + page.stored_bytes]
        if len(whole) < page.stored_bytes:
            raise DamagedPageError(f"a page of {page.stored_bytes} bytes, of which {len(whole)} are there")
        if page.crc is not None and zlib.crc32(whole) != page.crc & 0xFFFFFFFF:
            raise DamagedPageError("a page with another checksum than was written with it")
        repeats, defines = page.level_bytes
        head, stored = whole[: repeats + defines], whole[repeats + defines :]
        base = place.start + page.header_bytes + len(head)
        body = stored
        if self._chunk.codec and page.is_compressed:
            body = self._decompress(stored, page.size_bytes - len(head), self._chunk.codec)
        width = self._chunk.max_level.bit_length()
        if page.kind == _DICTIONARY or not width:
            return _Content(page, None, base, stored, body, 0)
        if page.kind == _DATA_V2:
            return _Content(page, _hybrid(head[repeats:], width, page.num_values), base, stored, body, 0)
        stop = 4 + int.from_bytes(body[:4], "little")
        return _Content(page, _hybrid(body[4:stop], width, page.num_values), base, stored, body, stop)


class _Content(NamedTuple):
    page: _Page
    levels: npt.NDArray[np.int64] | None
    """The definition level of each value; None where all are there."""
    base: int
    """Where in the file `stored` begins."""
    stored: bytes
    """The values as they are in the file, without the levels that are before them."""
    body: bytes
    """The same, decompressed."""
    start: int
    """Where in it the values begin."""


class _Decoded(NamedTuple):
    data: bytes
    bounds: npt.NDArray[np.int64]
    """Where each begins and ends, (values, 2); an end of -1 for one that is null."""

    @property
    def size_bytes(self) -> int:
        return len(self.data) + self.bounds.nbytes

    def __getitem__(self, number: int) -> bytes | None:  # type: ignore[override]
        start, stop = self.bounds[number].tolist()
        return None if stop < 0 else self.data[start:stop]


class _InFile(NamedTuple):
    read: Read
    base: int
    bounds: npt.NDArray[np.int64]

    @property
    def size_bytes(self) -> int:
        return self.bounds.nbytes

    def __getitem__(self, number: int) -> bytes | None:  # type: ignore[override]
        start, stop = self.bounds[number].tolist()
        return None if stop < 0 else self.read(stop - start, self.base + start)


class _InBlocks(NamedTuple):
    """Byte strings in a file, in blocks that Snappy has compressed by themselves."""

    read: Read
    decompress: Callable[[bytes, int, str], bytes]
    base: int
    bounds: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    """Where each block begins in what is stored, and at the end its length."""
    length: int
    """Bytes of all blocks, decompressed."""

    @property
    def size_bytes(self) -> int:
        return self.bounds.nbytes + self.blocks.nbytes

    def __getitem__(self, number: int) -> bytes | None:  # type: ignore[override]
        start, stop = self.bounds[number].tolist()
        if stop <= start:
            return None if stop < 0 else b""
        first, last = start // _BLOCK, (stop - 1) // _BLOCK + 1
        here, there = self.blocks[[first, last]].tolist()
        size = min(last * _BLOCK, self.length) - first * _BLOCK
        stored = self.read(there - here, self.base + here)
        data = self.decompress(_varint(size) + stored, size, "snappy")
        return data[start - first * _BLOCK : stop - first * _BLOCK]


def _snappy_blocks(data: bytes) -> npt.NDArray[np.int64] | None:
    """Find where each block of a stream of Snappy's begins, and its end; None if the blocks hang together.

    None, too, for what is compressed so well that finding them would take longer than decoding all.
    """
    thrift = _Thrift(data)
    length, made = thrift.varint(), 0
    starts: list[int] = []
    place, end = thrift.place, len(data)
    for _ in range(64 + end // _LEAST_LITERAL):
        if place >= end:
            is_whole = made == length and len(starts) == -(-length // _BLOCK)
            return np.array([*starts, end], np.int64) if is_whole else None
        if made % _BLOCK == 0:
            starts.append(place)
        tag = data[place]
        kind, extra = tag & 3, tag >> 2
        if kind == 0:
            more = max(0, extra - 59)
            size = 1 + (int.from_bytes(data[place + 1 : place + 1 + more], "little") if more else extra)
            place += 1 + more + size
            offset = 0
        elif kind == 1:
            size = 4 + (extra & 7)
            offset = (tag >> 5 << 8) | int.from_bytes(data[place + 1 : place + 2], "little")
            place += 2
        else:
            size, width = 1 + extra, 2 * (kind - 1)
            offset = int.from_bytes(data[place + 1 : place + 1 + width], "little")
            place += 1 + width
        if made % _BLOCK + size > _BLOCK or offset > made % _BLOCK:
            return None
        made += size
    return None


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _with_null(bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Add the bounds of a null at the end, where -1 finds them."""
    return np.append(bounds, [[0, -1]], axis=0)


def index_places(footer: bytes) -> list[list[tuple[int, int]]]:
    """Find in a footer where the offset index of each column of each row group is, and its size; 0, 0 for none.

    Raises:
        PageError: it is not as the format has it.
    """
    try:
        groups = _Thrift(footer).struct()[0].get(4)
        columns = [group[1] for group in groups or []]
        return [[(_number(each, 4, 0), _number(each, 5, 0)) for each in of_group] for of_group in columns]
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise PageError(f"a footer that is none: {type(error).__name__}") from error


def _by_index(index: bytes, chunk: ColumnChunk) -> _Found:
    """Find the pages of a chunk by its offset index."""
    try:
        listed = _Thrift(index).struct()[0].get(1) or []
        pages = [_Place(_number(each, 1, -1), _number(each, 1, -1) + _number(each, 2, -1)) for each in listed]
        starts = [*(_number(each, 3, -1) for each in listed), chunk.num_rows]
    except (IndexError, TypeError, AttributeError) as error:
        raise PageError(f"a page index that is none: {type(error).__name__}") from error
    edges = [chunk.start, *(edge for page in pages for edge in page), chunk.stop]
    if not pages or starts[0] != 0 or edges != sorted(edges) or any(a >= b for a, b in pairwise(starts)):
        raise PageError(f"a page index of {len(pages)} pages that do not make up a chunk")
    first = pages[0].start
    return _Found(_Place(chunk.start, first) if first > chunk.start else None, pages, starts)


def _by_headers(read: Read, chunk: ColumnChunk, ahead_bytes: int) -> _Found:
    """Find the pages of a chunk by their headers, from one to the next.

    Where much may be read ahead, it is as much as has been passed: few requests, whatever the size of a page.
    """
    dictionary, pages, starts = None, [], [0]
    place, window, base = chunk.start, b"", chunk.start
    while place < chunk.stop:
        left = chunk.stop - place
        for size in (_FIRST_READ, _LARGEST_HEADER):
            if place - base + min(size, left) > len(window):
                ahead = min(_FIRST_AHEAD + place - chunk.start, ahead_bytes)
                window, base = read(min(left, max(size, ahead)), place), place
            try:
                page = _page_in(window[place - base : place - base + size], place, chunk)
                break
            except IndexError:
                continue
        else:
            raise PageError(f"no page header at byte {place}")
        found = _Place(place, place + page.header_bytes + page.stored_bytes)
        if page.kind == _DICTIONARY:
            dictionary = found
        elif page.kind in (_DATA, _DATA_V2):
            pages.append(found)
            starts.append(starts[-1] + page.num_values)
        place = found.stop
    if starts[-1] != chunk.num_rows or place != chunk.stop:
        raise PageError(f"pages with {starts[-1]} values, in place of {chunk.num_rows}")
    return _Found(dictionary, pages, starts)


def _page_in(data: bytes, place: int, chunk: ColumnChunk) -> _Page:
    """Read the header that these bytes begin with, of the page at a place; IndexError where they end in it."""
    header, length = _Thrift(data).struct()
    kind, size_bytes, stored_bytes = (_number(header, number, -1) for number in (1, 2, 3))
    of_kind = header.get({_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(kind, 0))
    of_kind = of_kind if isinstance(of_kind, dict) else {}
    is_second = kind == _DATA_V2
    page = _Page(
        kind,
        length,
        stored_bytes,
        size_bytes,
        _number(header, 4, 0) if 4 in header else None,
        _number(of_kind, 1, 0),
        _number(of_kind, 4 if is_second else 2, -1),
        (_number(of_kind, 6, 0), _number(of_kind, 5, 0)) if is_second else (0, 0),
        bool(of_kind.get(7, True)) if is_second else True,
    )
    is_whole = 0 <= stored_bytes <= chunk.stop - place - length and min(page.level_bytes) >= 0
    is_whole &= sum(page.level_bytes) <= min(stored_bytes, size_bytes)
    if not is_whole or not 0 <= size_bytes <= chunk.size_bytes or not 0 <= page.num_values <= chunk.num_rows:
        raise PageError(f"a page header at byte {place} with {stored_bytes} bytes and {page.num_values} values")
    return page


def _number(fields: dict[int, Any], number: int, default: int) -> int:
    """Return a field of a struct that is a number."""
    if not isinstance(value := fields.get(number, default), int):
        raise PageError(f"a field {number} that is no number")
    return value


def _plain_bounds(data: bytes, place: int, count: int) -> npt.NDArray[np.int64]:
    """Find where each of `count` byte strings, each after its length, begins and ends, from a place on."""
    bounds = []
    for _ in range(count):
        start = place + 4
        place = start + int.from_bytes(data[place:start], "little")
        if place > len(data) or start > len(data):
            raise PageError(f"a value up to byte {place} of a page of {len(data)} bytes")
        bounds.append((start, place))
    return np.array(bounds, np.int64).reshape(-1, 2)


def _hybrid(data: bytes, width: int, count: int) -> npt.NDArray[np.int64]:
    """Decode `count` numbers of `width` bits in runs: of one number, or of eights that are packed."""
    if width > 32:
        raise PageError(f"numbers of {width} bits")
    parts: list[npt.NDArray[np.int64]] = []
    thrift, left = _Thrift(data), count
    try:
        while left > 0:
            head = thrift.varint()
            if head & 1:
                packed = np.frombuffer(thrift.take((head >> 1) * width), np.uint8)[: (left + 7) // 8 * width]
                bits = np.unpackbits(packed, bitorder="little").astype(np.int64)
                run = bits.reshape(-1, width) @ (1 << np.arange(width)) if width else np.zeros(left, np.int64)
            else:
                run = np.full(min(head >> 1, left), int.from_bytes(thrift.take((width + 7) // 8), "little"))
            parts.append(run[:left])
            left -= len(parts[-1])
            if not len(run):
                raise PageError("a run of no numbers")
    except IndexError:
        raise PageError(f"{count - left} numbers in place of {count}") from None
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


class _Thrift:
    """Reads Thrift's compact protocol; IndexError at the end of the bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self.place = data, 0

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        if size > len(self._data) - self.place:
            raise IndexError
        self.place += size
        return self._data[self.place - size : self.place]

    def varint(self) -> int:
        number = shift = 0
        while True:
            byte = self.take(1)[0]
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number
            if shift > 63:
                raise PageError("a number of more than 64 bits")

    def struct(self, depth: int = 0) -> tuple[dict[int, Any], int]:
        """Return the values of a struct by the numbers of its fields, and how many bytes have been read."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self.take(1)[0]:
            delta, kind = head >> 4, head & 15
            number = number + delta if delta else _signed(self.varint())
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind, depth)
        return fields, self.place

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise PageError("values within values")
        if kind in (1, 2, 3):
            return self.take(1)[0]
        if kind in (4, 5, 6):
            return _signed(self.varint())
        if kind == 7:
            return self.take(8)
        if kind == 8:
            return self.take(self.varint())
        if kind in (9, 10):
            head = self.take(1)[0]
            size = head >> 4 if head >> 4 < 15 else self.varint()
            return [self._value(head & 15, depth + 1) for _ in range(size)]
        if kind == 12:
            return self.struct(depth + 1)[0]
        raise PageError(f"a value of the kind {kind}")


def _signed(number: int) -> int:
    """Undo the zigzag of a number."""
    return number >> 1 ^ -(number & 1)
