"""JPEGs: their header, and the libraries that decode them, each where this system has it.

The header is read by hand: it takes microseconds, allocates nothing for the pixels, and is the same whichever library
decodes. Markers as in ITU-T T.81, annex B; the orientation as in Exif 2.32, which holds a TIFF directory.

A library decodes plain images, whose pixels are the same for all of libjpeg-turbo. Whatever it warns of is left to
Pillow, whose judgement of damaged data so holds for all.

TurboJPEG of libjpeg-turbo 3.0 or later decodes a part alone. Of the rows below the part it decodes nothing, and of what
lies beside and above it not everything: a random crop of a photo takes three quarters of the time. simplejpeg decodes
whole images: to spare the rows below the part it is given a header that announces no more than the rows above them,
and so warns of the bytes that are left over, and of nothing else if these rows are whole. torchcodec always decodes the
whole image.
"""

from __future__ import annotations

import ctypes
import logging
import re
import struct
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from lockstep.screen import log

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from lockstep.images.moves import Region

START = b"\xff\xd8\xff"
TURBO = "libjpeg-turbo"
"""Stands in the name of every decoder that computes pixels as this library does."""

_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_SCAN, _END = bytes([0xFF, _START_OF_SCAN]), bytes([0xFF, _END_OF_IMAGE])
_FILL = 0xFF
# Stuffed bytes, TEM, restarts and the start of the image: markers that no length follows.
_WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xD9)}
# Start of a frame; of these codes DHT, JPG and DAC are something else.
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_EXIF_SEGMENT, _OTHER_SEGMENT, _RESTART_SEGMENT = 0xE1, 0xEF, 0xDD
# Frames of rows that one scan gives from top to bottom, in Huffman's code.
_SEQUENTIAL = (0xC0, 0xC1)
_EXIF = b"Exif\0\0"
# A byte of ones, the marker, and the length, which counts itself.
_SEGMENT = struct.Struct(">BBH")
# The content of a segment comes after its marker's second byte and two bytes of length.
_MARKER_BEFORE = 3

_ORIENTATION = 0x0112
_ENTRY_BYTES = 12


class JpegHeader(NamedTuple):
    """The header of a JPEG: facts of the raster as it is stored, not yet turned."""

    size: tuple[int, int]
    """Width and height in pixels."""
    components: int
    """Samples of a pixel: 1 is grey, 3 are colours of a screen, 4 those of a printer."""
    exif: list[tuple[int, int]]
    """Where the content of each EXIF segment starts and stops; more than one is rare."""
    frame: int
    """Where the content of the frame's segment starts, which tells the size."""
    stop: int
    """Where its last segment stops: scans follow."""
    has_gaps: bool
    """Whether anything lies between its segments: what decoders accept there differs."""
    is_sequential: bool
    """Whether its frame is one whose scan gives rows from top to bottom, with no marker between them."""


def read_jpeg_header(data: bytes) -> JpegHeader:
    """Read the header of a JPEG.

    Raises:
        ValueError: it announces no frame, or an empty one, before the first scan.
    """
    frame, exif, has_gaps, is_sequential, has_restarts = 0, [], False, False, False
    place = stop = 2
    while 0 <= place <= len(data) - _SEGMENT.size:
        first, marker, length = _SEGMENT.unpack_from(data, place)
        if first != _FILL:  # bytes between segments are skipped
            place = data.find(_FILL, place)
        elif marker == _FILL:
            place += 1
        elif marker in _WITHOUT_LENGTH:
            place += 2
        elif marker in (_START_OF_SCAN, _END_OF_IMAGE):
            break
        else:
            has_gaps |= place != stop
            start, stop = place + _SEGMENT.size, place + 2 + length
            if marker in _FRAMES and not frame:
                frame, is_sequential = start, marker in _SEQUENTIAL
            elif marker == _EXIF_SEGMENT and data.startswith(_EXIF, start):
                exif.append((start, stop))
            elif marker == _RESTART_SEGMENT:
                has_restarts = True
            place = stop
    size = _two_bytes(data, frame + 3), _two_bytes(data, frame + 1)
    if not frame or not all(size):
        raise ValueError("no size in the header of a JPEG")
    components = int.from_bytes(data[frame + 5 : frame + 6])
    return JpegHeader(size, components, exif, frame, stop, has_gaps, is_sequential and not has_restarts)


