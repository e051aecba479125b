"""Snappy's block format: literal bytes, and copies of what came before. Tables may be compressed with it.

As described in Snappy's `format_description.txt`.
"""

from __future__ import annotations

from lockstep.records.protobuf import MalformedError, read_varint

# A copy of 64 bytes takes 3: nothing expands to more than this.
_MOST_EXPANSION = 22
# In a tag the lowest two bits: what follows. A copy's offset is written in so many bytes.
_LITERAL = 0
_OFFSET_BYTES = {1: 1, 2: 2, 3: 4}
# A literal of more than 60 bytes has its length in the 1 to 4 bytes after the tag.
_LONGEST_IN_TAG = 60


def decompress(data: bytes) -> bytes:
    """What a block holds. Its length is compared with what can be in so many bytes before memory is taken.

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
    """Where the bytes of a literal start and stop."""
    size, start = (data[place] >> 2) + 1, place + 1
    if size > _LONGEST_IN_TAG:
        start += size - _LONGEST_IN_TAG
        size = int.from_bytes(data[place + 1 : start], "little") + 1
    if start + size > len(data):
        raise MalformedError("a literal longer than its block", place)
    return start, start + size


def _copy(data: bytes, place: int) -> tuple[int, int, int]:
    """How far back a copy begins, how many bytes it has, and where its tag stops."""
    tag, kind = data[place], data[place] & 3
    stop = place + 1 + _OFFSET_BYTES[kind]
    if stop > len(data):
        raise MalformedError("a copy without its offset", place)
    offset = int.from_bytes(data[place + 1 : stop], "little")
    if kind == 1:
        return tag >> 5 << 8 | offset, (tag >> 2 & 7) + 4, stop
    return offset, (tag >> 2) + 1, stop
