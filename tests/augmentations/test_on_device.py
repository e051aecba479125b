from __future__ import annotations

from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from augmented import batch_of, draws_of, noise, png
from PIL import Image

from lockstep.augmentations import on_device
from lockstep.augmentations.augment import Augment, is_finished_on_device, turns
from lockstep.augmentations.auto_augment import RandAugment
from lockstep.augmentations.colours import ColourDraws, GreyDraws, JitterDraws
from lockstep.augmentations.crops import CentralCrop, CropOrPad, DistortedCrop, RandomResizedCrop, Resize, ShortSideCrop
from lockstep.augmentations.mixing import MixDraws
from lockstep.augmentations.on_device import OnDevice
from lockstep.augmentations.pixels import RandomErasing
from lockstep.augmentations.turns import HorizontalFlip, RandomRotation90, RandomVerticalFlip
from lockstep.errors import DataError, InputError
from lockstep.images.decode import EncodedImage
from lockstep.ragged import Ragged

FLIP = HorizontalFlip()
PIPELINES: dict[str, list[Augment]] = {
    "today": [RandomResizedCrop(24), FLIP, JitterDraws(0.4, 0.4, 0.4), GreyDraws(), MixDraws(0.2, 1.0)],
    "inception": [DistortedCrop(24, resize="random", boxes_field="boxes"), FLIP, ColourDraws()],
    "vgg": [ShortSideCrop(24, (25, 40), resize="bilinear"), FLIP],
    "all turns": [Resize(24), FLIP, RandomVerticalFlip(), RandomRotation90(), FLIP, RandomRotation90()],
    "scored": [ShortSideCrop(24, (27, 27), place="middle")],
    "scored as inception": [CentralCrop(24, resize="bilinear")],
}


def jpeg(height: int, width: int, seed: int) -> EncodedImage:
    file = BytesIO()
    Image.fromarray(noise(height, width, seed=seed).movedim(0, -1).numpy()).save(file, "JPEG")
    return EncodedImage(file.getvalue(), f"{seed}.jpg")


def images(count: int = 12) -> list[Any]:
    sides = np.random.default_rng(1).integers(20, 120, (count, 2)).tolist()
    return [jpeg(*each, seed) if seed % 3 else png(noise(*each, seed=seed)) for seed, each in enumerate(sides)]


def batch(count: int = 12) -> dict[str, Any]:
    boxes = [torch.tensor([[0.1, 0.2, 0.6, 0.9]])] * count
    return {"image": images(count), "label": torch.arange(count), "boxes": Ragged.of(boxes)}


def on_host(pipeline: list[Augment], given: dict[str, Any]) -> dict[str, Any]:
    for augment, turn in zip(pipeline, turns(pipeline), strict=True):
        given = augment(given, draws_of(len(given["image"])).again(turn))
    return given


def there(pipeline: list[Augment], given: dict[str, Any]) -> dict[str, Any]:
    left = OnDevice.of(pipeline)
    assert is_finished_on_device(left)
    made = left(given, draws_of(len(given["image"])))
    return left.on_device(made, made)


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
def test_what_is_left_for_the_device_gives_what_the_host_gives(pipeline: list[Augment]) -> None:
    given = batch()
    if pipeline is not PIPELINES["inception"]:
        del given["boxes"]
    expected, found = on_host(pipeline, given), there(pipeline, given)
    assert found.keys() == expected.keys()
    assert (found["image"].int() - expected["image"].int()).abs().max() <= 1
    assert found["image"].is_contiguous()
    for name in expected.keys() - {"image"}:
        assert torch.equal(found[name], expected[name])


@pytest.mark.parametrize(
    ("limit", "value"), [("_MOST_PIXELS", 2000), ("_MOST_COVERED", 1.5), ("_LONGEST", 30), ("_LONGEST", 0)]
)
def test_parts_beyond_a_limit_are_resized_on_the_host(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    pipeline = PIPELINES["vgg"]
    given = {"image": images()}
    expected = on_host(pipeline, given)["image"]
    before = OnDevice.of(pipeline)(given, draws_of(12))
    monkeypatch.setattr(on_device, limit, value)
    left = OnDevice.of(pipeline)
    made = left(given, draws_of(12))
    as_they_are = (made["image.resizes"][:, :4] == 24).all(1)
    assert as_they_are.any()
    assert as_they_are.all() == (value == 0)
    assert len(made["image"].values) < len(before["image"].values)
    assert (left.on_device(made, made)["image"].int() - expected.int()).abs().max() <= 1


def test_only_the_part_that_is_cropped_travels() -> None:
    given = {"image": images()}
    made = OnDevice.of([CentralCrop(24, fraction=0.5)])(given, draws_of(12))
    sides = [image.size for image in given["image"]]
    whole = torch.tensor([3 * width * height for width, height in sides])
    assert (made["image"].lengths <= 0.3 * whole).all()
    assert made["image"].values.dtype == torch.uint8


def test_a_batch_of_no_images() -> None:
    given = {"image": torch.empty(0, 3, 9, 9, dtype=torch.uint8)}
    assert there(PIPELINES["today"], given)["image"].shape == (0, 3, 24, 24)


@pytest.mark.parametrize(
    ("pipeline", "names"),
    [
        ([CropOrPad(24)], "CropOrPad"),
        ([Resize(24), RandAugment(), FLIP, RandomErasing()], "RandAugment, HorizontalFlip, RandomErasing"),
        ([Resize(24), JitterDraws(), RandomVerticalFlip()], "RandomVerticalFlip"),
        ([Resize(24), HorizontalFlip(field="other")], "HorizontalFlip"),
        ([], "A list without a crop"),
    ],
)
def test_what_cannot_be_left_is_named(pipeline: list[Augment], names: str) -> None:
    with pytest.raises(InputError, match=f"^{names} cannot be left for the device") as raised:
        OnDevice.of(pipeline)
    assert 'data.preprocess_on="host"' in str(raised.value)


def test_objects_would_stay_where_they_are() -> None:
    with pytest.raises(InputError, match="OnDevice would leave boxes where they are"):
        there([Resize(24)], batch_of(noise(30, 40)))


def test_a_device_without_floats_of_64_bits_is_refused() -> None:
    made = OnDevice.of([Resize(24)])({"image": images(2)}, draws_of(2))
    there = {**made, "image": SimpleNamespace(values=SimpleNamespace(device=torch.device("mps", 0)))}
    with pytest.raises(InputError, match="Apple's devices cannot resize") as raised:
        OnDevice.of([Resize(24)]).on_device(there, made)
    assert raised.value.given == "images on mps:0"


def test_an_image_that_cannot_be_decoded_is_named() -> None:
    file = jpeg(30, 40, seed=7)
    with pytest.raises(DataError, match=r"7\.jpg cannot be decoded"):
        there([Resize(24)], {"image": [EncodedImage(file.data[:-300], file.source)]})
