"""Pixels become the floats that networks expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.errors import InputError
from lockstep.images.normalisation import IMAGENET_MEAN, IMAGENET_STD, normalize, standardize

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "presets_golden.npz")


def first_channels(array: Any) -> Tensor:
    return torch.from_numpy(array).movedim(-1, -3)


def test_images_of_nearly_one_colour_are_standardised_as_in_tensorflow() -> None:
    images = torch.full((2, 3, 8, 8), 77.0)
    images[1, 1, 3, 3] = 77.5
    torch.testing.assert_close(standardize(images), first_channels(GOLDEN["flat"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 224, 224), (3, 31, 17), (1, 1, 1), (7,)])
def test_images_are_standardised_alike_in_any_slice_by_any_number_of_threads(shape: tuple[int, ...]) -> None:
    images = torch.rand(5, *shape, generator=torch.Generator().manual_seed(0))
    whole = standardize(images)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(torch.cat([standardize(images[:1]), standardize(images[1:])]), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8], ids=str)
def test_images_of_any_type_are_standardised_in_32_bits(dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (2, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(dtype)
    found = standardize(images)
    assert found.dtype == torch.float32
    assert torch.equal(found, standardize(images.float()))


@pytest.mark.parametrize("images", [torch.tensor(1.0), torch.zeros(4), torch.zeros(2, 3, 4, 4).long()])
def test_images_of_other_types_are_not_standardised(images: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"cannot be standardised(.|\n)*expected: uint8 or floats"):
        standardize(images)


def test_normalised_takes_bytes_and_shares_alike() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    expected = (images / 255 - torch.tensor(IMAGENET_MEAN)[:, None, None]) / torch.tensor(IMAGENET_STD)[:, None, None]
    torch.testing.assert_close(normalize(images), expected)
    torch.testing.assert_close(normalize(images / 255), expected)
    assert torch.equal(normalize(images[:, :1], (0.0,), (1.0,)), images[:, :1] * torch.tensor(1 / 255))


@pytest.mark.parametrize(
    ("shape", "mean", "std", "says"),
    [
        ((2, 1, 4, 4), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), r"images of shape \(2, 1, 4, 4\), 3 means"),
        ((2, 3, 4, 4), (0.5, 0.5, 0.5), (1.0,), "1 deviations"),
        ((3, 4, 4), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), "cannot be normalised"),
        ((2, 1, 4, 4), (0.5,), (0.0,), r"std\[0\] is out of range"),
        ((2, 1, 4, 4), 0.5, (1.0,), "mean is of the wrong type"),
        ((2, 1, 4, 4), (0.5,), 1.0, "std is of the wrong type"),
        ((2, 1, 4, 4), ("0.5",), (1.0,), r"mean\[0\] is of the wrong type"),
    ],
)
def test_means_and_deviations_that_do_not_fit_are_refused(
    shape: tuple[int, ...], mean: tuple[float, ...], std: tuple[float, ...], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        normalize(torch.zeros(shape), mean, std)
