"""Open images with Pillow, which reads the header alone, and decode them to a raster.

Its plugins are called by hand, chosen by the first bytes of a file. `PIL.Image.open` would ask every plugin there is,
some of which run other programs, and would warn of sizes by a limit of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import PIL
import torch

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile
    from torch import Tensor

_PLUGINS = {
    b"\xff\xd8\xff": "Jpeg",
    b"\x89PNG\r\n\x1a\n": "Png",
    b"RIFF": "WebP",
    b"GIF8": "Gif",
    b"BM": "Bmp",
    b"II*\0": "Tiff",
    b"MM\0*": "Tiff",
    **{b"P%d" % number: "Ppm" for number in range(1, 7)},
}
FORMATS = "JPEG, PNG, WebP, GIF, BMP, TIFF or PNM"

_8_BITS = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}


def open_image(data: bytes) -> ImageFile:
    """Open an image, its pixels not decoded yet.

    Raises:
        ValueError: the first bytes are those of no format known here.
        Exception: anything, where the data is damaged.
    """
    for start, name in _PLUGINS.items():
        if data.startswith(start):
            return _plugin(name)(BytesIO(data))
    raise ValueError(f"the first bytes {data[:12].hex(' ')}" if data else "no bytes")


@cache
def _plugin(name: str) -> Callable[[BytesIO], ImageFile]:
    """Load a plugin: all of them would take 90 ms."""
    opener: Callable[[BytesIO], ImageFile] = getattr(import_module(f"PIL.{name}ImagePlugin"), f"{name}ImageFile")
    return opener


def png_bytes(image: Image) -> bytes:
    """Encode an image as a PNG."""
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def raster_of(image: ImageFile, part: tuple[int, int, int, int] | None = None) -> Tensor:
    """Decode to uint8 of shape (3, height, width), red, green and blue; channels last in memory.

    The image is decoded as a whole, whatever part is wanted: top, left, height and width of it in pixels, or all.

    Raises:
        Exception: anything, where the data is damaged, or has pixels without a range that could be mapped to 8 bits.
    """
    image.load()
    top, left, height, width = part or (0, 0, image.height, image.width)
    # Before colours are converted and copied: most crops take less than half of an image.
    cut = image if (width, height) == image.size else image.crop((left, top, left + width, top + height))
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format != "TIFF"):
        grey = torch.from_numpy((np.asarray(cut) >> 8).astype(np.uint8))
        return grey.repeat(3, 1, 1)
    if image.mode not in _8_BITS:
        raise ValueError(f"pixels of Pillow's mode {image.mode}, whose range is not known")
    cut.info.pop("transparency", None)  # It is dropped anyway, and Pillow would warn of some.
    colours = cut if image.mode == "RGB" else cut.convert("RGB")
    pixels = bytearray(colours.tobytes())
    return torch.frombuffer(pixels, dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1)


def version() -> str:
    """Name the versions of Pillow and of its JPEG library."""
    from PIL import features

    turbo = features.version("libjpeg_turbo")
    library = f"libjpeg-turbo {turbo}" if turbo else f"libjpeg {features.version('jpg')}"
    return f"pillow {PIL.__version__} ({library})"
