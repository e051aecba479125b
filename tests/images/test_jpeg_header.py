from __future__ import annotations

import struct
from contextlib import suppress
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.images.jpeg import START, is_whole, orientation_of, read_jpeg_header, without_exif


def jpeg(width: int = 5, height: int = 3, **options: object) -> bytes:
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
def test_the_size_is_read(width: int, height: int, progressive: bool) -> None:
    assert read_jpeg_header(jpeg(width, height, progressive=progressive)).size == (width, height)


def test_what_lies_between_segments_is_skipped() -> None:
    data = jpeg()
    for between in (b"\0\1\2", b"\xff\xff\xff", b"\xff\0\xff\x01", b"\xff\xfe\0\2"):
        assert read_jpeg_header(data[:2] + between + data[2:]).size == (5, 3)


def test_a_thumbnail_in_the_exif_segment_is_not_the_image() -> None:
    data = jpeg(exif=exif_of(1) + jpeg(160, 120))
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
    data = jpeg(exif=exif_of(1) + jpeg(160, 120))
    assert is_whole(data, read_jpeg_header(data))
    assert is_whole(data + b"more", read_jpeg_header(data))
    assert not is_whole(data[:-2], read_jpeg_header(data))


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
    data = jpeg(exif=exif_of(6), xmp=b"<x/>")
    hidden = without_exif(data, read_jpeg_header(data))
    differing = [place for place, (old, new) in enumerate(zip(data, hidden, strict=True)) if old != new]
    assert [data[place : place + 9] for place in differing] == [data[differing[0] :][:3] + b"Exif\0\0"]
    assert not read_jpeg_header(hidden).exif
    with Image.open(BytesIO(hidden)) as image:
        assert not image.getexif()
        assert image.info["xmp"] == b"<x/>"


def test_without_exif_the_same_bytes_are_given() -> None:
    data = jpeg()
    assert without_exif(data, read_jpeg_header(data)) is data
