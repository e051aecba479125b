from __future__ import annotations

import numpy as np
import pytest
import torch
from pixels_golden import IMAGES, GivenDraws, golden, some_draws

from lockstep.augmentations.pixels import RandomBlackPatches, RandomPixelValueScale
from lockstep.errors import InputError


def test_each_value_has_a_factor_of_its_own() -> None:
    images = torch.full((2, 3, 40, 51), 100.0)
    result = RandomPixelValueScale()({"image": images}, some_draws(2))["image"]
    assert result.dtype == torch.float32
    assert result.shape == images.shape
    assert 90 <= result.min() < 90.1
    assert 109.9 < result.max() <= 110
    assert abs(result.mean() - 100) < 0.2
    assert abs(result.var() - 20**2 / 12) < 1
    assert not torch.equal(result[0], result[1])
    assert len(result[0].unique()) > 6000


def test_scaled_values_end_at_255() -> None:
    result = RandomPixelValueScale(minval=1.5, maxval=3.0)({"image": IMAGES}, some_draws(6))["image"]
    assert torch.equal(result == 0, IMAGES == 0)
    assert result.max() == 255


def test_a_value_is_scaled_alike_in_any_layout_and_batch() -> None:
    image = IMAGES[3].contiguous()
    option = RandomPixelValueScale()
    whole = option({"image": IMAGES}, some_draws(6))["image"][3]
    draws = some_draws(6)
    draws.positions = draws.positions[3:4]
    assert torch.equal(option({"image": [image]}, draws)["image"][0], whole)
    assert whole.is_contiguous()


def test_black_patches_are_those_of_tensorflow() -> None:
    places = {
        f"RandomBlackPatches image {patch}{what}": f"patch {patch}{what}"
        for patch in range(4)
        for what in ("", " top", " left")
    }
    option = RandomBlackPatches(max_black_patches=4, probability=0.5, size_to_image_ratio=0.3)
    result = option({"image": IMAGES}, GivenDraws(places))["image"]
    assert result.dtype == torch.uint8
    assert torch.equal(result.float(), golden("patches"))


def test_patches_are_squares_of_a_share_of_the_shorter_side() -> None:
    images = [torch.full((3, 30, 50), 7, dtype=torch.uint8), torch.full((3, 45, 20), 7, dtype=torch.uint8)]
    result = RandomBlackPatches(max_black_patches=1, probability=1.0)({"image": images}, some_draws(2))["image"]
    assert [image.shape for image in result] == [image.shape for image in images]
    for image, side in zip(result, (3, 2), strict=True):
        rows, columns = np.nonzero(image[0].numpy() == 0)
        assert len(rows) == side**2
        assert np.ptp(rows) == np.ptp(columns) == side - 1
    assert all(bool((image == 7).all()) for image in images)


def test_every_patch_has_its_chance() -> None:
    images = torch.full((400, 1, 10, 10), 7, dtype=torch.uint8)
    option = RandomBlackPatches(max_black_patches=2, probability=0.25)
    result = option({"image": images}, some_draws(400))["image"]
    untouched = (result == 7).all(dim=(1, 2, 3)).float().mean()
    assert abs(untouched - 0.75**2) < 0.06
    assert torch.equal(option({"image": images}, some_draws(400))["image"], result)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match=r"\(minval, maxval\) is out of range"):
        RandomPixelValueScale(minval=1.2)
    with pytest.raises(InputError, match="size_to_image_ratio is out of range"):
        RandomBlackPatches(size_to_image_ratio=1.1)
