"""Protocol buffers' wire format: a message is fields, each a number, a wire type and a content."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import suppress
from functools import lru_cache

from lockstep.errors import DataError

Buffer = bytes | memoryview
Span = tuple[int, int]

# A tag is a field's number and its wire type: how long it is.
VARINT, WITH_LENGTH, FOUR_BYTES = 0, 2, 5
_FIXED_BYTES = {1: 8, FOUR_BYTES: 4}
FIRST, SECOND = 1 << 3 | WITH_LENGTH, 2 << 3 | WITH_LENGTH

VARINT_BYTES = 10
_MOST_NAMES = 4096


class MalformedError(Exception):
    """Raised for bytes that are no message; says what is wrong, and at which byte."""

    def __init__(self, what: str, place: int) -> None:
        super().__init__(what, place)
        self.what, self.place = what, place

    def of(self, source: str, message: str) -> DataError:
        """Make the error for a source that should be a message of this name."""
        return DataError(
            f"{source} is not a {message}.",
            given=f"{self.what} at byte {self.place}",
            expected=f"the features of a {message}, in protocol buffers' wire format",
            hint="write the record again, or read it as what it is",
        )


def message_fields(data: Buffer, place: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield tag, start and stop of every field of the message from `place` to `end`. Tuned: examples have hundreds."""
    while place < end:
        tag, start = data[place], place + 1
        if tag >= 128:
            tag, start = read_varint(data, place, end)
        wire_type = tag & 7
        if wire_type == WITH_LENGTH:
            if start < end and data[start] < 128:
                length, start = data[start], start + 1
            else:
                length, start = read_varint(data, start, end)
            stop = start + length
        elif wire_type == VARINT:
            stop = read_varint(data, start, end)[1]
        elif wire_type in _FIXED_BYTES:
            stop = start + _FIXED_BYTES[wire_type]
        else:
            raise MalformedError(f"a field of the unknown wire type {wire_type}", place)
        if stop > end:
            raise MalformedError("a field longer than its message", place)
        if tag < 1 << 3:
            raise MalformedError("a field of number 0", place)
        yield tag, start, stop
        place = stop


def map_entries(
    data: Buffer, tag: int, names: Container[str] | None = None, end: int | None = None
) -> dict[str, list[Span]]:
    """Find the spans of a map's values by name; `tag` is the map field's. Of equal names the last one counts.

    With `names` only values of these names are returned. The message ends at `end`, a place as in a slice.
    """
    entries: dict[str, list[Span]] = {}
    for found, start, stop in message_fields(data, 0, slice(end).indices(len(data))[1]):
        if found == tag:
            _add_entries(entries, names, data, start, stop)
    return entries


def _add_entries(
    entries: dict[str, list[Span]], names: Container[str] | None, data: Buffer, place: int, end: int
) -> None:
    """Add the entries of the map from `place` to `end`. Tuned for a short name and then one value, as all write it."""
    while place < end:
        try:
            length, start = data[place + 1], place + 2
            if length >= 128 and data[place] == FIRST:
                length, start = read_varint(data, place + 1, end)
            value, stop = start + 3 + data[start + 1], start + length
            name = _known_name(bytes(data[start:value]))
            if name is not None and data[place] == FIRST and value < stop <= end:
                length, first = data[value], value + 1
                if length >= 128:
                    length, first = read_varint(data, value, stop)
                if first + length == stop:
                    if names is None or name in names:
                        entries[name] = [(first, stop)]
                    place = stop
                    continue
        except IndexError:
            pass
        found, start, stop = next(message_fields(data, place, end))
        if found == FIRST:
            name, spans = _map_entry(data, start, stop)
            if names is None or name in names:
                entries[name] = spans
        place = stop


@lru_cache(_MOST_NAMES)  # the same few names come again in every example
def _known_name(head: bytes) -> str | None:
    """Return the name in the head of an entry, up to the tag of its value; None if that is not all there is in it."""
    if head[0] == FIRST and head[1] < 128 and head[-1] == SECOND and len(head) == head[1] + 3:
        with suppress(UnicodeDecodeError):
            return head[2:-1].decode()
    return None


def _map_entry(data: Buffer, start: int, stop: int) -> tuple[str, list[Span]]:
    """Read any entry: name and values in any order, none or several of each."""
    name, spans = b"", []
    for tag, first, end in message_fields(data, start, stop):
        if tag == FIRST:
            name = bytes(data[first:end])
        elif tag == SECOND:
            spans.append((first, end))
    try:
        return name.decode(), spans
    except UnicodeDecodeError:
        raise MalformedError(f"the name {name!r}, which is not UTF-8,", start) from None


def read_varint(data: Buffer, start: int, end: int) -> tuple[int, int]:
    """Read a varint (7 bits a byte, lowest first, the last byte below 128); return it and the place after it."""
    if start < end and data[start] < 128:
        return data[start], start + 1
    value = 0
    for place in range(start, min(end, start + VARINT_BYTES)):
        byte = data[place]
        value |= (byte & 127) << 7 * (place - start)
        if byte < 128:
            return value, place + 1
    raise MalformedError("a number without an end", start)


def field_bytes(number: int, content: bytes) -> bytes:
    """Write a field that has a length."""
    return varint_bytes(number << 3 | WITH_LENGTH) + varint_bytes(len(content)) + content


def varint_bytes(value: int) -> bytes:
    """Write a number as `read_varint` reads it; a negative one with all its 64 bits."""
    if 0 <= value < 128:
        return bytes((value,))
    value &= 0xFFFFFFFFFFFFFFFF
    encoded = bytearray()
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
