from __future__ import annotations

import logging
import pickle
import re
import struct
import sys
import warnings
import zlib
from collections.abc import Iterator
from importlib import metadata
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import interpolate

from lockstep.errors import DataError, InputError
from lockstep.images import jpeg, pillow
from lockstep.images.decode import Decoding, EncodedImage
from lockstep.images.moves import QUARTER_TURN, Region

FIXTURES = Path(__file__).parent.parent / "fixtures" / "images"
TURNED = FIXTURES / "padlock-406986_640_rotate_90.jpg"
LIBRARIES = ["pillow", *(name for name, load in jpeg.LIBRARIES.items() if not load().problem)]
AS_STORED = Decoding("pillow")


def encoded(name: str, decoding: Decoding = AS_STORED) -> EncodedImage:
    return EncodedImage((FIXTURES / name).read_bytes(), name, decoding)


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(width: int = 24, height: int = 16, mode: str = "RGB") -> Image.Image:
    with Image.open(FIXTURES / "hopper.png") as whole:
        return whole.resize((width, height)).convert(mode)


def pixels_of(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def refusal(image: EncodedImage) -> DataError:
    with pytest.raises(DataError) as caught:
        image.decode()
    return caught.value


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("hopper.jpg", (128, 128)),
        ("hopper.png", (128, 128)),
        ("hopper.webp", (128, 128)),
        ("hopper_gray.jpg", (128, 128)),
        ("pil_sample_cmyk.jpg", (100, 100)),
        ("rgb_trns.png", (64, 64)),
        ("junk_jpeg_header.jpg", (1024, 768)),
        ("truncated_app14.jpg", (100, 100)),
        ("broken_exif_dpi.jpg", (100, 100)),
        ("hopper_bad_exif.jpg", (500, 500)),
        ("jpeg.png", (640, 426)),
        ("pbm.jpeg", (640, 398)),
    ],
)
def test_odd_but_whole_images_are_decoded(name: str, size: tuple[int, int], library: str) -> None:
    image = encoded(name, Decoding(library))
    pixels = image.decode()
    assert image.size == size
    assert (pixels.shape, pixels.dtype) == ((3, size[1], size[0]), torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's own way of opening them warns of broken EXIF.
        with Image.open(FIXTURES / name) as opened:
            assert torch.equal(pixels, pixels_of(opened))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken.png", "broken PNG file"),
        ("broken_data_stream.png", "unrecognized data stream"),
        ("truncated_image.png", "truncated"),
        ("truncated_jpeg.jpg", "truncated"),
        ("png_decompression_dos.png", "too large"),
    ],
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_damaged_images_are_refused(name: str, reason: str, library: str) -> None:
    error = refusal(encoded(name, Decoding(library)))
    assert error.what == f"{name} cannot be decoded."
    assert reason.lower() in str(error.given).lower()
    assert error.expected == "a whole image, in JPEG, PNG, WebP, GIF, BMP, TIFF or PNM"
    assert error.hint == "copy, repair or convert the file, or leave it out of the data"


@pytest.mark.parametrize(
    ("data", "given_"),
    [(b"", "no bytes"), (b"<html><body>", "the first bytes 3c 68 74 6d 6c 3e 3c 62 6f 64 79 3e")],
)
def test_bytes_that_are_no_image_are_refused(data: bytes, given_: str) -> None:
    assert refusal(EncodedImage(data, "record 3 of x.tfrecord")).given == given_


def test_formats_whose_plugins_do_more_than_decode_are_refused() -> None:
    assert "25 21 50 53" in str(refusal(EncodedImage(file_of(picture(), "EPS"), "x.png")).given)


def test_the_high_byte_of_16_bits_is_taken() -> None:
    with Image.open(FIXTURES / "16_bit_noise.tif") as opened:
        stored = np.array(opened)
    assert stored.dtype == np.uint16
    expected = torch.from_numpy((stored >> 8).astype(np.uint8)).expand(3, 32, 32)
    assert torch.equal(encoded("16_bit_noise.tif").decode(), expected)


def test_16_bits_are_the_same_in_every_format() -> None:
    stored = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    image = Image.frombytes("I;16", (16, 16), stored.tobytes())
    pgm = b"P5 16 16 65535\n" + stored.astype(">u2").tobytes()
    for data in (file_of(image, "PNG"), file_of(image, "TIFF"), pgm):
        pixels = EncodedImage(data, "x").decode()
        assert torch.equal(pixels, torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(3, 16, 16))


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_without_a_known_range_are_refused(mode: str) -> None:
    error = refusal(EncodedImage(file_of(Image.new(mode, (2, 2)), "TIFF"), "depth.tif"))
    assert error.given == f"pixels of Pillow's mode {mode}, whose range is not known"


