"""Image files to pixels: `EncodedImage` is a file not decoded yet, `Decoding` says how it becomes a raster.

Whichever library decodes, sizes come from the header, images are turned by the same lines, and errors read alike. A
library is only asked for the raster of a JPEG as it is stored, or for a part of it. Whatever it leaves, and every other
format, is Pillow's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

from lockstep.checks import Checked, OneOf, PositiveInt, check_value
from lockstep.errors import DataError, InputError
from lockstep.images import jpeg, pillow
from lockstep.images.jpeg import LIBRARIES, JpegDecoder, JpegHeader, check_raster_size
from lockstep.images.moves import AS_IT_IS, Region, Turn
from lockstep.tracing import timed

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile
    from torch import Tensor

DECODERS = ("auto", *LIBRARIES, "pillow")

# For each EXIF orientation: how the raster is turned.
_TURNS = {
    1: AS_IT_IS,
    2: Turn(False, False, True),
    3: Turn(False, True, True),
    4: Turn(False, True, False),
    5: Turn(True, False, False),
    6: Turn(True, False, True),
    7: Turn(True, True, True),
    8: Turn(True, True, False),
}


@dataclass(frozen=True)
class Decoding(Checked):
    """How the images of a reader are decoded."""

    decoder: Annotated[str, OneOf(DECODERS)] = "auto"
    """The library for JPEGs: "turbojpeg", "simplejpeg", "torchcodec", "pillow", or "auto" for the first of these that
    can be loaded. All give the same pixels. TurboJPEG decodes little more than the region asked for, simplejpeg no rows
    far below it: they do not see damage there. The others decode the whole image."""
    exif: bool = False
    """Turn images as their EXIF orientation asks for. Boxes are most often those of the raster as it is stored."""
    max_pixels: PositiveInt = 100_000_000
    """Larger images are refused by their header, before memory is taken: 3 bytes a pixel."""

    def __post_init__(self) -> None:
        super().__post_init__()
        load = LIBRARIES.get(self.decoder)
        if load and (found := load()).problem:
            raise InputError(
                f"{self.decoder} cannot be used.",
                given=found.problem,
                expected=found.needed,
                hint='install it, or leave the decoder at "auto"',
            )

    @property
    def chosen(self) -> str:
        """The library that decodes JPEGs, with its version: a run names it, since pixels depend on it."""
        library = self._library
        return library.name if library else pillow.version()

    def size(self, data: bytes, source: str) -> tuple[int, int]:
        """Read width and height in pixels from the header; raises what `decode` raises, but for damaged pixels."""
        return self._header(data, source).size

    def decode(
        self, data: bytes, source: str, region: Region | None = None, at_least: tuple[int, int] | None = None
    ) -> Tensor:
        """Decode the image, or a region of it: uint8 of shape (3, height, width), most often channels last in memory.

        Args:
            data: the bytes of the file.
            source: what to call it in an error.
            region: the part wanted, in pixels of the image that `size` tells.
            at_least: height and width. A JPEG may then be decoded at a half, a quarter or an eighth, as long as the
                region does not become smaller than this: faster, but other pixels than those of a full decode and a
                resize. The region's edges move outwards to the next pixel.
        """
        return self._decoded(data, source, self._header(data, source), region, at_least)

    def _decoded(
        self, data: bytes, source: str, header: _Header, region: Region | None, at_least: tuple[int, int] | None
    ) -> Tensor:
        part = top, left, height, width = _within(region, header.size, source)
        factor = _factor(height, width, at_least) if isinstance(header.opened, JpegHeader) else 1
        with _naming(source):
            if factor == 1 and header.orientation == 1:
                return self._raster(data, header, part)
            stored = self._shrunk(data, header, factor) if factor > 1 else self._raster(data, header, header.whole)
            raster = _TURNS[header.orientation](stored)
        return raster[:, top // factor : -(-(top + height) // factor), left // factor : -(-(left + width) // factor)]

    @property
    def _library(self) -> JpegDecoder | None:
        """The library for plain JPEGs; None for Pillow."""
        for name, load in LIBRARIES.items():
            if self.decoder in ("auto", name) and not load().problem:
                return load()
        return None

    def _header(self, data: bytes, source: str) -> _Header:
        """Read the header, and refuse one that announces too many pixels."""
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
        if not isinstance(header.opened, JpegHeader):
            return pillow.raster_of(header.opened, part)
        if (library := self._library) and jpeg.is_plain(data, header.opened):
            pixels = library.decode(data, header.opened, part)
            if pixels is not None:
                return pixels
        image = pillow.open_image(jpeg.without_exif(data, header.opened))
        check_raster_size(image.size, header.stored)
        return pillow.raster_of(image, part)

    def _shrunk(self, data: bytes, header: _Header, factor: int) -> Tensor:
        """Decode all of a JPEG at 1 / factor of its size, rounded up; a factor of 2, 4 or 8, and at most its size."""
        image = pillow.open_image(data)
        # Pillow takes the largest factor whose result is not below the size asked for: for this size that is `factor`.
        image.draft(None, (image.width // factor, image.height // factor))
        check_raster_size(image.size, (-(-header.stored[0] // factor), -(-header.stored[1] // factor)))
        return pillow.raster_of(image)


AS_STORED = Decoding()


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """The bytes of an image file, of any format that `Decoding` knows; one entry of a field of a batch.

    It may stand for a part of the file's image, turned: no more than that part is decoded, when it is asked for.
    """

    data: bytes = field(repr=False)
    source: str
    """The file, or the record and its file, as errors name it."""
    decoding: Decoding = AS_STORED
    part: Region | None = None
    """The part of the file's image; None for all of it."""
    turn: Turn = AS_IT_IS
    """How the part is turned."""
    # What is known once the header is read: the image is frozen, and what it shows stays the same.
    _sides: tuple[int, int] | None = field(default=None, init=False, repr=False, compare=False)
    _jpeg_header: _Header | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, by the header alone, which is read once."""
        if self._sides is not None:
            return self._sides
        width, height = (self.part.width, self.part.height) if self.part else self._header.size
        size = self.turn.sides(width, height)
        object.__setattr__(self, "_sides", size)
        return size

    @property
    def orientation(self) -> int:
        """How EXIF asks for the stored raster to be turned, 1 to 8, whether or not it is; 1: it is upright."""
        with _naming(self.source):
            return _read_header(self.data, exif=True).orientation

    def decode(self, region: Region | None = None, at_least: tuple[int, int] | None = None) -> Tensor:
        """Decode the image, or a region of it: uint8 of shape (3, height, width), red, green and blue.

        Args and errors are those of `Decoding.decode`.
        """
        stored = self.part if region is None else self._stored(region)
        if at_least and self.turn.exchange:
            at_least = at_least[1], at_least[0]
        with timed("decode"):
            return self.turn(self.decoding._decoded(self.data, self.source, self._header, stored, at_least))

    def cropped(self, region: Region) -> EncodedImage:
        """Take a part alone; it has to lie within the image."""
        return replace(self, part=self._stored(region))

    def turned(self, by: Turn) -> EncodedImage:
        """Turn it, once more if it is turned already."""
        return replace(self, turn=self.turn.then(by))

    @property
    def _header(self) -> _Header:
        if (header := self._jpeg_header) is None:
            header = self.decoding._header(self.data, self.source)
            if isinstance(header.opened, JpegHeader):  # what Pillow has opened is used up by decoding it
                object.__setattr__(self, "_jpeg_header", header)
        return header

    def _stored(self, region: Region) -> Region:
        """Return a region of this image as one of the file's."""
        width, height = self.size
        inside = _within(region, (width, height), self.source)
        top, left, rows, columns = self.turn.region_before(inside, *self.turn.sides(height, width))
        first = self.part or Region(0, 0, 0, 0)
        return Region(first.top + top, first.left + left, rows, columns)