def without_exif(data: bytes, header: JpegHeader) -> bytes:
    """Rename the EXIF segments to segments that no decoder knows: it then gives the raster as it is stored.

    Decoders differ in what they do about an orientation, and warn of segments that are damaged.
    """
    if not header.exif:
        return data
    changed = bytearray(data)
    for start, _ in header.exif:
        changed[start - _MARKER_BEFORE] = _OTHER_SEGMENT
    return bytes(changed)


def is_plain(data: bytes, header: JpegHeader) -> bool:
    """Say whether it is grey or of a screen's colours, with a tidy header, a scan and an end: all decode it alike."""
    is_tidy = not header.has_gaps and data.startswith(_SCAN, header.stop)
    return is_tidy and header.components in (1, 3) and data.rfind(_END, header.stop) >= 0


def rows_needed(data: bytes, header: JpegHeader, part: Region) -> int:
    """Count the rows, from the top on, that have to be decoded to have those of a part as in the whole image.

    All of them, unless a single scan gives them from top to bottom. A row's colours are mixed with those of the next,
    and rows are coded so many at once.
    """
    height, components = header.size[1], header.components
    if not header.is_sequential or data[header.stop + 4 : header.stop + 5] != bytes([components]):
        return height
    factors = data[header.frame + 7 : header.frame + 6 + 3 * components : 3]  # across and down, half a byte each
    coded = 8 * max(1, *(factor & 15 for factor in factors))
    return min(height, -(-(part.top + part.height + 2) // coded) * coded)


def with_rows(data: bytes, header: JpegHeader, rows: int) -> bytes | bytearray:
    """Announce another number of rows in the frame of a JPEG."""
    if rows == header.size[1]:
        return data
    changed = bytearray(data)
    changed[header.frame + 1 : header.frame + 3] = rows.to_bytes(2)
    return changed


def orientation_of(exif: bytes) -> int:
    """Read the orientation from the content of an EXIF segment, 1 to 8; 1 (upright) where it holds none."""
    tiff = exif.removeprefix(_EXIF)
    order: Literal["little", "big"] = "little" if tiff.startswith(b"II") else "big"
    start = int.from_bytes(tiff[4:8], order) + 2
    stop = start + _ENTRY_BYTES * int.from_bytes(tiff[start - 2 : start], order)
    for entry in range(start, min(stop, len(tiff)), _ENTRY_BYTES):
        if int.from_bytes(tiff[entry : entry + 2], order) == _ORIENTATION:
            orientation = int.from_bytes(tiff[entry + 8 : entry + 10], order)
            return orientation if 1 <= orientation <= 8 else 1
    return 1


def _two_bytes(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 2], "big")


_LIBRARIES = ("libturbojpeg.dylib",) if sys.platform == "darwin" else ("libturbojpeg.so.0", "libturbojpeg.so")

# Of turbojpeg.h.
_DECOMPRESS, _RGB_PIXELS = 1, 0
_STOP_ON_WARNING, _SUBSAMPLING, _WIDTH, _HEIGHT, _PRECISION, _COLOURS, _LOSSLESS = 0, 4, 5, 6, 7, 8, 15
# RGB, YCbCr and grey.
_COLOUR_SPACES = (0, 1, 2)

# What libjpeg-turbo says once all rows that were announced are decoded, and the scan goes on up to the end's marker.
_BYTES_LEFT_OVER = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9")

# By the number of the subsampling, 4:4:4, 4:2:2, 4:2:0 or grey: the columns that are coded together, and how many to
# the left and right have a part in a pixel's colours. Others are rare, and left to Pillow.
_COLUMNS = {0: (8, 0), 1: (16, 16), 2: (16, 16), 3: (8, 0)}


class JpegDecoder(NamedTuple):
    """A library that decodes JPEGs."""

    decode: Callable[[bytes, JpegHeader, Region], Tensor | None]
    """Decodes, from the bytes of a plain JPEG, its header, and a part within its size, that part: uint8 of shape
    (3, height, width); None where Pillow has to do it. Damage beyond the part may go unseen."""
    name: str
    """As a run names it, with its version as far as it tells one."""
    problem: str = ""
    """Why it cannot be used; "" if it can."""
    needed: str = ""
    """What has to be installed for it."""


@cache
def turbojpeg() -> JpegDecoder:
    """Load TurboJPEG from where the system looks for libraries."""
    problems = []
    for name in _LIBRARIES:
        try:
            return JpegDecoder(_TurboJpeg(ctypes.CDLL(name)).decode, f"TurboJPEG 3 in {name} ({TURBO})")
        except (OSError, AttributeError) as error:  # None, or an older one without these functions.
            problems.append(str(error))
    return _missing(
        "; ".join(problems), "libjpeg-turbo 3.0 or later with its TurboJPEG interface, where the system finds it"
    )


@cache
def simplejpeg() -> JpegDecoder:
    """Load simplejpeg, which brings a libjpeg-turbo of its own."""
    try:
        from simplejpeg import __version__, decode_jpeg
    except Exception as error:
        return _missing(_import_problem("simplejpeg", error, logging.INFO), "simplejpeg 1.9 or later")

    def upper(data: bytes, header: JpegHeader, rows: int) -> npt.NDArray[np.uint8] | None:
        width, height = header.size
        raster = np.empty((rows, width, 3), np.uint8)
        try:
            # By default as Pillow has it: the accurate transform, smooth colours. It raises for the first warning.
            decoded = decode_jpeg(with_rows(data, header, rows), buffer=raster)
            is_whole = rows == height and decoded.shape == raster.shape
        except ValueError as warning:
            is_whole = rows < height and _BYTES_LEFT_OVER.fullmatch(str(warning)) is not None
        return raster if is_whole else None

    def decode(data: bytes, header: JpegHeader, part: Region) -> Tensor | None:
        rows = rows_needed(data, header, part)
        raster = upper(data, header, rows)
        if raster is None and rows < header.size[1]:
            raster = upper(data, header, header.size[1])
        if raster is None:
            return None
        top, left, height, width = part  # numpy cuts it out in a fifth of torch's time
        return torch.from_numpy(raster[top : top + height, left : left + width]).permute(2, 0, 1)

    return JpegDecoder(decode, f"simplejpeg {__version__} ({TURBO})")


@cache
def torchcodec() -> JpegDecoder:
    """Load torchcodec."""
    try:
        from torchcodec import __version__
        from torchcodec.decoders import decode_jpeg
    except Exception as error:  # A library that does not fit torch fails in many ways.
        problem = _import_problem("torchcodec", error, logging.DEBUG)
        return _missing(problem, "torchcodec 0.16 or later, of the build that fits torch")

    def decode(data: bytes, header: JpegHeader, part: Region) -> Tensor:
        upright = without_exif(data, header)  # It would turn the image.
        whole: Tensor = decode_jpeg(torch.frombuffer(bytearray(upright), dtype=torch.uint8))
        check_raster_size((whole.shape[2], whole.shape[1]), header.size)
        return part.cut(whole)

    return JpegDecoder(decode, f"torchcodec {__version__} ({TURBO})")


LIBRARIES = {"turbojpeg": turbojpeg, "simplejpeg": simplejpeg, "torchcodec": torchcodec}
"""What loads each of them, the fastest first."""


def _missing(problem: str, needed: str) -> JpegDecoder:
    return JpegDecoder(lambda data, header, part: None, "", problem, needed)


def _import_problem(library: str, error: Exception, level_if_missing: int) -> str:
    """Log why a library cannot be imported, and return it."""
    problem = f"{type(error).__name__}: {error}"
    is_missing = isinstance(error, ModuleNotFoundError) and error.name == library
    log.log(level_if_missing if is_missing else logging.INFO, "%s is not used: %s", library, problem)
    return problem


def check_raster_size(size: tuple[int, int], announced: tuple[int, int]) -> None:
    """Refuse a raster of another width or height than its header announces."""
    if size != announced:
        raise ValueError(f"{size[1]} rows and {size[0]} columns, announced as {announced[1]} and {announced[0]}")


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("left", "top", "width", "height")]


