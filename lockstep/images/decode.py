"""The decoder seam: from the bytes of an image file to its raster, by the library that was chosen.

Whichever decodes, sizes come from the header, images are turned by the same lines, and errors read alike. A library
is asked for one thing alone: the raster of a JPEG as it is stored. Every other format is Pillow's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from PIL.ImageFile import ImageFile
from torch import Tensor

from lockstep.checks import check_one_of, check_range
from lockstep.errors import DataError, InputError
from lockstep.images import jpeg_header, pillow
from lockstep.images.jpeg_header import JpegHeader

DECODERS = ("auto", "torchcodec", "pillow")

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
    """What decodes JPEGs: "torchcodec", "pillow", or "auto" for torchcodec where it can be loaded, else Pillow."""
    exif: bool = False
    """Turn images as their EXIF orientation asks for. Boxes are most often those of the raster as it is stored."""
    max_pixels: int = 100_000_000
    """Larger images are refused by their header, before memory is taken: 3 bytes a pixel."""

    def __post_init__(self) -> None:
        check_one_of("decoder", self.decoder, DECODERS)
        check_range("max_pixels", self.max_pixels, 1, math.inf)
        if self.decoder == "torchcodec" and (problem := _torchcodec().problem):
            raise InputError(
                "torchcodec cannot be used.",
                given=problem,
                expected="torchcodec 0.16 or later, of the build that fits torch",
                mend='install it, or leave the decoder at "auto"',
            )

    @property
    def chosen(self) -> str:
        """The libraries that decode, with their versions: what a run has to name, since pixels depend on them."""
        fast = self._torchcodec
        return f"{fast.name}; {pillow.version()}" if fast else pillow.version()

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
        top, left, height, width = _within(region, header.size, source)
        factor = _factor(height, width, at_least) if isinstance(header.opened, JpegHeader) else 1
        with _naming(source):
            raster = _turned(self._raster(data, header, factor), header.orientation)
        bottom, right = -(-(top + height) // factor), -(-(left + width) // factor)
        return raster[:, top // factor : bottom, left // factor : right]

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
                mend="leave it out; if it is what it says, shrink it, or decode with a larger max_pixels",
            )
        return header

    def _raster(self, data: bytes, header: _Header, factor: int) -> Tensor:
        """The raster as it is stored, of a JPEG every `factor`th pixel each way."""
        if isinstance(header.opened, ImageFile):
            return pillow.raster_of(header.opened)
        data = jpeg_header.without_exif(data, header.opened)
        if factor == 1 and (fast := self._torchcodec):
            raster = fast.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        else:
            raster = pillow.raster_of(pillow.shrunk(pillow.open_image(data), factor))
        stored = -(-header.stored[1] // factor), -(-header.stored[0] // factor)
        if raster.shape[1:] != stored:
            raise ValueError(f"{tuple(raster.shape[1:])} rows and columns, announced as {stored}")
        return raster


AS_STORED = Decoding()


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


def _read_header(data: bytes, exif: bool) -> _Header:
    if data.startswith(jpeg_header.START):
        header = jpeg_header.read_header(data)
        content = data[slice(*header.exif[0])] if exif and header.exif else b""
        return _Header(header.size, jpeg_header.orientation_of(content), header)
    image = pillow.open_image(data)
    content = image.info.get("exif", b"") if exif else b""
    return _Header(image.size, jpeg_header.orientation_of(content), image)


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
            mend="clip the region to the image",
        )
    return region


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
        _logger.info("torchcodec is not used: %s", problem)
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
            mend="copy, repair or convert the file, or leave it out of the data",
        ) from error
