"""The header of a JPEG, and its decoders where this system has them."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from simplejpeg import encode_jpeg
from torch import Tensor

from lockstep.errors import DataError, InputError
from lockstep.images import jpeg
from lockstep.images.decode import Decoding
from lockstep.images.jpeg import (
    START,
    JpegDecoder,
    JpegHeader,
    is_plain,
    orientation_of,
    read_jpeg_header,
    rows_needed,
    with_rows,
    without_exif,
)
from lockstep.images.moves import Region


def small_jpeg(width: int = 5, height: int = 3, **options: object) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height)).save(file, "JPEG", **options)
    return file.getvalue()


def exif_of(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x010F] = "a maker"
    exif[0x0112] = orientation
    return exif.tobytes()


@settings(max_examples=20, deadline=None)
@given(width=st.integers(1, 2000), height=st.integers(1, 40), progressive=st.booleans())
def test_the_size_is_read_from_the_header(width: int, height: int, progressive: bool) -> None:
    assert read_jpeg_header(small_jpeg(width, height, progressive=progressive)).size == (width, height)


@pytest.mark.parametrize(("mode", "components"), [("L", 1), ("RGB", 3), ("CMYK", 4)])
def test_the_components_are_read_from_the_header(mode: str, components: int) -> None:
    data = a_jpeg(5, 3, mode=mode)
    assert read_jpeg_header(data).components == components
    assert is_plain(data, read_jpeg_header(data)) == (components != 4)


def test_bytes_between_segments_are_skipped() -> None:
    data = small_jpeg()
    for between in (b"\0\1\2", b"\xff\xff\xff", b"\xff\0\xff\x01", b"\xff\xfe\0\2"):
        header = read_jpeg_header(data[:2] + between + data[2:])
        assert header.size == (5, 3)
        assert header.has_gaps == (between != b"\xff\xfe\0\2")  # That is a comment without a text.


@pytest.mark.parametrize("between", [b"\xff\x01", b"\xff", b"\xff\xd0", b"\0"])
def test_an_untidy_header_is_left_to_pillow(between: bytes) -> None:
    data = small_jpeg()
    scan = data.index(b"\xff\xda")
    for place in (2, 20, scan):
        content = data[:place] + between + data[place:]
        assert not is_plain(content, read_jpeg_header(content))
        assert_judged_alike(content, "simplejpeg")


def test_a_thumbnail_in_the_exif_segment_is_not_the_image() -> None:
    data = small_jpeg(exif=exif_of(1) + small_jpeg(160, 120))
    assert read_jpeg_header(data).size == (5, 3)


@pytest.mark.parametrize(
    "rest", [b"", b"\xc0", b"\xc0\0\x0b\x08\0\0\0\5", b"\xda\0\2\xff\xc0\0\x0b\x08\0\1\0\1", b"\xd9"]
)
def test_a_header_without_a_size_is_refused(rest: bytes) -> None:
    with pytest.raises(ValueError, match="no size in the header of a JPEG"):
        read_jpeg_header(START + rest)


@settings(max_examples=50)
@given(st.binary(max_size=60))
def test_any_header_has_a_size_or_is_refused(rest: bytes) -> None:
    with suppress(ValueError):
        assert all(read_jpeg_header(START + rest).size)


def test_the_end_of_a_thumbnail_is_not_that_of_the_image() -> None:
    data = small_jpeg(exif=exif_of(1) + small_jpeg(160, 120))
    assert is_plain(data, read_jpeg_header(data))
    assert is_plain(data + b"more", read_jpeg_header(data))
    assert not is_plain(data[:-2], read_jpeg_header(data))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_is_read_in_either_byte_order(orientation: int, order: str) -> None:
    start = b"II*\0" if order == "<" else b"MM\0*"
    entries = struct.pack(f"{order}HHII", 0x010F, 2, 1, 0) + struct.pack(f"{order}HHIHH", 0x0112, 3, 1, orientation, 0)
    exif = start + struct.pack(f"{order}IH", 8, 2) + entries
    assert orientation_of(b"Exif\0\0" + exif) == orientation_of(exif) == orientation


@pytest.mark.parametrize("orientation", [0, 9, 300])
def test_an_unknown_orientation_is_upright(orientation: int) -> None:
    assert orientation_of(exif_of(orientation)) == 1


@settings(max_examples=50)
@given(place=st.integers(0, 45), change=st.integers(1, 255), length=st.integers(0, 46))
def test_damaged_exif_does_no_harm(place: int, change: int, length: int) -> None:
    exif = bytearray(exif_of(6))
    exif[place] ^= change
    assert orientation_of(bytes(exif[:length])) in range(1, 9)


def test_exif_is_hidden_and_nothing_else_is_changed() -> None:
    data = small_jpeg(exif=exif_of(6), xmp=b"<x/>")
    hidden = without_exif(data, read_jpeg_header(data))
    differing = [place for place, (old, new) in enumerate(zip(data, hidden, strict=True)) if old != new]
    assert [data[place : place + 9] for place in differing] == [data[differing[0] :][:3] + b"Exif\0\0"]
    assert not read_jpeg_header(hidden).exif
    with Image.open(BytesIO(hidden)) as image:
        assert not image.getexif()
        assert image.info["xmp"] == b"<x/>"


def test_without_exif_the_same_bytes_are_given() -> None:
    data = small_jpeg()
    assert without_exif(data, read_jpeg_header(data)) is data


FIXTURES = Path(__file__).parent.parent / "fixtures" / "images"
ODD = sorted(path.name for path in FIXTURES.iterdir() if path.read_bytes().startswith(START))
PILLOW = Decoding("pillow")
LIBRARIES = [name for name, load in jpeg.LIBRARIES.items() if not load().problem]
PROBLEM = jpeg.turbojpeg().problem
needs_turbojpeg = pytest.mark.skipif(bool(PROBLEM), reason=f"no libjpeg-turbo 3 with TurboJPEG: {PROBLEM}")


def a_jpeg(width: int, height: int, **options: object) -> bytes:
    """Noise, so that each pixel depends on its neighbours; "L" is grey."""
    mode = str(options.pop("mode", "RGB"))
    noise = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    if "colorsubsampling" in options:  # Of those that Pillow does not write.
        return bytes(encode_jpeg(noise, **options))
    file = BytesIO()
    Image.fromarray(noise).convert(mode).save(file, "JPEG", **{"quality": 90, **options})
    return file.getvalue()


KINDS: dict[str, dict[str, object]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "grey": {"mode": "L"},
    "restarts": {"subsampling": 2, "restart_marker_blocks": 2},
    "progressive": {"subsampling": 2, "progressive": True},
    "progressive 4:4:4": {"subsampling": 0, "progressive": True},
    "poor": {"subsampling": 2, "quality": 5},
    "not converted": {"keep_rgb": True},
    "4:4:0": {"colorsubsampling": "440"},
    "4:1:1": {"colorsubsampling": "411"},
    "printed": {"mode": "CMYK"},
}


def a_part(data: st.DataObject, width: int, height: int) -> Region:
    top, left = data.draw(st.tuples(st.integers(0, height - 1), st.integers(0, width - 1)))
    rows, columns = data.draw(st.tuples(st.integers(1, height - top), st.integers(1, width - left)))
    return Region(top, left, rows, columns)


def cut(pixels: Tensor, part: Region) -> Tensor:
    return pixels[:, part.top : part.top + part.height, part.left : part.left + part.width]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_part_has_the_pixels_of_the_whole_image(kind: str, library: str, data: st.DataObject) -> None:
    width, height = data.draw(st.tuples(st.integers(1, 90), st.integers(1, 70)))
    content = a_jpeg(width, height, **KINDS[kind])
    part = a_part(data, width, height)
    assert torch.equal(Decoding(library).decode(content, "x", part), cut(PILLOW.decode(content, "x"), part))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("4:4:0", "4:1:1", "printed")])
def test_plain_images_are_not_left_to_pillow(kind: str, library: str) -> None:
    content = a_jpeg(40, 30, **KINDS[kind])
    header = read_jpeg_header(content)
    pixels = jpeg.LIBRARIES[library]().decode(content, header, Region(3, 5, 20, 10))
    assert pixels is not None
    assert torch.equal(pixels, PILLOW.decode(content, "x", Region(3, 5, 20, 10)))


@pytest.mark.parametrize("library", sorted({"turbojpeg", "simplejpeg"}.intersection(LIBRARIES)))
def test_what_a_library_warns_of_is_left_to_pillow(library: str) -> None:
    decode = jpeg.LIBRARIES[library]().decode
    whole = a_jpeg(24, 16)
    header = read_jpeg_header(whole)
    for content, announced in [
        (b"", header),
        (START, header),
        (whole[: len(whole) // 2], header),
        (whole, header._replace(size=(16, 24))),
        (whole, header._replace(size=(23, 16))),
        (whole, header._replace(size=(24, 17))),
    ]:
        assert decode(content, announced, Region(0, 0, *announced.size[::-1])) is None
        assert decode(whole, header, Region(0, 0, 8, 8)) is not None


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ODD)
def test_odd_images_are_judged_alike(name: str, library: str) -> None:
    content = (FIXTURES / name).read_bytes()
    width, height = read_jpeg_header(content).size
    for part in (Region(0, 0, height, width), Region(height // 3, width // 3, height // 2, width // 2)):
        assert_judged_alike(content, library, part)


def assert_judged_alike(content: bytes, library: str, part: Region | None = None) -> None:
    """A file is refused for the reason that Pillow has, or has the pixels that Pillow gives."""
    expected, found = outcome(content, "pillow", part), outcome(content, library, part)
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def outcome(content: bytes, library: str, part: Region | None) -> Tensor | str:
    try:
        return Decoding(library, max_pixels=1_000_000).decode(content, "x", part)
    except (DataError, InputError) as error:  # The second where damage makes the image smaller than the part.
        return str(error)


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """Change some bytes or bits, take bytes away, double or add some, or cut the file short."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(changed) - 1))
        behind = slice(place + 1, place + 1 + data.draw(st.integers(1, 8)))
        match data.draw(st.sampled_from(["change", "flip", "take", "double", "add", "cut"])):
            case "change":
                changed[place] = data.draw(st.integers(0, 255))
            case "flip":
                changed[place] ^= 1 << data.draw(st.integers(0, 7))
            case "take":
                del changed[behind]
            case "double":
                changed[place:place] = changed[behind]
            case "add":
                changed[place:place] = data.draw(st.binary(min_size=1, max_size=8))
            case "cut":
                del changed[place + 1 :]
    return bytes(changed)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_image_is_judged_alike(kind: str, data: st.DataObject) -> None:
    assert_judged_alike(damaged(data, a_jpeg(40, 24, **KINDS[kind])), "simplejpeg")


