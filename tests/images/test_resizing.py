from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from lockstep.images.resizing import LEGACY_METHODS, resampled, resized

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "preprocessing_golden.npz")


def golden_images() -> Tensor:
    return torch.from_numpy(GOLDEN["images"][:2]).permute(0, 3, 1, 2)


@pytest.mark.parametrize(("height", "width"), [(5, 4), (17, 23), (11, 13)])
@pytest.mark.parametrize("method", LEGACY_METHODS)
def test_the_methods_of_tensorflow_give_its_numbers(method: str, height: int, width: int) -> None:
    expected = torch.from_numpy(GOLDEN[f"{method} {height}x{width}"]).permute(0, 3, 1, 2).float()
    values = resampled(golden_images().float(), height, width, method)
    torch.testing.assert_close(values, expected, rtol=0, atol=255e-5)
    image = resized(golden_images()[0], height, width, method)
    assert image.dtype == torch.uint8
    assert (image - expected[0].clamp(0, 255)).abs().max() <= 0.501


@pytest.mark.parametrize("method", LEGACY_METHODS)
@pytest.mark.parametrize(("length", "to"), [(500, 224), (1, 3), (3, 1), (299, 300), (47, 7)])
def test_an_even_image_stays_even(method: str, length: int, to: int) -> None:
    image = torch.full((3, length, 2), 200, dtype=torch.uint8)
    assert torch.equal(resized(image, to, 5, method), torch.full((3, to, 5), 200, dtype=torch.uint8))


def test_the_default_looks_at_every_pixel() -> None:
    stripes = (torch.arange(64) % 2 * 255).to(torch.uint8).expand(3, 8, 64)
    assert set(resized(stripes, 8, 8, "bilinear").unique().tolist()) == {0}
    smooth = resized(stripes, 8, 8)
    assert (smooth.float() - 127.5).abs().max() < 5
    assert torch.equal(smooth, interpolate(stripes[None], (8, 8), mode="bilinear", antialias=True)[0])


@pytest.mark.parametrize("size", [(5, 17), (11, 13)], ids=str)
@pytest.mark.parametrize("method", ["antialiased", *LEGACY_METHODS])
def test_a_part_of_the_result_is_that_of_the_whole(method: str, size: tuple[int, int]) -> None:
    image = golden_images()[0]
    rows, columns = slice(1, 4), slice(3, 9)
    assert torch.equal(resized(image, *size, method, rows, columns), resized(image, *size, method)[:, rows, columns])


@pytest.mark.parametrize("method", ["antialiased", *LEGACY_METHODS])
def test_an_image_of_the_right_size_stays_as_it_is(method: str) -> None:
    image = golden_images()[0]
    assert torch.equal(resized(image, 11, 13, method), image)


@pytest.mark.parametrize("method", LEGACY_METHODS)
def test_floats_are_not_rounded(method: str) -> None:
    image = golden_images()[0]
    assert torch.equal(resized(image.float(), 17, 23, method), resampled(image.float(), 17, 23, method))


def test_with_aligned_corners_the_corners_stay() -> None:
    image = golden_images()[0].float()
    for method in ("bilinear", "nearest"):
        result = resized(image, 5, 30, method, align_corners=True)
        torch.testing.assert_close(result[:, ::4, ::29], image[:, ::10, ::12])
    expected = interpolate(image[None], (5, 30), mode="bilinear", align_corners=True)[0]
    torch.testing.assert_close(resized(image, 5, 30, "bilinear", align_corners=True), expected)
