"""The decoder seam: from the bytes of an image file to its raster, by the library that was chosen.

Whichever decodes, sizes come from the header, images are turned by the same lines, and errors read alike. A library
is asked for one thing alone: the raster of a JPEG as it is stored, or a part of it. Every other format is Pillow's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from PIL.ImageFile import ImageFile
from torch import Tensor

from lockstep.checks import check_one_of, check_range
from lockstep.errors import DataError, InputError
from lockstep.images import jpeg, pillow
from lockstep.images.jpeg import JpegHeader, TurboJpeg, turbojpeg
from lockstep.tracing import timed

DECODERS = ("auto", "turbojpeg", "torchcodec", "pillow")

# What an orientation asks for: whether to exchange rows and columns, then which axes to flip.
_ROWS, _COLUMNS = -2, -1
_TURNS: dict[int, tuple[bool, list[int]]] = {
    1: (False, []),
    2: (False, [_COLUMNS]),
    3: (False, [_ROWS, _COLUMNS]),
    4: (False, [_ROWS]),
    5: (True, []),
    6: (True, [_COLUMNS]),
    7: (True, [_ROWS, _COLUMNS]),
    8: (True, [_ROWS]),
}

_logger = logging.getLogger("lockstep")


class Region(NamedTuple):
    """A part of an image, in pixels of the whole one."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Decoding:
    """How the images of a reader are decoded.

    Raises:
        InputError: there is no such decoder, the one asked for cannot be loaded, or the limit is below 1.
    """

    decoder: str = "auto"
    """What decodes JPEGs: "turbojpeg", "torchcodec", "pillow", or "auto" for the first of these that can be loaded. The
    first decodes little more than the region asked for, and leaves to the next what it has doubts about; damage beyond
    the region it does not see. Their pixels are the same as long as their versions of libjpeg-turbo compute alike."""
    exif: bool = False
    """Turn images as their EXIF orientation asks for. Boxes are most often those of the raster as it is stored."""
    max_pixels: int = 100_000_000
    """Larger images are refused by their header, before memory is taken: 3 bytes a pixel."""

    def __post_init__(self) -> None:
        check_one_of("decoder", self.decoder, DECODERS)
        check_range("max_pixels", self.max_pixels, 1, math.inf)
        problem, expected = _problem_of(self.decoder)
        if problem:
            raise InputError(
                f"{self.decoder} cannot be used.",
                given=problem,
                expected=expected,
                hint='install it, or leave the decoder at "auto"',
            )

    @property
    def chosen(self) -> str:
        """The libraries that decode, with their versions: what a run has to name, since pixels depend on them."""
        fast = (library.name for library in (self._turbojpeg, self._torchcodec) if library)
        return "; ".join([*fast, pillow.version()])

    def size(self, data: bytes, source: str) -> tuple[int, int]:
        """Width and height in pixels of what `decode` gives, by the header alone.

        Raises:
            DataError: as `decode`, but for what only the pixels show.
        """
        return self._header(data, source).size

    def decode(
        self, data: bytes, source: str, region: Region | None = None, at_least: tuple[int, int] | None = None
    ) -> Tensor:
        """The image, or a region of it: uint8 of shape (3, height, width), most often with channels last in memory.

        Args:
            data: the bytes of the file.
            source: what to call it in an error.
            region: the part wanted, in pixels of the image that `size` tells.
            at_least: height and width. A JPEG may then be decoded at a half, a quarter or an eighth, as long as the
                region does not become smaller than this: faster, but other pixels than those of a full decode and a
                resize. The region's edges move outwards to the next pixel.

        Raises:
            DataError: the data is damaged, of no known format, or larger than `max_pixels`.
            InputError: the region does not lie within the image, or `at_least` is below 1.
        """
        header = self._header(data, source)
        part = top, left, height, width = _within(region, header.size, source)
        factor = _factor(height, width, at_least) if isinstance(header.opened, JpegHeader) else 1
        with _naming(source):
            if factor == 1 and header.orientation == 1:
                return self._raster(data, header, part)
            stored = self._shrunk(data, header, factor) if factor > 1 else self._raster(data, header, header.whole)
            raster = _turned(stored, header.orientation)
        return raster[:, top // factor : -(-(top + height) // factor), left // factor : -(-(left + width) // factor)]

    @property
    def _turbojpeg(self) -> TurboJpeg | None:
        fast = turbojpeg() if self.decoder in ("auto", "turbojpeg") else None
        return fast if fast and not fast.problem else None

    @property
    def _torchcodec(self) -> _Torchcodec | None:
        fast = None if self.decoder == "pillow" else _torchcodec()
        return fast if fast and not fast.problem else None

    def _header(self, data: bytes, source: str) -> _Header:
        """Raises DataError where there is none, or where it announces too many pixels."""
        with _naming(source):
            header = _read_header(data, self.exif)
        if math.prod(header.size) > self.max_pixels:
            width, height = header.size
            raise DataError(
                f"{source} is too large to be decoded.",
                given=f"a header that announces {width} x {height} pixels, in {len(data)} bytes",
                expected=f"at most {self.max_pixels} pixels",
                hint="leave it out; if it is what it says, shrink it, or decode with a larger max_pixels",
            )
        return header

    def _raster(self, data: bytes, header: _Header, part: Region) -> Tensor:
        """A part of the raster as it is stored."""
        if isinstance(header.opened, ImageFile):
            return pillow.raster_of(header.opened, part)
        fast = self._turbojpeg
        # What comes after the part would be missed by nobody.
        if fast and (part == header.whole or jpeg.is_whole(data, header.opened)):
            pixels = fast.decode(data, header.stored, part)
            if pixels is not None:
                return pixels
        data = jpeg.without_exif(data, header.opened)
        if library := self._torchcodec:
            whole = library.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            _check_size((whole.shape[2], whole.shape[1]), header.stored)
            return whole[:, part.top : part.top + part.height, part.left : part.left + part.width]
        image = pillow.open_image(data)
        _check_size(image.size, header.stored)
        return pillow.raster_of(image, part)

    def _shrunk(self, data: bytes, header: _Header, factor: int) -> Tensor:
        """All of a JPEG, every `factor`th pixel each way."""
        image = pillow.shrunk(pillow.open_image(data), factor)
        _check_size(image.size, (-(-header.stored[0] // factor), -(-header.stored[1] // factor)))
        return pillow.raster_of(image)


class _Header(NamedTuple):
    """What is known of an image before it is decoded."""

    stored: tuple[int, int]
    """Width and height of the raster as it is stored."""
    orientation: int
    """As EXIF numbers them; 1 where the image is not to be turned."""
    opened: JpegHeader | ImageFile
    """A JPEG's header alone: which library decodes it is still open."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height once it is turned."""
        width, height = self.stored
        return (height, width) if _TURNS[self.orientation][0] else (width, height)

    @property
    def whole(self) -> Region:
        """All of the raster as it is stored."""
        return Region(0, 0, self.stored[1], self.stored[0])


def _read_header(data: bytes, exif: bool) -> _Header:
    if data.startswith(jpeg.START):
        header = jpeg.read_jpeg_header(data)
        content = data[slice(*header.exif[0])] if exif and header.exif else b""
        return _Header(header.size, jpeg.orientation_of(content), header)
    image = pillow.open_image(data)
    content = image.info.get("exif", b"") if exif else b""
    return _Header(image.size, jpeg.orientation_of(content), image)


def _within(region: Region | None, size: tuple[int, int], source: str) -> Region:
    """The region, or all of the image."""
    width, height = size
    if region is None:
        return Region(0, 0, height, width)
    top, left, rows, columns = region
    if min(top, left) < 0 or min(rows, columns) < 1 or top + rows > height or left + columns > width:
        raise InputError(
            f"A region does not lie within {source}.",
            given=f"{rows} x {columns} pixels from row {top} and column {left} on",
            expected=f"one pixel or more, within {height} rows and {width} columns",
            hint="clip the region to the image",
        )
    return region


def _check_size(size: tuple[int, int], announced: tuple[int, int]) -> None:
    """Refuse a raster of another width or height than its header announces."""
    if size != announced:
        raise ValueError(f"{size[1]} rows and {size[0]} columns, announced as {announced[1]} and {announced[0]}")


def _factor(height: int, width: int, at_least: tuple[int, int] | None) -> int:
    """By how much a JPEG may be shrunk while it is decoded, for a region not to become smaller than asked for."""
    if at_least is None:
        return 1
    check_range("at_least", min(at_least), 1, math.inf)
    fits = (factor for factor in (8, 4, 2) if height // factor >= at_least[0] and width // factor >= at_least[1])
    return next(fits, 1)


def _turned(raster: Tensor, orientation: int) -> Tensor:
    exchange, flips = _TURNS[orientation]
    raster = raster.transpose(_ROWS, _COLUMNS) if exchange else raster
    return raster.flip(flips) if flips else raster


def _problem_of(decoder: str) -> tuple[str, str]:
    """Why a decoder cannot be used, "" if it can; and what would be needed."""
    if decoder == "turbojpeg":
        return turbojpeg().problem, "libjpeg-turbo 3.0 or later with its TurboJPEG interface, where the system finds it"
    problem = _torchcodec().problem if decoder == "torchcodec" else ""
    return problem, "torchcodec 0.16 or later, of the build that fits torch"


class _Torchcodec(NamedTuple):
    decode: Callable[[Tensor], Tensor]
    """From the bytes of a JPEG to uint8 of shape (3, height, width), turned by EXIF if there is one."""
    name: str
    problem: str
    """Why it cannot be used; "" if it can."""


@cache
def _torchcodec() -> _Torchcodec:
    try:
        from torchcodec import __version__
        from torchcodec.decoders import decode_jpeg
    except Exception as error:  # A library that does not fit torch fails in many ways.
        problem = f"{type(error).__name__}: {error}"
        is_installed = not (isinstance(error, ModuleNotFoundError) and error.name == "torchcodec")
        _logger.log(logging.INFO if is_installed else logging.DEBUG, "torchcodec is not used: %s", problem)
        return _Torchcodec(torch.clone, "", problem)
    return _Torchcodec(decode_jpeg, f"torchcodec {__version__}", "")


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Name the image in the error of a library that reads it: damaged data raises anything."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        # Of other errors the message alone may not say enough.
        reason = str(error) if type(error) in (ValueError, OSError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"{source} cannot be decoded.",
            given=reason,
            expected=f"a whole image, in {pillow.FORMATS}",
            hint="copy, repair or convert the file, or leave it out of the data",
        ) from error


AS_STORED = Decoding()


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """The bytes of an image file, of any format that `Decoding` knows; one entry of a field of a batch."""

    data: bytes = field(repr=False)
    source: str
    """The file, or the record and its file, as errors name it."""
    decoding: Decoding = AS_STORED

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, by the header alone.

        Raises:
            DataError: there is no whole header, of no known format, or it announces too many pixels.
        """
        return self.decoding.size(self.data, self.source)

    def decode(self, region: Region | None = None, at_least: tuple[int, int] | None = None) -> Tensor:
        """The image, or a region of it: uint8 of shape (3, height, width), red, green and blue.

        Args:
            region: the part wanted, in pixels of the whole image.
            at_least: the height and width below which a JPEG must not be shrunk while it is decoded; see `Decoding`.

        Raises:
            DataError: it is damaged, of no known format, or too large.
            InputError: the region does not lie within the image.
        """
        with timed("decode"):
            return self.decoding.decode(self.data, self.source, region, at_least)
