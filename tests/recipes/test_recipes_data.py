"""Data of a recipe: paths that are told or not, what of it is read, and what becomes of the images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_images import image_folder, image_shards

from lockstep.augmentations.crops import DistortedCrop
from lockstep.data.loader import Loader
from lockstep.errors import DataError, InputError, RecipeError
from lockstep.randomness import Draws
from lockstep.readers.reader import decoder_of
from lockstep.recipes.data import ImageData, MnistData
from lockstep.recipes.preprocessing import Cifarnet, Inception, Lenet, Preprocessing, ResizedCrop, Vgg
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.storage.remote_path import RemotePath


def said_by(call: Any, *given: Any) -> str:
    with pytest.raises(InputError) as caught:
        call(*given)
    return str(caught.value)


# Where it is ----------------------------------------------------------------------------------------------------------

HOW_TO_TELL = (
    "  expected: sharded records, tar shards, a folder with a folder of images for each class, Parquet or Arrow files, "
    "a data set of Hugging Face's or of TFDS (tfds:NAME/VERSION/SPLIT)\n"
    "  hint:     --set data.{0}=PATH, or in a recipe's file, such as 'shards/{0}-*'. To build shards: "
    "`lockstep convert images FOLDER --to shards` of folders of images, "
    "`lockstep convert imagenet --help` of ImageNet's archives"
)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_path_that_nobody_told_says_how_to_build_the_data(split: Any) -> None:
    assert said_by(ImageData(split=split).check_complete) == (
        f"This recipe has not been told where its {split} images are.\n  given:    no data.{split}\n"
        + HOW_TO_TELL.format(split)
    )
    assert "told where its validation images are" in said_by(ImageData(train="x").reader, "validation", 3)


def test_what_is_read_of_a_store_is_kept_within_a_bound(bucket: RemotePath, tmp_path: Path) -> None:
    image_shards(tmp_path / "shards", "train", [0, 1, 2])
    for file in (tmp_path / "shards").iterdir():
        (bucket / file.name).upload(file)
    for cache_gb in (0.0, 0.02):
        data = ImageData(train=f"{bucket}/train-*", cache=str(tmp_path / "kept"), cache_gb=cache_gb)
        data.reader("train", 3).read_batch(np.arange(2))
        kept = tmp_path / "kept" / "remote-blocks"
        assert kept.exists() == (cache_gb > 0)
    assert kept.stat().st_size <= 20_000_000
    with pytest.raises(RecipeError, match="cache_gb"):
        with_settings(find("flowers"), ["data.cache_gb=-1"])


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_an_empty_path_is_none_at_all(split: str) -> None:
    """A variable of the shell that is not set makes one: it would be the folder that one is in."""
    with pytest.raises(RecipeError, match=f"data in --set: This recipe has not been told where its {split} images"):
        with_settings(find("flowers"), [f"data.{split}="])


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_path_that_leads_nowhere_is_refused_before_workers_start(tmp_path: Path, split: str) -> None:
    train = str(image_folder(tmp_path / "photos"))
    data = replace(ImageData(train=train, validation=train, test=train), **{split: str(tmp_path / "phtos")})
    said = said_by(data.check_complete)
    assert said.startswith(f"There is no data at {tmp_path}/phtos.\n  given:    no file {tmp_path}/phtos\n")
    assert f"  expected: {ImageData.known}\n" in said
    assert said.endswith(f"hint:     did you mean {train}?")


@pytest.mark.parametrize("path", ["shards/train-*", "shards/train-{00000..00003}-of-00004", "memory://none/train-*"])
def test_a_pattern_that_matches_nothing_is_refused_before_workers_start(path: str) -> None:
    said_by(ImageData(train=path).check_complete)


def test_what_is_there_may_be_named_in_any_way(tmp_path: Path) -> None:
    shards, folder = image_shards(tmp_path / "shards", "train", [1, 2]), image_folder(tmp_path / "photos")
    for path in (shards, str(tmp_path / "shards"), str(folder), f"{shards[:-1]}{{00000..00001}}-of-00002"):
        data = ImageData(train=path)
        data.check_complete()
        assert len(data.reader("train", 4)) in (2, 6)


def test_the_splits_are_those_with_a_path() -> None:
    assert list(ImageData().splits) == []
    assert list(ImageData(test="c", train="a").splits) == ["train", "test"]
    assert list(MnistData().splits) == ["train", "validation", "test"]


# What is read ---------------------------------------------------------------------------------------------------------


def test_boxes_are_read_where_crops_are_made_by_them_and_only_to_train(tmp_path: Path) -> None:
    path = image_shards(tmp_path, "train", [1, 2], boxes=True)
    data = ImageData(train=path, preprocessing=Inception(crop_by_boxes=True))
    rows = np.array([0, 1])
    assert [*data.reader("train", 4, to_train=True).read_batch(rows)] == ["image", "label", "boxes"]
    assert [*data.reader("train", 4).read_batch(rows)] == ["image", "label"]
    assert [*replace(data, preprocessing=Inception()).reader("train", 4, to_train=True).read_batch(rows)] == [
        "image", "label"
    ]  # fmt: skip


def test_a_folder_has_no_boxes_and_crops_are_those_of_whole_images(tmp_path: Path) -> None:
    path = str(image_folder(tmp_path / "photos"))
    batches = []
    for by_boxes in (True, False):
        data = ImageData(train=path, image_size=16, preprocessing=Inception(crop_by_boxes=by_boxes))
        batch = data.reader("train", 3, to_train=True).read_batch(np.arange(6))
        draws = Draws(0, np.arange(6))
        for augment in data.training():
            batch = augment(batch, draws)
        batches.append(batch)
    assert [*batches[0]] == ["image", "label", "image.colour"]
    assert torch.equal(batches[0]["image"], batches[1]["image"])


@pytest.mark.parametrize(("offset", "labels"), [(-1, [1, 2, 3]), (0, [0, 1, 2])])
def test_labels_of_folders_leave_room_for_a_background(tmp_path: Path, offset: int, labels: list[int]) -> None:
    data = ImageData(train=str(image_folder(tmp_path / "photos", count=1)), labels_offset=offset)
    assert data.reader("train", 4).read_batch(np.arange(3))["label"].tolist() == labels


@pytest.mark.parametrize(("offset", "labels"), [(1, [0, 1, 2]), (0, [1, 2, 3])])
def test_labels_of_records_count_with_a_background_or_without(tmp_path: Path, offset: int, labels: list[int]) -> None:
    data = ImageData(train=image_shards(tmp_path, "train", [1, 3, 2]), labels_offset=offset)
    found = data.reader("train", 4).read_batch(np.arange(3))["label"].tolist()
    assert sorted(found) == labels


def test_images_are_decoded_as_the_recipe_says(tmp_path: Path) -> None:
    changed = with_settings(
        find("flowers"), [f"data.train={image_folder(tmp_path / 'a')}", 'data.decoding.decoder="pillow"']
    )
    assert isinstance(changed.data, ImageData)
    assert decoder_of(changed.data.reader("train", 6)).startswith("pillow ")


def test_digits_have_ten_classes() -> None:
    MnistData().prepare()
    reader = MnistData().reader("test", 5)
    with pytest.raises(DataError, match=r"The label of .* is none of the model's classes") as caught:
        reader.read_batch(np.arange(50))
    assert caught.value.expected == "0 to 4, for a model with 5 classes"
    assert MnistData().reader("test", 10).read_batch(np.arange(50))["label"].max() == 9


# What becomes of the images -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "what", "given_text"),
    [
        ({"image_size": 0}, "image_size is out of range.", "image_size=0"),
        ({"image_size": 299.0}, "image_size is of the wrong type.", "image_size is float"),
        ({"labels_offset": 10**20}, "labels_offset is out of range.", f"labels_offset={10**20}"),
        ({"labels_offset": -(10**20)}, "labels_offset is out of range.", f"labels_offset=-{10**20}"),
        ({"preprocessing": Vgg()}, "short_side is out of range.", "short_side=(256, 512), size=299"),
        (
            {"preprocessing": Vgg((128, 96)), "image_size": 64},
            "short_side is out of range.",
            "short_side=(128, 96)",
        ),
        ({"preprocessing": Vgg((300,))}, "short_side is of the wrong length.", "short_side=(300,)"),
    ],
    ids=["no_pixels", "float", "large", "small", "vgg_of_299", "backwards", "one_number"],
)
def test_what_cannot_be_is_refused_with_the_recipe(fields: dict[str, Any], what: str, given_text: str) -> None:
    with pytest.raises(InputError) as caught:
        ImageData(**fields)
    assert (caught.value.what, caught.value.given) == (what, given_text)


@pytest.mark.parametrize(
    "preprocessing", [Inception(), Vgg((32, 40)), ResizedCrop()], ids=lambda value: type(value).__name__
)
def test_the_network_sees_images_of_that_size(tmp_path: Path, preprocessing: Preprocessing) -> None:
    data = ImageData(train=str(image_folder(tmp_path / "a", count=1)), image_size=20, preprocessing=preprocessing)
    for augment in (data.training(), data.evaluation()):
        batch = data.reader("train", 3).read_batch(np.arange(3))
        for each in augment:
            batch = each(batch, Draws(1, np.arange(3)))
        inputs = data.inputs(batch)
        assert (inputs.shape, inputs.dtype) == ((3, 3, 20, 20), torch.float32)
        assert inputs.isfinite().all()
    assert data.blank(2).shape == (2, 3, 20, 20)


@pytest.mark.parametrize("preprocessing", [Inception(), Inception(fast=True), Vgg((32, 40)), ResizedCrop(jitter=0.4)])
def test_the_network_sees_the_same_images_wherever_they_are_resized(
    tmp_path: Path, preprocessing: Preprocessing
) -> None:
    data = ImageData(train=str(image_folder(tmp_path / "a", count=2)), image_size=20, preprocessing=preprocessing)
    on_device = replace(data, preprocess_on="device")
    for name in ("training", "evaluation"):
        found = [
            loaded(Loader(each.reader("train", 3), batch_size=6, augment=getattr(each, name)(), num_processes=0), each)
            for each in (data, on_device)
        ]
        torch.testing.assert_close(*found, rtol=0, atol=0.05)


def loaded(loader: Loader, data: ImageData) -> torch.Tensor:
    return data.inputs(next(loader.batches(range(1), 1)))


@pytest.mark.parametrize(
    ("preprocessing", "names"),
    [
        (Cifarnet(), "RandomCrop"),
        (Lenet(), "CropOrPad"),
        (ResizedCrop(policy="rand_augment", erasing=0.1), "RandAugment, RandomErasing"),
    ],
)
def test_what_the_device_cannot_do_is_refused_with_the_recipe(preprocessing: Preprocessing, names: str) -> None:
    with pytest.raises(InputError, match=f"^{names} cannot be left for the device"):
        ImageData(preprocessing=preprocessing, preprocess_on="device")
    with pytest.raises(InputError, match="preprocess_on cannot be 'gpu'"):
        ImageData(preprocess_on="gpu")  # type: ignore[arg-type]


def test_another_size_is_another_preset() -> None:
    small = replace(ImageData(image_size=64), image_size=32)
    assert isinstance(small.training()[0], DistortedCrop)
    assert small.training()[0].size == 32
    assert small.blank(1).shape == (1, 3, 32, 32)
    assert small == ImageData(image_size=32)


@pytest.mark.parametrize(("scale", "lowest", "highest"), [("half", -0.5, 0.5), ("one", -1.0, 127 / 128)])
def test_digits_are_scaled_as_their_trainer_has_them(scale: Any, lowest: float, highest: float) -> None:
    pixels = torch.tensor([0, 255], dtype=torch.uint8).repeat(1, 392).reshape(1, 1, 28, 28)
    inputs = MnistData(scale=scale).inputs({"image": pixels})
    assert (inputs.min().item(), inputs.max().item()) == (lowest, pytest.approx(highest))
    assert MnistData(scale=scale).blank(2).shape == (2, 1, 28, 28)


@pytest.mark.parametrize("share", ["0 %", "100 %", "250%"])
def test_a_share_to_validate_is_one_of_the_training_examples(share: str) -> None:
    with pytest.raises(InputError, match="cannot be held out"):
        ImageData(train="photos", validation=share)
    with pytest.raises(InputError, match="cannot be held out"):
        ImageData(validation="10 %")


def test_the_training_examples_are_held_out_or_trained_on(tmp_path: Path) -> None:
    for number in range(40):
        (path := tmp_path / "ab"[number % 2] / f"{number}.png").parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    whole, data = ImageData(str(tmp_path)), ImageData(str(tmp_path), "25 %")
    held, kept = data.reader("validation", 2), data.reader("train", 2)
    names = [each.example_id(i) for each in (held, kept) for i in range(len(each))]
    every = whole.reader("train", 2)
    assert sorted(names) == [every.example_id(i) for i in range(len(every))]
    assert held.classes == kept.classes == ("a", "b")  # type: ignore[attr-defined]
    assert data.splits == ["train", "validation"]
    others = data.at("train", str(tmp_path)).reader("train", 2)
    assert len(others) == len(every), "none of other examples is held out"
