"""The published pipelines as parts of a recipe: what each makes of an image, and which of its numbers are refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny_images import photo
from torch import Tensor

from lockstep.augmentations.augment import Augment
from lockstep.augmentations.auto_augment import RandAugment, TrivialAugmentWide
from lockstep.augmentations.colours import GreyDraws, JitterDraws
from lockstep.augmentations.crops import CentralCrop, DistortedCrop, RandomResizedCrop, ShortSideCrop
from lockstep.augmentations.mixing import MixDraws
from lockstep.augmentations.pixels import RandomErasing
from lockstep.augmentations.slim_presets import cifarnet_preset, inception_preset, lenet_preset, vgg_preset
from lockstep.augmentations.turns import HorizontalFlip, RandomVerticalFlip
from lockstep.errors import InputError, RecipeError
from lockstep.images.colour import SLIM_ORDERS
from lockstep.images.decode import AS_STORED, EncodedImage
from lockstep.images.normalisation import IMAGENET_MEAN, IMAGENET_STD
from lockstep.randomness import Draws
from lockstep.recipes.preprocessing import Cifarnet, Inception, Lenet, ResizedCrop, Vgg
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings

SIZE = 16


def augmented(augment: Sequence[Augment], count: int = 4) -> dict[str, Any]:
    batch: dict[str, Any] = {"image": [EncodedImage(photo(n, n), f"{n}.jpg", AS_STORED) for n in range(count)]}
    for each in augment:
        batch = each(batch, Draws(0, np.arange(count)))
    return batch


def one_colour(*rgb: int) -> dict[str, Tensor]:
    return {"image": torch.tensor(rgb, dtype=torch.uint8).reshape(1, 3, 1, 1).expand(1, 3, SIZE, SIZE).contiguous()}


# What they are --------------------------------------------------------------------------------------------------------


def test_inception_is_that_of_its_trainer() -> None:
    preset = Inception().preset(299)
    crop, flip, _ = preset.train
    assert crop == DistortedCrop(299, area=(0.05, 1.0), aspect=(0.75, 1.33), min_object_covered=0.1, resize="random")
    assert flip == HorizontalFlip()
    assert preset.evaluate == (CentralCrop(299, 0.875, resize="bilinear"),)
    assert isinstance(preset.inputs, partial)
    assert preset.inputs.keywords == {"orders": SLIM_ORDERS}


def test_fast_inception_is_slims_default() -> None:
    fast, slim = Inception(fast=True).preset(64), inception_preset(64)
    assert (fast.train, fast.evaluate) == (slim.train, slim.evaluate)


def test_inception_crops_by_boxes_where_asked() -> None:
    assert Inception(crop_by_boxes=True).preset(64).train[0].boxes_field == "boxes"  # type: ignore[attr-defined]
    assert Inception().preset(64).train[0].boxes_field is None  # type: ignore[attr-defined]


def test_a_crop_may_have_to_be_larger() -> None:
    assert Inception(least_area=0.5).preset(64).train[0].area == (0.5, 1.0)  # type: ignore[attr-defined]
    assert ResizedCrop(least_area=0.5).preset(64).train[0] == RandomResizedCrop(64, scale=(0.5, 1.0))


def test_vgg_cifarnet_and_lenet_are_slims_presets() -> None:
    for ours, slims in [
        (Vgg().preset(224), vgg_preset(224)),
        (Vgg((40, 50)).preset(32), vgg_preset(32, (40, 50))),
        (Cifarnet().preset(32), cifarnet_preset(32)),
        (Lenet().preset(28), lenet_preset(28)),
    ]:
        assert (ours.train, ours.evaluate, ours.inputs) == (slims.train, slims.evaluate, slims.inputs)


def test_a_resized_crop_is_scored_on_the_middle_of_a_slightly_larger_image() -> None:
    preset = ResizedCrop().preset(224)
    assert preset.train == (RandomResizedCrop(224, scale=(0.08, 1.0)), HorizontalFlip())
    assert preset.evaluate == (ShortSideCrop(224, (256, 256), place="middle"),)
    assert ResizedCrop().preset(1).evaluate == (ShortSideCrop(1, (1, 1), place="middle"),)


@pytest.mark.parametrize(
    ("policy", "operations"),
    [("none", ()), ("rand_augment", (RandAugment(),)), ("trivial_augment", (TrivialAugmentWide(),))],
)
def test_a_resized_crop_with_all_that_it_can_do(policy: Any, operations: tuple[Augment, ...]) -> None:
    made = ResizedCrop(jitter=0.4, policy=policy, erasing=0.25).preset(SIZE)
    jitter = JitterDraws(brightness=0.4, contrast=0.4, saturation=0.4)
    assert made.train[2:] == (*operations, RandomErasing(p=0.25), jitter)
    batch = augmented(made.train)
    assert [*batch] == ["image", "image.jitter"]
    inputs = made.inputs(batch)
    assert inputs.shape == (4, 3, SIZE, SIZE)
    assert not torch.equal(inputs, made.inputs({"image": batch["image"]})), "colours are changed on the device"


def test_augmentations_of_a_list_come_in_their_order_and_those_of_the_device_last() -> None:
    mix, grey, turn, erase = MixDraws(0.8, 1.0), GreyDraws(), RandomVerticalFlip(), RandomErasing(p=0.5)
    how = ResizedCrop(ratio=(0.5, 2.0), resize="bilinear", horizontal_flip=0, augment=(grey, turn, mix, erase))
    assert how.preset(SIZE).train == (
        RandomResizedCrop(SIZE, (0.08, 1.0), (0.5, 2.0), "bilinear"),
        turn,
        erase,
        grey,
        mix,
    )
    assert how.mixing is mix
    assert ResizedCrop().mixing is None


def test_images_of_a_batch_are_mixed_after_their_colours() -> None:
    mix, jitter = MixDraws(0.8, 1.0), JitterDraws(brightness=0.4, contrast=0.4, saturation=0.4)
    made = ResizedCrop(jitter=0.4, augment=(mix,), mean=(0.0,) * 3, std=(1.0,) * 3).preset(SIZE)
    batch = augmented(made.train)
    assert [*batch] == ["image", "image.jitter", "image.mix"]
    expected = mix.apply({**batch, "image": jitter.apply(batch)})
    assert torch.equal(made.inputs(batch), expected)
    assert not torch.equal(expected, jitter.apply(batch))
    scored = {"image": batch["image"]}
    assert torch.equal(made.inputs(scored), jitter.apply(scored)), "what is scored is not mixed"


def test_what_is_computed_on_the_device_comes_once() -> None:
    with pytest.raises(InputError, match=r"MixDraws can be computed once(.|\n)*make one of them"):
        ResizedCrop(augment=(MixDraws(0.2), MixDraws(0.0, 1.0)))
    with pytest.raises(InputError, match=r"JitterDraws can be computed once.*\n.*, jitter=0.4\n.*\n.*leave jitter out"):
        ResizedCrop(jitter=0.4, augment=(JitterDraws(0.4),))


# What a network reads -------------------------------------------------------------------------------------------------


def test_a_resized_crop_is_normalised_by_channel() -> None:
    found = ResizedCrop().preset(SIZE).inputs(one_colour(255, 0, 51))[0, :, 0, 0]
    expected = [
        (value - mean) / std for value, mean, std in zip((1.0, 0.0, 0.2), IMAGENET_MEAN, IMAGENET_STD, strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_networks_of_caffe_have_blue_first() -> None:
    """Their numbers are in that order, too: 255 * (value / 255 - mean / 255) is the value less its mean."""
    caffe = ResizedCrop(mean=(104 / 255, 117 / 255, 123 / 255), std=(1 / 255,) * 3, channel_order="bgr")
    found = caffe.preset(SIZE).inputs(one_colour(200, 100, 50))[0, :, 0, 0]
    assert found.tolist() == pytest.approx([50 - 104, 100 - 117, 200 - 123], abs=1e-3)


def test_inception_has_values_from_minus_1_to_1() -> None:
    inputs = Inception().preset(SIZE).inputs
    assert inputs(one_colour(0, 255, 255))[0, :, 0, 0].tolist() == pytest.approx([-1, 1, 1])
    batch = augmented(Inception().preset(SIZE).train)
    assert batch["image.colour"].shape[0] == 4
    assert inputs(batch).abs().max() <= 1


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "setting", "what", "given_text"),
    [
        ("inception", "least_area=0", "least_area is out of range.", "least_area=0"),
        ("inception", "least_area=1.01", "least_area is out of range.", "least_area=1.01"),
        ("resized_crop", "least_area=-0.1", "least_area is out of range.", "least_area=-0.1"),
        ("resized_crop", "jitter=-0.1", "jitter is out of range.", "jitter=-0.1"),
        ("resized_crop", "erasing=1.01", "erasing is out of range.", "erasing=1.01"),
        ("resized_crop", "erasing=-0.1", "erasing is out of range.", "erasing=-0.1"),
        ("resized_crop", "mean=[0.5, 0.5]", "mean is of the wrong length.", "mean=(0.5, 0.5)"),
        ("resized_crop", "std=[1, 1, 1, 1]", "std is of the wrong length.", "std=(1, 1, 1, 1)"),
        ("resized_crop", "std=[0.2, 0, 0.2]", "std[1] is out of range.", "std[1]=0"),
        ("resized_crop", "std=[0.2, -1, 0.2]", "std[1] is out of range.", "std[1]=-1"),
    ],
)
def test_numbers_out_of_range_are_refused_with_the_recipe(kind: str, setting: str, what: str, given_text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        with_settings(find("flowers"), [f"data.preprocessing.kind={kind}", f"data.preprocessing.{setting}"])
    assert (caught.value.what, caught.value.given) == (f"data.preprocessing in --set: {what}", given_text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ResizedCrop(mean="abc"),  # type: ignore[arg-type]
        lambda: ResizedCrop(std=(1, 1, "1")),  # type: ignore[arg-type]
        lambda: ResizedCrop(jitter="a lot"),  # type: ignore[arg-type]
        lambda: ResizedCrop(policy="auto_augment"),  # type: ignore[arg-type]
        lambda: ResizedCrop(channel_order="rbg"),  # type: ignore[arg-type]
        lambda: Inception(least_area=True),
        lambda: Vgg((256,)).preset(224),  # type: ignore[arg-type]
        lambda: Vgg((256, 512)).preset(257),
    ],
    ids=["mean", "std", "jitter", "policy", "channel_order", "least_area", "one_side", "size"],
)
def test_a_script_is_refused_the_same(make: Any) -> None:
    with pytest.raises(InputError):
        make()


def test_all_of_an_image_may_be_asked_for() -> None:
    assert ResizedCrop(least_area=1).preset(8).train[0] == RandomResizedCrop(8, scale=(1, 1.0))
    assert Inception(least_area=1.0).preset(8).train[0].area == (1.0, 1.0)  # type: ignore[attr-defined]
