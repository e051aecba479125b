"""Images of any format as JPEGs in colour, as the records of the TensorFlow reference's builders hold them."""

from __future__ import annotations

from io import BytesIO
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from lockstep.images import jpeg, pillow
from lockstep.images.decode import Decoding

DECODING = Decoding("pillow")
"""Whatever else is installed: the same records on every machine."""

_QUALITY = 100
_CMYK = "CMYK"


class Jpeg(NamedTuple):
    """A JPEG, and the size of its raster in pixels."""

    data: bytes
    height: int
    width: int


def colour_jpeg(data: bytes, source: str) -> Jpeg:
    """The image as a JPEG that every decoder makes red, green and blue of: itself if it is one, grey ones too.

    What is something else becomes one of quality 100: a JPEG of four inks (CMYK), and any other format, which is known
    by its content and not by the name of its file. The raster is that which is stored; an EXIF orientation of a JPEG
    that stays as it is stays in it, and that of another image is lost.

    Raises:
        DataError: it cannot be decoded, as `Decoding`.
    """
    raster = DECODING.decode(data, source)
    _, height, width = raster.shape
    if not data.startswith(jpeg.START) or pillow.open_image(data).mode == _CMYK:
        data = _encoded(raster)
    return Jpeg(data, height, width)


def _encoded(raster: Tensor) -> bytes:
    """A JPEG of a raster, uint8 of shape (3, height, width)."""
    file = BytesIO()
    Image.fromarray(raster.permute(1, 2, 0).numpy(), "RGB").save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()
