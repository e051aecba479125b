from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.errors import DataError
from lockstep.images.decode import Decoding
from lockstep.images.masks import DenseMasks, PngMasks, dense_masks

SQUARE = np.array([[0, 255, 255], [0, 0, 7]], dtype=np.uint8)


def png(pixels: Any, mode: str | None = None) -> bytes:
    image = Image.fromarray(np.asarray(pixels))
    file = BytesIO()
    (image.convert(mode) if mode else image).save(file, "PNG")
    return file.getvalue()


def masks_of(*data: bytes, height: int = 2, width: int = 3, decoding: Decoding | None = None) -> PngMasks:
    return PngMasks(data, height, width, "Record 1 of x, at byte 5,", decoding or Decoding())


def test_pixels_above_black_belong_to_the_object() -> None:
    masks = masks_of(png(SQUARE), png(SQUARE == 0))
    decoded = masks.decode()
    assert len(masks) == 2
    assert decoded.dtype == torch.uint8
    assert decoded.tolist() == [[[0, 1, 1], [0, 0, 1]], [[1, 0, 0], [1, 1, 0]]]


@pytest.mark.parametrize("channel", [0, 1, 2])
@pytest.mark.parametrize("mode", ["RGB", "P", "RGBA"])
def test_any_colour_but_black_belongs_to_the_object(channel: int, mode: str) -> None:
    pixels = np.zeros((2, 3, 3), dtype=np.uint8)
    pixels[..., channel] = 255 * (SQUARE > 0)
    assert masks_of(png(pixels, mode)).decode()[0].tolist() == [[0, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("masks", [masks_of(), dense_masks(np.empty(0, np.float32), 2, 3)])
def test_an_image_without_objects_has_no_masks(masks: PngMasks | DenseMasks) -> None:
    assert len(masks) == 0
    assert masks.decode().shape == (0, 2, 3)
    assert masks.decode().dtype == torch.uint8


@pytest.mark.parametrize(
    ("data", "decoding", "what", "given_"),
    [
        (png(SQUARE.T), None, "has not the size of its image", "a header that announces 2 x 3 pixels"),
        (b"", None, "cannot be decoded", "no bytes"),
        (png(SQUARE)[:-30], None, "cannot be decoded", ""),
        (
            png(SQUARE),
            Decoding(max_pixels=5),
            "is too large to be decoded",
            f"a header that announces 3 x 2 pixels, in {len(png(SQUARE))} bytes",
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
        masks_of(png(SQUARE), height=10**6, width=10**6, decoding=Header()).decode()


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


def test_packed_masks_travel_as_few_bytes() -> None:
    masks = dense_masks(np.ones((4, 100, 100), np.float32), 100, 100)
    assert len(pickle.dumps(masks)) < 4 * 100 * 100 / 8 + 300
    assert pickle.loads(pickle.dumps(masks)) == masks
