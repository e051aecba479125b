"""Masks of the objects in an image that are not decoded yet: decoded, they take many times the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.errors import DataError
from lockstep.images.decode import AS_STORED, Decoding

_MOST_BYTES = 1 << 31


def check_memory(count: int, height: int, width: int, source: str) -> None:
    """Refuse masks that take more than 2 GiB once they are decoded: a few bytes may ask for any number of pixels.

    Raises:
        DataError: naming their image.
    """
    if count * height * width > _MOST_BYTES:
        raise DataError(
            f"The masks of {source.removesuffix(',')} are too large to be decoded.",
            given=f"{count} masks of {width} x {height} pixels: {count * height * width} bytes",
            expected=f"at most {_MOST_BYTES} bytes, one for each pixel of each mask",
            hint="leave it out, or cut the image into smaller ones",
        )


@dataclass(frozen=True, slots=True)
class PngMasks:
    """A mask for each object of an image, each the bytes of an image file of its own, most often a PNG."""

    data: tuple[bytes, ...] = field(repr=False)
    height: int
    """Of each mask, in pixels."""
    width: int
    source: str
    """The file, or the record and its file, as errors name it."""
    decoding: Decoding = AS_STORED

    def __len__(self) -> int:
        """Number of masks."""
        return len(self.data)

    def decode(self) -> Tensor:
        """The masks: uint8 of shape (masks, height, width), 1 where a pixel is not black, else 0.

        Raises:
            DataError: one is damaged, of no known format, or its header announces another size, or they take more than
                2 GiB; this is found out before memory is taken.
        """
        sources = [f"{self.source.removesuffix(',')}, mask {number}," for number in range(len(self.data))]
        for data, source in zip(self.data, sources, strict=True):
            self._check_size(self.decoding.size(data, source), source)
        check_memory(len(self.data), self.height, self.width, self.source)
        masks = torch.empty(len(self.data), self.height, self.width, dtype=torch.uint8)
        for mask, data, source in zip(masks, self.data, sources, strict=True):
            red, green, blue = self.decoding.decode(data, source)
            torch.gt(red | green | blue, 0, out=mask)
        return masks

    def selected(self, places: Sequence[int]) -> PngMasks:
        """The masks at these places alone."""
        return replace(self, data=tuple(self.data[place] for place in places))

    def _check_size(self, size: tuple[int, int], source: str) -> None:
        width, height = size
        if (height, width) != (self.height, self.width):
            raise DataError(
                f"{source} has not the size of its image.",
                given=f"a header that announces {width} x {height} pixels",
                expected=f"{self.width} x {self.height} pixels",
                hint="write masks of the whole image",
            )


@dataclass(frozen=True, slots=True)
class DenseMasks:
    """A mask for each object of an image, of one bit a pixel."""

    bits: bytes = field(repr=False)
    """Row after row, mask after mask, the first pixel in the highest bit; `dense_masks` packs them."""
    count: int
    height: int
    width: int

    def __len__(self) -> int:
        """Number of masks."""
        return self.count

    def decode(self) -> Tensor:
        """The masks: uint8 of shape (masks, height, width), of 0 and 1."""
        pixels = np.unpackbits(np.frombuffer(self.bits, np.uint8), count=self.count * self.height * self.width)
        return torch.from_numpy(pixels).view(self.count, self.height, self.width)

    def selected(self, places: Sequence[int]) -> DenseMasks:
        """The masks at these places alone."""
        bits = np.packbits(self.decode()[list(places)].numpy()).tobytes()
        return replace(self, bits=bits, count=len(places))


def dense_masks(values: npt.NDArray[np.float32], height: int, width: int) -> DenseMasks:
    """Masks from numbers above 0 where the objects are; any shape that holds masks x height x width values."""
    return DenseMasks(np.packbits(values > 0).tobytes(), values.size // (height * width), height, width)