def test_alpha_is_dropped_and_hidden_colours_are_as_stored() -> None:
    image = picture(mode="RGBA")
    image.putalpha(0)
    assert torch.equal(EncodedImage(file_of(image, "PNG"), "x").decode(), pixels_of(picture()))


@pytest.mark.parametrize("transparency", [0, bytes(range(256))])
def test_a_palette_is_looked_up(transparency: int | bytes) -> None:
    image = picture().quantize(16)
    data = file_of(image, "PNG", transparency=transparency)
    assert torch.equal(EncodedImage(data, "x").decode(), pixels_of(image))


def test_of_an_animation_the_first_frame_is_taken() -> None:
    frames = [Image.new("P", (4, 4), color) for color in (1, 2)]
    for frame in frames:
        frame.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    data = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert EncodedImage(data, "x").decode()[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("orientation", range(10))
def test_images_are_turned_only_if_asked(orientation: int, library: str) -> None:
    entry = bytes.fromhex("1201 0300 01000000")  # orientation, of 16 bits, one of it: little-endian in this file
    data = TURNED.read_bytes()
    assert data.count(entry) == 1
    data = data.replace(entry + b"\6\0", entry + struct.pack("<H", orientation))
    with Image.open(BytesIO(data)) as opened:
        stored, upright = pixels_of(opened), pixels_of(ImageOps.exif_transpose(opened))
    raw = EncodedImage(data, "x", Decoding(library))
    turned = EncodedImage(data, "x", Decoding(library, exif=True))
    assert (raw.size, turned.size) == ((640, 426), (upright.shape[2], upright.shape[1]))
    assert torch.equal(raw.decode(), stored)
    assert torch.equal(turned.decode(), upright)
    region = Region(top=10, left=20, height=300, width=200)
    assert torch.equal(turned.decode(region), upright[:, 10:310, 20:220])


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_exif_of_other_formats_counts_too(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = file_of(picture(), kind, exif=exif, lossless=True)
    assert EncodedImage(data, "x").size == (24, 16)
    turned = EncodedImage(data, "x", Decoding(exif=True))
    assert turned.size == (16, 24)
    assert torch.equal(turned.decode(), pixels_of(picture().transpose(Image.Transpose.ROTATE_270)))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_region_is_that_part_of_the_image(data: st.DataObject) -> None:
    image = encoded("hopper.jpg")
    top, left = data.draw(st.tuples(st.integers(0, 127), st.integers(0, 127)))
    height, width = data.draw(st.tuples(st.integers(1, 128 - top), st.integers(1, 128 - left)))
    region = Region(top, left, height, width)
    assert torch.equal(image.decode(region), image.decode()[:, top : top + height, left : left + width])


@pytest.mark.parametrize("region", [(-1, 0, 5, 5), (0, 0, 129, 5), (0, 124, 5, 5), (0, 0, 0, 5), (3, 3, 5, -1)])
def test_a_region_outside_of_the_image_is_refused(region: tuple[int, int, int, int]) -> None:
    with pytest.raises(InputError) as caught:
        encoded("hopper.jpg").decode(Region(*region))
    error, (top, left, height, width) = caught.value, region
    assert error.what == "A region does not lie within hopper.jpg."
    assert error.given == f"{height} x {width} pixels from row {top} and column {left} on"
    assert error.expected == "one pixel or more, within 128 rows and 128 columns"
    assert error.hint == "clip the region to the image"


SMALL_JPEG = file_of(picture(61, 47), "JPEG", quality=90)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_shrunk_region_is_not_below_what_is_asked_for(data: st.DataObject) -> None:
    top, left = data.draw(st.tuples(st.integers(0, 46), st.integers(0, 60)))
    height, width = data.draw(st.tuples(st.integers(1, 47 - top), st.integers(1, 61 - left)))
    at_least = data.draw(st.tuples(st.integers(1, 50), st.integers(1, 70)))
    decoding = Decoding("pillow", exif=data.draw(st.booleans()))
    region = Region(top, left, height, width)
    rows, columns = EncodedImage(SMALL_JPEG, "x", decoding).decode(region, at_least).shape[1:]
    assert rows >= min(height, at_least[0])
    assert columns >= min(width, at_least[1])
    # An eighth at most; and it is shrunk as far as it may be.
    factor = next(each for each in (8, 4, 2, 1) if rows <= -(-height // each) + 1)
    assert factor == 8 or height // (2 * factor) < at_least[0] or width // (2 * factor) < at_least[1]


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_shrunk_image_looks_like_the_image(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    slopes = np.stack([np.mgrid[0:192:2, 0:256:2][axis] for axis in (0, 1, 0)], axis=-1).astype(np.uint8)
    data = file_of(Image.fromarray(slopes), "JPEG", exif=exif, quality=95, subsampling=0)
    image = EncodedImage(data, "x", Decoding("pillow", exif=True))
    region = Region(16, 8, 64, 72)
    whole, shrunk = image.decode(region), image.decode(region, at_least=(20, 18))
    assert shrunk.shape == (3, 32, 36)
    resized = interpolate(whole[None], (32, 36), mode="bilinear", antialias=True)[0]
    assert (shrunk.int() - resized.int()).abs().max() <= 2


def test_only_jpegs_are_shrunk() -> None:
    assert encoded("hopper.png").decode(at_least=(16, 16)).shape == (3, 128, 128)
    assert encoded("hopper.jpg").decode(at_least=(16, 16)).shape == (3, 16, 16)
    assert encoded("hopper.jpg").decode(at_least=(17, 16)).shape == (3, 32, 32)
    assert encoded("hopper.jpg").decode(at_least=(200, 200)).shape == (3, 128, 128)


def test_small_images_keep_a_pixel_when_shrunk() -> None:
    with pytest.raises(InputError, match=r"at_least is out of range"):
        encoded("hopper.jpg").decode(at_least=(0, 16))


def png_header(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">II5B", width, height, 8, 2, 0, 0, 0)
    rest = b"".join(struct.pack(">I", 0) + kind + struct.pack(">I", zlib.crc32(kind)) for kind in (b"IDAT", b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + rest


def bombs() -> Iterator[tuple[str, bytes]]:
    large = struct.pack(">HH", 60_000, 50_000)
    yield "png", png_header(50_000, 60_000)
    yield "jpg", file_of(picture(), "JPEG").replace(struct.pack(">HH", 16, 24), large)
    yield "gif", file_of(picture(), "GIF").replace(struct.pack("<HH", 24, 16), struct.pack("<HH", 50_000, 60_000))
    yield "bmp", file_of(picture(), "BMP").replace(struct.pack("<II", 24, 16), struct.pack("<II", 50_000, 60_000))
    yield "ppm", b"P6\n50000 60000\n255\n"


@pytest.mark.parametrize(("ending", "data"), list(bombs()))
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_decompression_bomb_is_refused_by_its_header(
    ending: str, data: bytes, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pillow, "raster_of", lambda *image: pytest.fail("it was decoded"))
    image = EncodedImage(data, f"bomb.{ending}", Decoding(library))
    error = refusal(image)
    assert error.what == f"bomb.{ending} is too large to be decoded."
    assert error.given == f"a header that announces 50000 x 60000 pixels, in {len(data)} bytes"
    assert error.expected == "at most 100000000 pixels"
    assert error.hint == "leave it out; if it is what it says, shrink it, or decode with a larger max_pixels"
    with pytest.raises(DataError, match="too large"):
        image.size  # noqa: B018


def test_a_canvas_that_webp_announces_is_not_taken_either() -> None:
    data = bytearray(file_of(picture(), "WEBP", save_all=True, append_images=[picture().rotate(180)]))
    canvas = data.index(b"VP8X") + 12
    data[canvas : canvas + 6] = 2 * (11_999).to_bytes(3, "little")
    error = refusal(EncodedImage(bytes(data), "x"))
    assert error.given == f"a header that announces 12000 x 12000 pixels, in {len(data)} bytes"


def test_the_limit_of_pixels_can_be_moved() -> None:
    assert encoded("hopper.jpg", Decoding(max_pixels=128 * 128)).decode().shape == (3, 128, 128)
    assert "too large" in refusal(encoded("hopper.jpg", Decoding(max_pixels=128 * 128 - 1))).what


WHOLE = {
    "baseline": SMALL_JPEG,
    "progressive": file_of(picture(), "JPEG", progressive=True),
    "PNG": file_of(picture(), "PNG"),
    "WEBP": file_of(picture(), "WEBP"),
    "GIF": file_of(picture(), "GIF"),
    "BMP": file_of(picture(), "BMP"),
    "TIFF": file_of(picture(), "TIFF", compression="tiff_lzw"),
    "PPM": file_of(picture(), "PPM"),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", WHOLE)
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_an_image_that_is_cut_short_is_refused_or_whole(kind: str, library: str, data: st.DataObject) -> None:
    whole = WHOLE[kind]
    length = data.draw(st.integers(0, len(whole) - 1))
    decoding = Decoding(library, exif=True)
    try:
        pixels = EncodedImage(whole[:length], "x", decoding).decode()
    except DataError:
        return
    assert torch.equal(pixels, EncodedImage(whole, "x", decoding).decode())


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", WHOLE)
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_damaged_image_is_refused_or_decoded_to_its_size(kind: str, library: str, data: st.DataObject) -> None:
    damaged = bytearray(WHOLE[kind])
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= data.draw(st.integers(1, 255))
    image = EncodedImage(bytes(damaged), "x", Decoding(library, exif=True, max_pixels=1_000_000))
    try:
        pixels = image.decode()
    except DataError:
        return
    assert tuple(pixels.shape) == (3, *image.size[::-1])


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
        *(("JPEG", mode) for mode in ("L", "RGB", "CMYK")),
        *(("WEBP", mode) for mode in ("RGB", "RGBA")),
        *(("TIFF", mode) for mode in ("1", "L", "RGB", "CMYK", "I;16")),
        ("GIF", "P"),
        ("BMP", "RGB"),
        ("PPM", "RGB"),
    ],
)
@settings(max_examples=10, deadline=None)
@given(width=st.integers(1, 40), height=st.integers(1, 40))
def test_the_header_tells_the_size_of_the_pixels(kind: str, mode: str, width: int, height: int) -> None:
    image = EncodedImage(file_of(Image.new(mode, (width, height)), kind), "x")
    assert image.size == (width, height)
    assert image.decode().shape == (3, height, width)


def test_memory_that_runs_out_is_no_fault_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def raster_of(image: object, part: object) -> Tensor:
        raise MemoryError

    monkeypatch.setattr(pillow, "raster_of", raster_of)
    with pytest.raises(MemoryError):
        encoded("hopper.jpg").decode()


def test_an_image_travels_between_processes_and_hides_its_bytes() -> None:
    image = encoded("hopper.jpg", Decoding("pillow", exif=True))
    copy = pickle.loads(pickle.dumps(image))
    assert copy == image
    assert torch.equal(copy.decode(), image.decode())
    assert repr(image).startswith("EncodedImage(source='hopper.jpg', decoding=Decoding(")


class Torchcodec(ModuleType):
    """A stand-in, which turns JPEGs by their EXIF as the library always does."""

    __version__ = "0.99"

    def __init__(self) -> None:
        super().__init__("torchcodec")
        self.decoders = ModuleType("torchcodec.decoders")
        self.decoders.decode_jpeg = self.decode_jpeg  # type: ignore[attr-defined]
        self.calls = 0
        self.rows: int | None = None

    def decode_jpeg(self, data: Tensor) -> Tensor:
        self.calls += 1
        with Image.open(BytesIO(data.numpy().tobytes())) as image:
            return pixels_of(ImageOps.exif_transpose(image))[:, : self.rows]


@pytest.fixture
def loads_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Libraries are loaded anew in the test, and after it."""
    with monkeypatch.context() as patch:
        for load in jpeg.LIBRARIES.values():
            load.cache_clear()
        yield patch
    for load in jpeg.LIBRARIES.values():
        load.cache_clear()


@pytest.fixture
def torchcodec(loads_anew: pytest.MonkeyPatch) -> Torchcodec:
    """It alone is there."""
    module = Torchcodec()
    loads_anew.setitem(sys.modules, "torchcodec", module)
    loads_anew.setitem(sys.modules, "torchcodec.decoders", module.decoders)
    loads_anew.setitem(sys.modules, "simplejpeg", None)
    loads_anew.setattr(jpeg, "_LIBRARIES", ("no such library",))
    return module


@pytest.mark.parametrize("decoder", ["auto", "torchcodec"])
def test_torchcodec_decodes_jpegs_as_they_are_stored(torchcodec: Torchcodec, decoder: str) -> None:
    stored = encoded(TURNED.name).decode()
    assert torchcodec.calls == 0
    assert torch.equal(encoded(TURNED.name, Decoding(decoder)).decode(), stored)
    turned = encoded(TURNED.name, Decoding(decoder, exif=True)).decode()
    assert torch.equal(turned, stored.transpose(1, 2).flip(2))
    assert torchcodec.calls == 2


def test_pillow_decodes_other_formats_and_shrunk_images(torchcodec: Torchcodec) -> None:
    assert encoded("hopper.png", Decoding("torchcodec")).decode().shape == (3, 128, 128)
    assert encoded("hopper.jpg", Decoding("torchcodec")).decode(at_least=(60, 60)).shape == (3, 64, 64)
    assert torchcodec.calls == 0


def test_another_size_than_announced_is_refused(torchcodec: Torchcodec) -> None:
    torchcodec.rows = 100
    error = refusal(encoded("hopper.jpg", Decoding("torchcodec")))
    assert error.given == "100 rows and 128 columns, announced as 128 and 128"


def test_the_library_and_its_version_are_told(torchcodec: Torchcodec) -> None:
    assert re.fullmatch(r"pillow \d+\.\d+\.\d+ \(libjpeg(-turbo)? \S+\)", Decoding("pillow").chosen)
    assert Decoding("auto").chosen == Decoding("torchcodec").chosen == "torchcodec 0.99 (libjpeg-turbo)"


def test_simplejpeg_is_taken_before_torchcodec(torchcodec: Torchcodec, loads_anew: pytest.MonkeyPatch) -> None:
    loads_anew.delitem(sys.modules, "simplejpeg")
    assert Decoding("auto").chosen == Decoding("simplejpeg").chosen
    assert Decoding("auto").chosen == f"simplejpeg {metadata.version('simplejpeg')} (libjpeg-turbo)"
    assert encoded("hopper.jpg", Decoding("auto")).decode().shape == (3, 128, 128)
    assert torchcodec.calls == 0


@pytest.mark.parametrize(
    ("library", "lacking", "level", "needed"),
    [
        ("torchcodec", "torchcodec", logging.DEBUG, "torchcodec 0.16 or later, of the build that fits torch"),
        ("torchcodec", "torchcodec.decoders", logging.INFO, "torchcodec 0.16 or later, of the build that fits torch"),
        ("simplejpeg", "simplejpeg", logging.INFO, "simplejpeg 1.9 or later"),
    ],
)
def test_a_library_that_cannot_be_loaded_is_named(
    library: str,
    lacking: str,
    level: int,
    needed: str,
    torchcodec: Torchcodec,
    loads_anew: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only who has never installed torchcodec is not told."""
    loads_anew.setitem(sys.modules, lacking, None)
    caplog.set_level(logging.DEBUG, "lockstep")
    with pytest.raises(InputError) as caught:
        Decoding(library)
    assert caught.value.what == f"{library} cannot be used."
    assert str(caught.value.given).startswith("ModuleNotFoundError: ")
    assert caught.value.expected == needed
    assert caught.value.hint == 'install it, or leave the decoder at "auto"'
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage().startswith(f"{library} is not used: ModuleNotFoundError: ")


def test_without_any_library_pillow_decodes(torchcodec: Torchcodec, loads_anew: pytest.MonkeyPatch) -> None:
    loads_anew.setitem(sys.modules, "torchcodec", None)
    assert Decoding("auto").chosen == Decoding("pillow").chosen
    assert encoded("hopper.jpg", Decoding("auto")).decode().shape == (3, 128, 128)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [({"decoder": "opencv"}, "decoder cannot be 'opencv'."), ({"max_pixels": 0}, "max_pixels is out of range.")],
)
def test_wrong_choices_are_refused(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError) as caught:
        Decoding(**arguments)
    assert caught.value.what == what


def test_the_header_is_read_once_for_the_size_of_an_image_and_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    header = Decoding._header
    monkeypatch.setattr(Decoding, "_header", lambda *given: read.append(given[2]) or header(*given))
    image = EncodedImage(png_header(24, 16), "a.png")
    assert [image.size, image.size, image.cropped(Region(1, 2, 3, 4)).size] == [(24, 16), (24, 16), (4, 3)]
    assert image.turned(QUARTER_TURN).size == (16, 24)
    assert image.cropped(Region(1, 2, 3, 4)).turned(QUARTER_TURN).size == (3, 4)
    assert read == ["a.png"] * 2, "once more by the image that is turned whole"
    assert image == EncodedImage(png_header(24, 16), "a.png"), "what is known of it makes it no other image"


def test_the_header_of_a_jpeg_is_read_once_for_its_size_and_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    header = Decoding._header
    monkeypatch.setattr(Decoding, "_header", lambda *given: read.append(given[2]) or header(*given))
    image = EncodedImage(SMALL_JPEG, "a.jpg")
    assert image.size == image.decode().shape[:0:-1] == image.decode().shape[:0:-1]
    assert read == ["a.jpg"]
