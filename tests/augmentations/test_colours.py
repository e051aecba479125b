from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pixels_golden import IMAGES, GivenDraws, golden, some_draws

from lockstep.augmentations.colours import (
    ColourOption,
    NormalizeImage,
    RandomAdjustBrightness,
    RandomAdjustContrast,
    RandomAdjustHue,
    RandomAdjustSaturation,
    RandomDistortColor,
    RandomRgbToGray,
    RgbToGray,
    SubtractChannelMean,
)
from lockstep.errors import InputError
from lockstep.images.decode import Decoding, EncodedImage

MEANS = (123.68, 116.78, 103.94)
AS_TENSORFLOW = [
    (RandomAdjustBrightness(), "brightness"),
    (RandomAdjustContrast(), "contrast"),
    (RandomAdjustHue(), "hue"),
    (RandomAdjustSaturation(), "saturation"),
    (RandomDistortColor(), "distort 0"),
    (RandomDistortColor(color_ordering=1), "distort 1"),
    (RgbToGray(), "grey"),
    (NormalizeImage(0, 256, -1, 1), "normalised"),
    (SubtractChannelMean(MEANS), "subtracted"),
]
ALL = [option for option, _ in AS_TENSORFLOW] + [RandomRgbToGray(probability=0.5)]


def options(cases: list[ColourOption]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("option", cases, ids=[type(option).__name__ for option in cases])


@pytest.mark.parametrize(("option", "name"), AS_TENSORFLOW, ids=[name for _, name in AS_TENSORFLOW])
def test_colours_equal_tensorflows_numbers(option: ColourOption, name: str) -> None:
    kind = type(option).__name__
    draws = GivenDraws({f"{kind} image {what}": what for what in option.bounds})
    images = option({"image": IMAGES}, draws)["image"]
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, golden(name), rtol=0, atol=255 * 2e-6)


@options(ALL)
def test_images_of_several_sizes_stay_a_list_and_those_given_as_they_are(option: ColourOption) -> None:
    images = [IMAGES[0].clone(), IMAGES[3, :, :5, :7].clone()]
    result = option({"image": images, "labels": [3, 4]}, some_draws(2))
    assert [image.shape[1:] for image in result["image"]] == [(11, 14), (5, 7)]
    assert result["labels"] == [3, 4]
    torch.testing.assert_close(images, [IMAGES[0], IMAGES[3, :, :5, :7]])
    for row, image in enumerate(images):
        alone = {"image": image[None]}
        draws = some_draws(2)
        draws.positions = draws.positions[row : row + 1]
        torch.testing.assert_close(option(alone, draws)["image"][0], result["image"][row], rtol=0, atol=0)


@options(ALL)
def test_the_same_draws_give_the_same_images(option: ColourOption) -> None:
    first, *others = (option({"image": IMAGES}, some_draws(6))["image"] for _ in range(4))
    assert all(torch.equal(first, other) for other in others)
    if option.bounds:
        assert not torch.equal(first, option({"image": IMAGES}, some_draws(6, seed=4))["image"])


@options([option for option in ALL if option.bounds])
def test_values_end_at_0_and_255(option: ColourOption) -> None:
    images = torch.stack([option({"image": IMAGES}, some_draws(6, seed))["image"] for seed in range(5)])
    assert images.min() >= 0
    assert 250 < images.max() <= 255


@pytest.mark.parametrize("images", [torch.empty(0, 3, 4, 5), []])
def test_a_batch_without_examples_stays_as_it_is(images: torch.Tensor | list[torch.Tensor]) -> None:
    assert RandomDistortColor()({"image": images}, some_draws(0))["image"] is images


def test_some_of_the_images_become_grey_in_three_channels() -> None:
    result = RandomRgbToGray(probability=0.5)({"image": IMAGES}, some_draws(6))["image"]
    kept = [torch.equal(image, before.float()) for image, before in zip(result, IMAGES, strict=True)]
    assert len({*kept[:1], *kept[2:]}) == 2  # the one that is left out is grey before
    is_grey = [torch.equal(image[0], image[1]) and torch.equal(image[1], image[2]) for image in result]
    assert all(one != other for row, (one, other) in enumerate(zip(kept, is_grey, strict=True)) if row != 1)
    everywhere = RandomRgbToGray(probability=1.0)({"image": IMAGES}, some_draws(6))["image"]
    torch.testing.assert_close(everywhere, golden("grey").expand(-1, 3, -1, -1), rtol=0, atol=1e-4)


def test_a_mean_is_subtracted_from_each_channel() -> None:
    result = SubtractChannelMean((1.0, 2.0, 3.0))({"image": torch.zeros(2, 3, 4, 5)}, some_draws(2))["image"]
    assert result[:, :, 0, 0].tolist() == [[-1.0, -2.0, -3.0]] * 2


def test_the_channels_of_an_image_must_be_as_many_as_the_means() -> None:
    with pytest.raises(InputError, match=r"SubtractChannelMean cannot take these images[\s\S]*3 channels[\s\S]*2"):
        SubtractChannelMean((1.0, 2.0))({"image": IMAGES}, some_draws(6))


@options([RandomAdjustHue(), RandomAdjustSaturation(), RandomDistortColor(), RgbToGray(), RandomRgbToGray()])
def test_colours_need_three_channels(option: ColourOption) -> None:
    with pytest.raises(InputError, match="of 1 channels"):
        option({"image": IMAGES[:, :1]}, some_draws(6))


@options([RandomAdjustBrightness(), RandomAdjustContrast(), NormalizeImage(0, 255)])
def test_grey_images_can_be_made_lighter(option: ColourOption) -> None:
    assert option({"image": IMAGES[:, :1]}, some_draws(6))["image"].shape == (6, 1, 11, 14)


def test_files_are_decoded() -> None:
    data = (Path(__file__).parent.parent / "fixtures/images/hopper.jpg").read_bytes()
    file = EncodedImage(data, "hopper.jpg", Decoding())
    result = RandomAdjustBrightness()({"image": [file]}, some_draws(1))["image"][0]
    pixels = RandomAdjustBrightness()({"image": [file.decode()]}, some_draws(1))["image"][0]
    assert result.is_contiguous()
    assert torch.equal(result, pixels)


@given(st.floats(0, 1), st.floats(0, 1))
def test_brightness_is_a_share_of_255(level: float, delta: float) -> None:
    images = torch.full((1, 3, 1, 1), 255 * level)
    draws = some_draws(1)
    share = (2 * draws.uniform("RandomAdjustBrightness image brightness")[0] - 1) * delta
    result = RandomAdjustBrightness(delta)({"image": images}, draws)["image"]
    assert result.unique().item() == pytest.approx(255 * min(1, max(0, level + share)), abs=1e-3)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="color_ordering is out of range"):
        RandomDistortColor(color_ordering=2)
    with pytest.raises(InputError, match=r"\(min_delta, max_delta\) is out of range"):
        RandomAdjustContrast(min_delta=1.3)
    with pytest.raises(InputError, match="range of the pixels is empty"):
        NormalizeImage(0, 0)
    with pytest.raises(InputError, match=r"means\[1\]"):
        SubtractChannelMean((1.0, float("nan")))


def test_colour_operations_are_values() -> None:
    assert RandomAdjustHue() == RandomAdjustHue(max_delta=0.02) != RandomAdjustHue(max_delta=0.1)
    assert repr(replace(RandomDistortColor(), color_ordering=1)) == "RandomDistortColor(color_ordering=1)"
