"""Images in a batch that are not decoded yet: whoever needs the pixels decides which, and at what size."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lockstep.images.decode import AS_STORED, Decoding, Region
from lockstep.timing import timed


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
