from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.convert.image_folder import colour_jpeg
from lockstep.errors import DataError

IMAGES = Path(__file__).parent.parent / "fixtures" / "images"


def brightness(data: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Of each pixel; colours are stored for four of them at once."""
    return np.asarray(Image.open(BytesIO(data)).convert("RGB").convert("L")).astype(np.int64)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("hopper.jpg", (128, 128)),
        ("hopper_gray.jpg", (128, 128)),
        ("jpeg.png", (426, 640)),
        ("padlock-406986_640_rotate_90.jpg", (426, 640)),
    ],
    ids=["colours", "grey", "misnamed", "to be turned"],
)
def test_a_jpeg_stays_as_it_is(name: str, size: tuple[int, int]) -> None:
    data = (IMAGES / name).read_bytes()
    assert colour_jpeg(data, name) == (data, *size)


@pytest.mark.parametrize(
    ("name", "size", "error"),
    [
        ("hopper.png", (128, 128), 1.0),
        ("hopper.webp", (128, 128), 1.0),
        ("16_bit_noise.tif", (32, 32), None),
        ("pbm.jpeg", (398, 640), 1.0),
        ("pil_sample_cmyk.jpg", (100, 100), 1.5),
    ],
)
def test_what_is_something_else_becomes_a_jpeg_in_colours(
    name: str, size: tuple[int, int], error: float | None
) -> None:
    data = (IMAGES / name).read_bytes()
    made = colour_jpeg(data, name)
    assert (made.height, made.width) == size
    image = Image.open(BytesIO(made.data))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", size[::-1])
    # All coefficients of brightness are kept at quality 100.
    assert set(image.quantization[0]) == {1}  # type: ignore[attr-defined]
    if error is not None:
        assert np.abs(brightness(made.data) - brightness(data)).mean() < error


@pytest.mark.parametrize("name", ["truncated_jpeg.jpg", "truncated_image.png", "broken_data_stream.png", "SOURCE.md"])
def test_what_cannot_be_decoded_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"{name} cannot be decoded"):
        colour_jpeg((IMAGES / name).read_bytes(), name)
