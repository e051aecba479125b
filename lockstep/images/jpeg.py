"""JPEGs: their header, and the libraries that decode them, each where this system has it.

The header is read by hand: it takes microseconds, allocates nothing for the pixels, and is the same whichever library
decodes. Markers as in ITU-T T.81, annex B; the orientation as in Exif 2.32, which holds a TIFF directory.

A library decodes plain images, whose pixels are the same for all of libjpeg-turbo. Whatever it warns of is left to
Pillow, whose judgement of damaged data so holds for all.

TurboJPEG of libjpeg-turbo 3.0 or later decodes a part alone. Of the rows below the part it decodes nothing, and of what
lies beside and above it not everything: a random crop of a photo takes three quarters of the time. simplejpeg and
torchcodec always decode the whole image.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from lockstep.screen import log

if TYPE_CHECKING:
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
_EXIF_SEGMENT, _OTHER_SEGMENT = 0xE1, 0xEF
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
    stop: int
    """Where its last segment stops: scans follow."""
    has_gaps: bool
    """Whether anything lies between its segments: what decoders accept there differs."""


def read_jpeg_header(data: bytes) -> JpegHeader:
    """Read the header of a JPEG.

    Raises:
        ValueError: it announces no frame, or an empty one, before the first scan.
    """
    size, components, exif, stop, has_gaps = None, 0, [], 2, False
    for marker, start, end in _segments(data):
        has_gaps |= start != stop + _SEGMENT.size
        stop = end
        if marker in _FRAMES and size is None:
            size = _two_bytes(data, start + 3), _two_bytes(data, start + 1)
            components = int.from_bytes(data[start + 5 : start + 6])
        elif marker == _EXIF_SEGMENT and data.startswith(_EXIF, start):
            exif.append((start, end))
    if size is None or not all(size):
        raise ValueError("no size in the header of a JPEG")
    return JpegHeader(size, components, exif, stop, has_gaps)


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


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and stop of each segment before the first scan; bytes between segments are skipped."""
    place = 2
    while 0 <= place <= len(data) - _SEGMENT.size:
        first, marker, length = _SEGMENT.unpack_from(data, place)
        if first != _FILL:
            place = data.find(_FILL, place)
        elif marker == _FILL:
            place += 1
        elif marker in _WITHOUT_LENGTH:
            place += 2
        elif marker in (_START_OF_SCAN, _END_OF_IMAGE):
            return
        else:
            stop = place + 2 + length
            yield marker, place + 4, stop
            place = stop


def _two_bytes(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 2], "big")


_LIBRARIES = ("libturbojpeg.dylib",) if sys.platform == "darwin" else ("libturbojpeg.so.0", "libturbojpeg.so")

# Of turbojpeg.h.
_DECOMPRESS, _RGB_PIXELS = 1, 0
_STOP_ON_WARNING, _SUBSAMPLING, _WIDTH, _HEIGHT, _PRECISION, _COLOURS, _LOSSLESS = 0, 4, 5, 6, 7, 8, 15
# RGB, YCbCr and grey.
_COLOUR_SPACES = (0, 1, 2)

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

    def decode(data: bytes, header: JpegHeader, part: Region) -> Tensor | None:
        width, height = header.size
        raster = torch.empty(height, width, 3, dtype=torch.uint8)
        try:
            # By default as Pillow has it: the accurate transform, smooth colours. It raises for each warning.
            decoded = decode_jpeg(data, buffer=raster.numpy())
        except ValueError:
            return None
        return part.cut(raster.permute(2, 0, 1)) if decoded.shape == raster.shape else None

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