_WHOLE = _Region(0, 0, 0, 0)


class _TurboJpeg:
    """Decodes on any thread; each thread has a handle of its own."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, data, length = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t

        def function(name: str, result: Any, *arguments: Any) -> Any:
            found = getattr(library, name)
            found.restype, found.argtypes = result, arguments
            return found

        self._init = function("tj3Init", pointer, integer)
        self._destroy = function("tj3Destroy", None, pointer)
        self._set = function("tj3Set", integer, pointer, integer, integer)
        self._get = function("tj3Get", integer, pointer, integer)
        self._read_header = function("tj3DecompressHeader", integer, pointer, data, length)
        self._choose = function("tj3SetCroppingRegion", integer, pointer, _Region)
        self._decompress = function("tj3Decompress8", integer, pointer, data, length, pointer, integer, integer)
        self._of_thread = threading.local()

    def decode(self, data: bytes, header: JpegHeader, part: Region) -> Tensor | None:
        handle = self._handle()
        pixels = self._decoded(handle, data, header.size, part)
        if pixels is None:
            del self._of_thread.handle  # An error leaves it in a state that the next image would meet.
        return pixels

    def _decoded(self, handle: int, data: bytes, size: tuple[int, int], part: Region) -> Tensor | None:
        self._choose(handle, _WHOLE)  # A header is refused that does not fit the part chosen last.
        if self._read_header(handle, data, len(data)) or not (columns := self._columns(handle, size)):
            return None
        top, left, height, width = part
        first, last = _widened(left, left + width, size[0], *columns)
        raster = torch.empty(height, last - first, 3, dtype=torch.uint8)
        if self._choose(handle, _Region(first, top, last - first, height)):
            return None
        if self._decompress(handle, data, len(data), raster.data_ptr(), 0, _RGB_PIXELS):
            return None
        return raster[:, left - first : left - first + width].permute(2, 0, 1)

    def _handle(self) -> int:
        if not hasattr(self._of_thread, "handle"):
            self._of_thread.handle = _Handle(self._init(_DECOMPRESS), self._destroy)
            self._set(self._of_thread.handle.pointer, _STOP_ON_WARNING, 1)
        pointer: int = self._of_thread.handle.pointer
        return pointer

    def _columns(self, handle: int, size: tuple[int, int]) -> tuple[int, int] | None:
        """Look up how columns are coded; None for an image of another size or kind than is decoded here."""

        def of(*numbers: int) -> tuple[int, ...]:
            return tuple(self._get(handle, number) for number in numbers)

        *kind, colours, subsampling = of(_WIDTH, _HEIGHT, _PRECISION, _LOSSLESS, _COLOURS, _SUBSAMPLING)
        if kind != [*size, 8, 0] or colours not in _COLOUR_SPACES:
            return None
        return _COLUMNS.get(subsampling)


class _Handle:
    """The memory of libjpeg-turbo for one thread, freed when the thread ends."""

    def __init__(self, pointer: int | None, destroy: Callable[[int], None]) -> None:
        if pointer is None:
            raise MemoryError("for a decoder of JPEGs")
        self.pointer = pointer
        self._destroy = destroy

    def __del__(self) -> None:
        self._destroy(self.pointer)


def _widened(left: int, right: int, width: int, coded: int, reach: int) -> tuple[int, int]:
    """Widen a span of columns so that those from `left` to `right` are decoded as in the whole image."""
    return max(left - reach, 0) // coded * coded, min(right + reach, width)
