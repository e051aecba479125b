"""What stands in a JPEG before its first scan: how large the image is, and how the camera was held.

Read by hand: it takes microseconds, allocates nothing for the pixels, and is the same whichever library decodes.
Markers as in ITU-T T.81, annex B; the orientation as in Exif 2.32, which holds a TIFF directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

START = b"\xff\xd8\xff"

_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_END = bytes([0xFF, _END_OF_IMAGE])
_FILL = 0xFF
# Stuffed bytes, TEM, restarts and the start of the image: markers that no length follows.
_WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xD9)}
# Start of a frame; of these codes DHT, JPG and DAC are something else.
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_EXIF_SEGMENT, _OTHER_SEGMENT = 0xE1, 0xEF
_EXIF = b"Exif\0\0"
# The content of a segment comes after its marker's second byte and two bytes of length.
_MARKER_BEFORE = 3

_ORIENTATION = 0x0112
_ENTRY_BYTES = 12


class JpegHeader(NamedTuple):
    """Of the stored raster: nothing is turned yet."""

    size: tuple[int, int]
    """Width and height in pixels."""
    exif: list[tuple[int, int]]
    """Where the content of each EXIF segment starts and stops; more than one is rare."""
    stop: int
    """Where its last segment stops: scans follow."""


def read_header(data: bytes) -> JpegHeader:
    """The header of a JPEG.

    Raises:
        ValueError: it announces no frame, or an empty one, before the first scan.
    """
    size, exif, stop = None, [], 0
    for marker, start, stop in _segments(data):
        if marker in _FRAMES and size is None:
            size = _two_bytes(data, start + 3), _two_bytes(data, start + 1)
        elif marker == _EXIF_SEGMENT and data.startswith(_EXIF, start):
            exif.append((start, stop))
    if size is None or not all(size):
        raise ValueError("no size in the header of a JPEG")
    return JpegHeader(size, exif, stop)


def without_exif(data: bytes, header: JpegHeader) -> bytes:
    """The same JPEG, its EXIF segments renamed to segments that no decoder knows: the raster as it is stored.

    Decoders differ in what they do about an orientation, and warn of segments that are damaged.
    """
    if not header.exif:
        return data
    changed = bytearray(data)
    for start, _ in header.exif:
        changed[start - _MARKER_BEFORE] = _OTHER_SEGMENT
    return bytes(changed)


def is_whole(data: bytes, header: JpegHeader) -> bool:
    """Whether the end of the image is marked; it is not where a file was cut short."""
    return data.rfind(_END, header.stop) >= 0


def orientation_of(exif: bytes) -> int:
    """The orientation in the content of an EXIF segment, 1 to 8; 1 (upright) where it holds none."""
    tiff = exif.removeprefix(_EXIF)
    order: Literal["little", "big"] = "little" if tiff.startswith(b"II") else "big"
    start = int.from_bytes(tiff[4:8], order) + 2
    stop = start + _ENTRY_BYTES * int.from_bytes(tiff[start - 2 : start], order)
    for entry in range(start, min(stop, len(tiff)), _ENTRY_BYTES):
        if int.from_bytes(tiff[entry : entry + 2], order) == _ORIENTATION:
            orientation = int.from_bytes(tiff[entry + 8 : entry + 10], order)
            return orientation if 1 <= orientation <= 8 else 1
    return 1


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, start and stop of the content of each segment before the first scan; what lies between is skipped."""
    place = 2
    while 0 <= (place := data.find(_FILL, place)) < len(data) - 1:
        marker = data[place + 1]
        if marker == _FILL:
            place += 1
        elif marker in _WITHOUT_LENGTH:
            place += 2
        elif marker in (_START_OF_SCAN, _END_OF_IMAGE):
            return
        else:
            stop = place + 2 + _two_bytes(data, place + 2)
            yield marker, place + 4, stop
            place = stop


def _two_bytes(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 2], "big")