class _Header(NamedTuple):
    """All that is known of an image before it is decoded."""

    stored: tuple[int, int]
    """Width and height of the raster as it is stored."""
    orientation: int
    """As EXIF numbers orientations; 1 where the image is not to be turned."""
    opened: JpegHeader | ImageFile
    """An image opened by Pillow; of a JPEG the header alone, since which library decodes it is still open."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height once it is turned."""
        width, height = self.stored
        return _TURNS[self.orientation].sides(width, height)

    @property
    def whole(self) -> Region:
        """All of the raster as it is stored."""
        return Region(0, 0, self.stored[1], self.stored[0])


def _read_header(data: bytes, exif: bool) -> _Header:
    if data.startswith(jpeg.START):
        header = jpeg.read_jpeg_header(data)
        orientation = jpeg.orientation_of(data[slice(*header.exif[0])]) if exif and header.exif else 1
        return _Header(header.size, orientation, header)
    image = pillow.open_image(data)
    return _Header(image.size, jpeg.orientation_of(image.info.get("exif", b"")) if exif else 1, image)


def _within(region: Region | None, size: tuple[int, int], source: str) -> Region:
    """Return the region, which has to lie within the image, or all of the image."""
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


def _factor(height: int, width: int, at_least: tuple[int, int] | None) -> int:
    """Choose by how much to shrink a JPEG while it is decoded, so that a region is not smaller than asked for."""
    if at_least is None:
        return 1
    check_value("at_least", min(at_least), PositiveInt)
    allowed = (factor for factor in (8, 4, 2) if height // factor >= at_least[0] and width // factor >= at_least[1])
    return next(allowed, 1)


class _naming:  # noqa: N801 - used like a function, as `timed` is; a generator would cost three times as much
    """Name the image in the error of a library that reads it: damaged data raises anything."""

    __slots__ = ("_source",)

    def __init__(self, source: str) -> None:
        self._source = source

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, MemoryError):
            return
        # Of other errors the message alone may not say enough.
        reason = str(error) if type(error) in (ValueError, OSError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"{self._source} cannot be decoded.",
            given=reason,
            expected=f"a whole image, in {pillow.FORMATS}",
            hint="copy, repair or convert the file, or leave it out of the data",
        ) from error
