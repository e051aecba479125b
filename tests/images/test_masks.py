"""Masks: as image files, as bits, and as the outlines of COCO's annotations."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.errors import DataError
from lockstep.images.decode import Decoding
from lockstep.images.masks import DenseMasks, MaskOutlines, PngMasks, dense_masks, packed_outline
from lockstep.images.moves import Masks

TESTS = Path(__file__).parent.parent
GOLDEN = json.loads(gzip.decompress((TESTS / "golden" / "masks_golden.json.gz").read_bytes()))
SQUARE = [1, 1, 3, 1, 3, 3, 1, 3]


def drawn(segmentation: Any, height: int, width: int) -> torch.Tensor:
    (mask,) = MaskOutlines((packed_outline(segmentation),), height, width, "image.jpg").decode()
    return mask


def digest_of(mask: torch.Tensor) -> str:
    return hashlib.sha256(mask.contiguous().numpy().tobytes()).hexdigest()


def test_masks_are_those_of_pycocotools() -> None:
    for number, case in enumerate(GOLDEN["cases"]):
        mask = drawn(case["segmentation"], *case["size"])
        assert (mask.dtype, list(mask.shape)) == (torch.uint8, case["size"]), number
        if "bits" in case:
            assert np.packbits(mask.numpy()).tobytes().hex() == case["bits"], number
        else:
            assert digest_of(mask) == case["sha256"], number


def test_masks_of_photographs_are_those_of_pycocotools() -> None:
    document = json.loads((TESTS / "fixtures" / "coco" / "instances.json").read_text())
    sizes = {image["id"]: (image["height"], image["width"]) for image in document["images"]}
    annotations = sorted(document["annotations"], key=lambda each: int(each["id"]))
    masks = [drawn(each["segmentation"], *sizes[each["image_id"]]) for each in annotations]
    assert "".join(digest_of(mask)[:8] for mask in masks) == GOLDEN["files"]["instances.json"]
    assert any(each["iscrowd"] for each in annotations)


def test_the_masks_of_an_image_come_together() -> None:
    outlines = MaskOutlines(tuple(packed_outline([SQUARE][:count]) for count in (1, 0, 1)), 4, 5, "image.jpg")
    masks = outlines.decode()
    assert (len(outlines), masks.shape, masks.dtype) == (3, (3, 4, 5), torch.uint8)
    expected = torch.zeros(4, 5, dtype=torch.uint8)
    expected[1:3, 1:3] = 1
    assert masks.equal(torch.stack([expected, expected * 0, expected]))
    assert MaskOutlines((), 4, 5, "image.jpg").decode().shape == (0, 4, 5)


def test_outlines_travel_between_processes() -> None:
    outlines = MaskOutlines((packed_outline([SQUARE]),), 4, 5, "image.jpg")
    assert pickle.loads(pickle.dumps(outlines)).decode().equal(outlines.decode())
    assert repr(outlines) == "MaskOutlines(height=4, width=5, source='image.jpg')"


def test_polygons_of_two_corners_enclose_nothing() -> None:
    assert len(packed_outline([[1, 1, 3, 3], [], [2, 2]])) == 0
    assert drawn([[1, 1, 3, 3], SQUARE], 4, 5).equal(drawn([SQUARE], 4, 5))


def compressed(lengths: list[int]) -> str:
    """As `rleToString` in maskApi.c."""
    text = ""
    for place, length in enumerate(lengths):
        value, more = length - (lengths[place - 2] if place > 2 else 0), True
        while more:
            low, value = value & 0x1F, value >> 5
            more = value != (-1 if low & 0x10 else 0)
            text += chr(48 + (low | 0x20 * more))
    return text


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40) | st.integers(0, 100_000), min_size=1, max_size=30).filter(any))
def test_runs_are_the_same_as_a_list_and_as_a_string(lengths: list[int]) -> None:
    size = [1, sum(lengths)]
    packed = packed_outline({"size": size, "counts": lengths})
    assert packed.tolist() == [-2 - len(lengths), *size, *lengths]
    assert packed_outline({"size": size, "counts": compressed(lengths)}).tolist() == packed.tolist()
    expected = np.repeat(np.arange(len(lengths)) % 2, lengths)
    assert drawn({"size": size, "counts": lengths}, *size)[0].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("segmentation", "problem"),
    [
        (None, "a NoneType, neither polygons nor runs"),
        ("1 2 3", "a str, neither polygons nor runs"),
        ([1, 2, 3, 4, 5, 6], "a polygon of a int"),
        ([[1, 2, 3, 4, 5]], "a polygon of 5 numbers"),
        ([[1, 2, 3, 4, 5, "6"]], "a polygon of something else than numbers"),
        ([[1, 2, 3, 4, 5, None]], "a polygon of something else than numbers"),
        ([[1, 2, 3, 4, 5, 10**400]], "a polygon of something else than numbers"),
        ([[1, 2, 3, 4, 5, 1e9]], "a polygon with a corner at 1e+09"),
        ([[1, 2, 3, 4, 5, float("nan")]], "a polygon with a corner at nan"),
        ([[1, 2, -1.7e308, 4, 5, 6]], "a polygon with a corner at -1.7e+308"),
        ({}, "runs of the size None"),
        ({"size": [4], "counts": [4]}, "runs of the size [4]"),
        ({"size": [4, 0], "counts": [0]}, "runs of the size [4, 0]"),
        ({"size": [4, 5.0], "counts": [20]}, "runs of the size [4, 5.0]"),
        ({"size": [4, 5]}, "runs that are a NoneType"),
        ({"size": [4, 5], "counts": [19]}, "runs of 19 pixels for 4 rows and 5 columns"),
        ({"size": [4, 5], "counts": [21, -1]}, "runs of 20 pixels for 4 rows and 5 columns"),
        ({"size": [4, 5], "counts": []}, "runs of 0 pixels for 4 rows and 5 columns"),
        ({"size": [4, 5], "counts": [20.0]}, "runs that are no whole numbers"),
        ({"size": [4, 5], "counts": [2**70]}, "runs that are no whole numbers"),
        ({"size": [4, 5], "counts": ""}, "runs of 0 pixels for 4 rows and 5 columns"),
        ({"size": [4, 5], "counts": "d"}, "runs in a string that is damaged or cut short"),
        ({"size": [4, 5], "counts": "\u00e9"}, "runs in a string that is damaged or cut short"),
        ({"size": [4, 5], "counts": "\ud800"}, "runs in a string that is damaged or cut short"),
        ({"size": [4, 5], "counts": " "}, "runs in a string that is damaged or cut short"),
        ({"size": [4, 5], "counts": "P" * 12 + "0"}, "runs in a string that is damaged"),
        ({"size": [4, 5], "counts": compressed([19])}, "runs of 19 pixels for 4 rows and 5 columns"),
        ({"size": [4, 5], "counts": compressed([30, -10])}, "runs of 20 pixels for 4 rows and 5 columns"),
    ],
    ids=range(28),
)
def test_malformed_segmentations_are_refused(segmentation: object, problem: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(problem)):
        packed_outline(segmentation)


def test_outlines_that_take_too_much_memory_together_are_refused() -> None:
    zeros = packed_outline({"size": [9000, 9000], "counts": [81_000_000]})
    with pytest.raises(
        DataError, match=r"The masks of image\.jpg are too large to be decoded\.\n.*27 masks of 9000 x 9000"
    ):
        MaskOutlines((zeros,) * 27, 9000, 9000, "image.jpg").decode()


@pytest.mark.parametrize(
    ("segmentation", "given_"),
    [
        ({"size": [5, 4], "counts": [20]}, "runs for 5 rows and 4 columns"),
        ([[0, 0, 4e8, 0, 4e8, 4e8]], "a polygon 1200000000 pixels long, more than 838860"),
    ],
    ids=["another size", "too long"],
)
def test_an_outline_that_cannot_be_drawn_is_named(segmentation: Any, given_: str) -> None:
    outlines = MaskOutlines((packed_outline([SQUARE]), packed_outline(segmentation)), 4, 5, "images/1.jpg")
    with pytest.raises(DataError) as caught:
        outlines.decode()
    assert caught.value.what == "The mask of object 1 on images/1.jpg cannot be drawn."
    assert caught.value.given == given_
    assert caught.value.expected == "an outline within 4 rows and 5 columns"
    assert caught.value.hint == "repair its segmentation, or leave the object out"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-20, 30)] * 2), min_size=3, max_size=9), st.integers(1, 12), st.integers(1, 12))
def test_where_a_polygon_begins_does_not_matter(corners: list[tuple[float, float]], height: int, width: int) -> None:
    there = [value for corner in corners for value in corner]
    turned = [value for corner in corners[1:] + corners[:1] for value in corner]
    assert drawn([there], height, width).equal(drawn([turned], height, width))


PIXELS = np.array([[0, 255, 255], [0, 0, 7]], dtype=np.uint8)


def png(pixels: Any, mode: str | None = None) -> bytes:
    image = Image.fromarray(np.asarray(pixels))
    file = BytesIO()
    (image.convert(mode) if mode else image).save(file, "PNG")
    return file.getvalue()


def masks_of(*data: bytes, height: int = 2, width: int = 3, decoding: Decoding | None = None) -> PngMasks:
    return PngMasks(data, height, width, "Record 1 of x, at byte 5,", decoding or Decoding())


def test_pixels_above_black_belong_to_the_object() -> None:
    masks = masks_of(png(PIXELS), png(PIXELS == 0))
    decoded = masks.decode()
    assert len(masks) == 2
    assert decoded.dtype == torch.uint8
    assert decoded.tolist() == [[[0, 1, 1], [0, 0, 1]], [[1, 0, 0], [1, 1, 0]]]


@pytest.mark.parametrize("channel", [0, 1, 2])
@pytest.mark.parametrize("mode", ["RGB", "P", "RGBA"])
def test_any_colour_but_black_belongs_to_the_object(channel: int, mode: str) -> None:
    pixels = np.zeros((2, 3, 3), dtype=np.uint8)
    pixels[..., channel] = 255 * (PIXELS > 0)
    assert masks_of(png(pixels, mode)).decode()[0].tolist() == [[0, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("masks", [masks_of(), dense_masks(np.empty(0, np.float32), 2, 3)])
def test_an_image_without_objects_has_no_masks(masks: PngMasks | DenseMasks) -> None:
    assert len(masks) == 0
    assert masks.decode().shape == (0, 2, 3)
    assert masks.decode().dtype == torch.uint8


@pytest.mark.parametrize(
    ("data", "decoding", "what", "given_"),
    [
        (png(PIXELS.T), None, "has not the size of its image", "a header that announces 2 x 3 pixels"),
        (b"", None, "cannot be decoded", "no bytes"),
        (png(PIXELS)[:-30], None, "cannot be decoded", ""),
        (
            png(PIXELS),
            Decoding(max_pixels=5),
            "is too large to be decoded",
            f"a header that announces 3 x 2 pixels, in {len(png(PIXELS))} bytes",
        ),
    ],
    ids=["turned", "empty", "cut short", "too large"],
)
def test_a_mask_that_cannot_be_used_is_named(data: bytes, decoding: Decoding | None, what: str, given_: str) -> None:
    small = png(np.zeros((2, 3), np.uint8))
    with pytest.raises(DataError) as caught:
        masks_of(*([] if decoding else [small]), data, decoding=decoding).decode()
    number = 0 if decoding else 1
    assert caught.value.what == f"Record 1 of x, at byte 5, mask {number}, {what}."
    assert given_ in str(caught.value.given)


def test_sizes_are_checked_before_any_mask_is_decoded() -> None:
    class Header(Decoding):
        def decode(self, *_: Any, **__: Any) -> torch.Tensor:
            raise AssertionError("decoded")

    with pytest.raises(DataError, match="expected: 1000000 x 1000000 pixels"):
        masks_of(png(PIXELS), height=10**6, width=10**6, decoding=Header()).decode()


def test_masks_that_take_too_much_memory_together_are_refused() -> None:
    large = png(np.zeros((9000, 9000), bool))
    with pytest.raises(DataError) as caught:
        masks_of(*[large] * 120, height=9000, width=9000).decode()
    assert caught.value.what == "The masks of Record 1 of x, at byte 5 are too large to be decoded."
    assert caught.value.given == f"120 masks of 9000 x 9000 pixels: {120 * 81_000_000} bytes"
    assert caught.value.expected == f"at most {2**31} bytes, one for each pixel of each mask"
    assert caught.value.hint == "leave it out, or cut the image into smaller ones"


@settings(max_examples=30, deadline=None)
@given(count=st.integers(0, 3), height=st.integers(1, 5), width=st.integers(1, 9), seed=st.integers(0, 99))
def test_packed_masks_come_back(count: int, height: int, width: int, seed: int) -> None:
    values = np.random.default_rng(seed).choice(np.array([-1, 0, 1e-9, 2], np.float32), (count, height, width))
    masks = dense_masks(values, height, width)
    assert len(masks) == count
    assert masks.decode().dtype == torch.uint8
    np.testing.assert_array_equal(masks.decode(), values > 0)
    assert masks == dense_masks(values.ravel(), height, width)


LAZY = {
    "files": masks_of(png(PIXELS), png(PIXELS == 0), png(PIXELS)),
    "bits": dense_masks(np.arange(18, dtype=np.float32) % 5 - 1, 2, 3),
    "outlines": MaskOutlines(tuple(packed_outline([[0, 0, x, 0, x, 2]]) for x in (1, 2, 3)), 2, 3, "image.jpg"),
}


@pytest.mark.parametrize("masks", LAZY.values(), ids=LAZY)
@pytest.mark.parametrize("places", [[2, 0], [1], []])
def test_selected_masks_are_those_at_the_places(masks: Masks, places: list[int]) -> None:
    selected = masks.selected(places)
    assert len(selected) == len(places)
    assert selected.decode().equal(masks.decode()[places])
    assert (selected.height, selected.width) == (2, 3)


def test_packed_masks_travel_as_few_bytes() -> None:
    masks = dense_masks(np.ones((4, 100, 100), np.float32), 100, 100)
    assert len(pickle.dumps(masks)) < 4 * 100 * 100 / 8 + 300
    assert pickle.loads(pickle.dumps(masks)) == masks
