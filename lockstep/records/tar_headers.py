"""The headers of tar archives: ustar, with the extensions of POSIX (pax) and of GNU.

An archive is blocks of 512 bytes: for each member a header, then its content, padded by zeros; in the end two blocks of
zeros. What does not fit into a header (a long name, a large size) stands in the content of a member of its own before
it. As in POSIX.1-2017, "pax", and in GNU tar's manual, "Basic Tar Format".
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import google_crc32c

BLOCK_BYTES = 512
# Types of members, a byte each, as their headers name them.
FILES = b"0\x007"
FOLDERS = b"5"
LINKS = b"12"
DEVICES = b"346"
LABELS = b"V"
SPARSE = b"S"
LONG_NAME, LONG_LINK = b"L", b"K"
PAX, PAX_OF_SUN, PAX_OF_ALL = b"x", b"X", b"g"

WITHOUT_CONTENT = FOLDERS + LINKS + DEVICES + LABELS

_SUM = slice(148, 156)
_POSIX = b"ustar\0"


class BadHeaderError(Exception):
    """Why a block is not the header of a member."""


class Header(NamedTuple):
    """What a header says of a member."""

    name: bytes
    size_bytes: int
    """Of its content, before it is padded; 0 where its type has none."""
    kind: bytes
    """Its type, one byte."""
    crc: int
    """CRC-32C of the block."""


def read_header(block: bytes) -> Header:
    """The header in a block.

    Raises:
        BadHeaderError: its checksum is another, or a number in it is none.
    """
    expected = _number(block[_SUM], "checksum")
    rest = block[: _SUM.start] + b" " * 8 + block[_SUM.stop :]
    if sum(rest) != expected and sum(struct.unpack(f"{BLOCK_BYTES}b", rest)) != expected:  # some old ones summed so
        raise BadHeaderError(f"a header with the checksum {sum(rest)} that says {expected}")
    name, kind = _text(block[:100]), block[156:157]
    size_bytes = 0 if kind in WITHOUT_CONTENT else _number(block[124:136], "size")
    if block[257:263] == _POSIX and (prefix := _text(block[345:500])):
        name = prefix + b"/" + name
    return Header(name, size_bytes, kind, header_crc(block))


def header_crc(block: bytes) -> int:
    """CRC-32C of a block: the checksum of a header is a sum, and the same for 01.jpg and 10.jpg."""
    crc: int = google_crc32c.value(block)
    return crc


def read_pax(content: bytes) -> dict[bytes, bytes]:
    """The values of a pax header by keyword: lines of "length keyword=value", the length that of the whole line.

    Raises:
        BadHeaderError: it holds something else.
    """
    values = {}
    place = 0
    while place < len(content):
        digits, space, _ = content[place : place + 20].partition(b" ")
        end = place + int(digits) if space and digits.isdigit() else 0
        keyword, equals, value = content[place + len(digits) + 1 : end].partition(b"=")
        if not (equals and place < end <= len(content) and value.endswith(b"\n")):
            raise BadHeaderError(f"a pax header with the line {content[place : place + 40]!r}")
        values[keyword] = value[:-1]
        place = end
    return values


def pax_number(value: bytes) -> int:
    """A size as pax writes it.

    Raises:
        BadHeaderError: it is none.
    """
    if not value.isdigit() or len(value) > 18:
        raise BadHeaderError(f"a pax header with the size {value[:40]!r}")
    return int(value)


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes, what: str) -> int:
    """Octal digits; or, where it begins with a byte above 127, as GNU tar does it, a number to base 256."""
    if field[0] & 0x80:
        if field[0] != 0x80:
            raise BadHeaderError(f"a header with a negative {what}")
        return int.from_bytes(field[1:], "big")
    digits = _text(field).strip()
    if digits.strip(b"01234567"):
        raise BadHeaderError(f"a header with the {what} {digits!r}")
    return int(digits or b"0", 8)