@pytest.mark.parametrize("kind", ["4:4:4", "4:2:0", "grey", "4:4:0"])
def test_simplejpeg_decodes_no_row_far_below_a_part(kind: str) -> None:
    content = a_jpeg(40, 120, **KINDS[kind])
    header = read_jpeg_header(content)
    last = header.stop + (len(content) - header.stop) * 3 // 4
    spoilt = content[:last] + bytes([0x55]) * (len(content) - 2 - last) + content[-2:]
    above, across = Region(7, 3, 50, 30), Region(30, 3, 90, 30)
    decode = jpeg.simplejpeg().decode
    pixels = decode(spoilt, header, above)
    assert pixels is not None
    assert torch.equal(pixels, PILLOW.decode(content, "x", above))
    assert decode(spoilt, header, across) is None


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_rows_are_needed_as_are_coded_together(kind: str) -> None:
    content = a_jpeg(40, 120, **KINDS[kind])
    coded = {"4:2:0": 16, "poor": 16, "4:4:0": 16}.get(kind, 8)
    if kind in ("restarts", "progressive", "progressive 4:4:4"):
        coded = 120
    header = read_jpeg_header(content)
    rows = [rows_needed(content, header, Region(5, 0, bottom - 5, 40)) for bottom in (14, 15, 30, 31, 119)]
    assert rows == [min(120, -(-(bottom + 2) // coded) * coded) for bottom in (14, 15, 30, 31, 119)]
    assert read_jpeg_header(bytes(with_rows(content, header, 48))).size == (40, 48)


@pytest.mark.parametrize("library", [pytest.param("turbojpeg", marks=needs_turbojpeg), "simplejpeg"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_part_of_a_damaged_image_is_refused_or_of_its_size(kind: str, library: str, data: st.DataObject) -> None:
    content = damaged(data, a_jpeg(60, 40, **KINDS[kind]))
    part = a_part(data, 60, 40)
    try:
        pixels = Decoding(library, max_pixels=1_000_000).decode(content, "x", part)
    except (DataError, InputError):  # The second where the damage makes the image smaller than the part.
        return
    assert tuple(pixels.shape) == (3, part.height, part.width)


@pytest.mark.parametrize("library", LIBRARIES)
def test_threads_decode_beside_each_other(library: str) -> None:
    contents = [a_jpeg(50 + number, 40) for number in range(8)]
    decoding = Decoding(library)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda content: decoding.decode(content, "x"), contents * 4))
    for pixels, content in zip(together, contents * 4, strict=True):
        assert torch.equal(pixels, PILLOW.decode(content, "x"))


class Library:
    """A stand-in, which tells what it was asked for."""

    def __init__(self, *, able: bool) -> None:
        self.able = able
        self.parts: list[Region] = []

    def decode(self, data: bytes, header: JpegHeader, part: Region) -> Tensor | None:
        self.parts.append(part)
        return torch.full((3, part[2], part[3]), 7, dtype=torch.uint8) if self.able else None


def use(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jpeg.LIBRARIES, "turbojpeg", lambda: JpegDecoder(library.decode, "a stand-in"))


@pytest.mark.parametrize("decoder", ["auto", "turbojpeg"])
def test_the_part_alone_is_asked_for(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(library := Library(able=True), monkeypatch)
    part = Region(2, 4, 6, 8)
    assert Decoding(decoder).decode(a_jpeg(24, 16), "x", part).tolist() == torch.full((3, 6, 8), 7).tolist()
    assert library.parts == [part]
    assert Decoding(decoder).chosen == "a stand-in"
    assert Decoding("simplejpeg").chosen != "a stand-in"


def test_images_that_a_library_leaves_are_decoded_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    use(library := Library(able=False), monkeypatch)
    content, part = a_jpeg(24, 16), Region(2, 4, 6, 8)
    assert torch.equal(Decoding("turbojpeg").decode(content, "x", part), cut(PILLOW.decode(content, "x"), part))
    assert library.parts == [part]


def test_a_part_of_a_file_that_was_cut_short_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    use(library := Library(able=True), monkeypatch)
    content = a_jpeg(24, 16)[:-30]
    with pytest.raises(DataError, match=r"cannot be decoded"):
        Decoding("turbojpeg").decode(content, "x", Region(0, 0, 8, 8))
    assert not library.parts


def test_images_to_be_turned_are_asked_for_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    use(library := Library(able=True), monkeypatch)
    exif = Image.Exif()
    exif[0x0112] = 6
    content = a_jpeg(24, 16, exif=exif)
    assert Decoding("turbojpeg", exif=True).decode(content, "x", Region(2, 4, 6, 8)).shape == (3, 6, 8)
    assert Decoding("turbojpeg").decode(content, "x", Region(2, 4, 6, 8)).shape == (3, 6, 8)
    assert library.parts == [(0, 0, 16, 24), (2, 4, 6, 8)]


@pytest.mark.parametrize(
    ("names", "problem"),
    [(("no-such-library.so",), "no-such-library.so"), ((None,), "tj3Init")],
    ids=["no library", "one without the functions"],
)
def test_without_the_library_it_is_refused(
    names: tuple[str | None], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jpeg, "_LIBRARIES", names)
    jpeg.turbojpeg.cache_clear()
    try:
        with pytest.raises(InputError) as caught:
            Decoding("turbojpeg")
        assert "TurboJPEG" not in Decoding("auto").chosen
    finally:
        jpeg.turbojpeg.cache_clear()
    assert caught.value.what == "turbojpeg cannot be used."
    assert problem in str(caught.value.given)
    assert caught.value.expected == (
        "libjpeg-turbo 3.0 or later with its TurboJPEG interface, where the system finds it"
    )
    assert caught.value.hint == 'install it, or leave the decoder at "auto"'


@settings(max_examples=50)
@given(st.data(), st.sampled_from([(8, 0), (16, 16)]))
def test_columns_are_widened_to_those_coded_together(data: st.DataObject, columns: tuple[int, int]) -> None:
    coded, reach = columns
    width = data.draw(st.integers(1, 100))
    part = a_part(data, width, 1)
    left, right = part.left, part.left + part.width
    first, last = jpeg._widened(left, right, width, coded, reach)
    assert first % coded == 0
    assert max(left - reach - coded + 1, 0) <= first <= max(left - reach, 0)
    assert last == min(right + reach, width)
