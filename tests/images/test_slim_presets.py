from __future__ import annotations

import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from lockstep.data.loader import Loader
from lockstep.data.order import Int64s
from lockstep.errors import DataError, InputError
from lockstep.images.augment import Augment
from lockstep.images.colour import FAST_ORDERS, SLIM_ORDERS, distort
from lockstep.images.crops import CropOrPad, RandomCrop, ShortSideCrop, scaled_sides
from lockstep.images.decode import Decoding, EncodedImage
from lockstep.images.normalisation import IMAGENET_MEAN, IMAGENET_STD, centred, normalised, standardised
from lockstep.images.resizing import resized
from lockstep.images.slim_presets import (
    PRESET_OF_NETWORK,
    SLIM_PRESETS,
    Preset,
    cifarnet_preset,
    inception_preset,
    lenet_preset,
    slim_preset,
    vgg_preset,
)
from lockstep.randomness import Draws
from lockstep.readers.reader import Cost

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "presets_golden.npz")
PARTS = [name for name in GOLDEN if name.startswith("part")]
PRESETS = {
    "lenet": lenet_preset(8),
    "cifarnet": cifarnet_preset(8),
    "vgg": vgg_preset(8, (9, 12)),
    "inception": inception_preset(8),
    "slow inception": inception_preset(8, fast=False),
}


def draws(count: int, start: int = 0) -> Draws:
    return Draws(5, np.arange(start, start + count))


def first_channels(array: Any) -> Tensor:
    return torch.from_numpy(array).movedim(-1, -3)


def encoded(pixels: Any, source: str = "noise") -> EncodedImage:
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return EncodedImage(written.getvalue(), source, Decoding("pillow"))


def golden_batch() -> dict[str, Any]:
    return {"image": [encoded(GOLDEN["image"])]}


def some_images(count: int) -> list[EncodedImage]:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3)).astype(np.uint8)
    return [encoded(noise[: 10 + row, : 30 - row], f"{row}.png") for row in range(count)]


def applied(augments: tuple[Augment, ...], batch: dict[str, Any], numbers: Draws) -> dict[str, Any]:
    for augment in augments:
        batch = augment(batch, numbers)
    return batch


def inputs(preset: Preset, batch: dict[str, Any]) -> Tensor:
    """Those of an evaluation."""
    return preset.inputs(applied(preset.evaluate, batch, draws(1)))


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("is_encoded", [True, False])
def test_the_middle_or_black_around_it_as_in_tensorflow(name: str, is_encoded: bool) -> None:
    height, width, size = map(int, name.split()[1:])
    image = GOLDEN["image"][:height, :width]
    given = [encoded(image)] if is_encoded else first_channels(image)[None]
    found = CropOrPad(size)({"image": given, "label": 3}, draws(1))
    assert torch.equal(found["image"][0], first_channels(GOLDEN[name]).to(torch.uint8))
    assert found["label"] == 3


def test_sides_are_scaled_as_in_slim() -> None:
    rows = GOLDEN["sides"]
    assert np.array_equal(scaled_sides(rows[:, :2], rows[:, 2]), rows[:, 3:])
    assert np.array_equal(rows[:, 3:].min(1), rows[:, 2])


def test_lenet_gives_the_numbers_of_tensorflow() -> None:
    found = inputs(lenet_preset(8), golden_batch())
    torch.testing.assert_close(found[0], first_channels(GOLDEN["lenet"]), rtol=0, atol=0)
    assert lenet_preset(8).train == lenet_preset(8).evaluate


def test_cifarnet_gives_the_numbers_of_tensorflow() -> None:
    preset = cifarnet_preset(8)
    batch = applied(preset.evaluate, golden_batch(), draws(1))
    expected = first_channels(GOLDEN["cifarnet"])
    torch.testing.assert_close(preset.inputs(batch)[0], expected[0], rtol=0, atol=1e-5)
    numbers = torch.tensor([[-60 / 255, 0.2], [0, 1.8], [63 / 255, 1.3]])
    colours = torch.cat([numbers, torch.tensor([[1, 0, 0.5]]).expand(3, -1)], dim=1)
    found = preset.inputs({"image": batch["image"].expand(3, -1, -1, -1), "image.colour": colours})
    torch.testing.assert_close(found, expected[1:], rtol=0, atol=1e-5)


def test_images_of_nearly_one_colour_are_standardised_as_in_tensorflow() -> None:
    images = torch.full((2, 3, 8, 8), 77.0)
    images[1, 1, 3, 3] = 77.5
    torch.testing.assert_close(standardised(images), first_channels(GOLDEN["flat"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 224, 224), (3, 31, 17), (1, 1, 1), (7,)])
def test_images_are_standardised_alike_in_any_slice_by_any_number_of_threads(shape: tuple[int, ...]) -> None:
    images = torch.rand(5, *shape, generator=torch.Generator().manual_seed(0))
    whole = standardised(images)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(torch.cat([standardised(images[:1]), standardised(images[1:])]), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8], ids=str)
def test_images_of_any_type_are_standardised_in_32_bits(dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (2, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(dtype)
    found = standardised(images)
    assert found.dtype == torch.float32
    assert torch.equal(found, standardised(images.float()))


@pytest.mark.parametrize("images", [torch.tensor(1.0), torch.zeros(4), torch.zeros(2, 3, 4, 4).long()])
def test_what_cannot_be_standardised_is_refused(images: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"cannot be standardised(.|\n)*expected: uint8 or floats"):
        standardised(images)


def test_vgg_gives_the_numbers_of_tensorflow_but_for_the_rounding() -> None:
    found = inputs(vgg_preset(7, (9, 12)), golden_batch())
    torch.testing.assert_close(found[0], first_channels(GOLDEN["vgg"]), rtol=0, atol=0.501)


def test_inception_gives_the_numbers_of_tensorflow_but_for_the_rounding() -> None:
    found = inputs(inception_preset(7), golden_batch())
    torch.testing.assert_close(found[0], first_channels(GOLDEN["inception"]), rtol=0, atol=0.501 * 2 / 255)


@pytest.mark.parametrize("fast", [True, False])
def test_inception_trains_with_colours_and_takes_all_orders_unless_it_is_fast(fast: bool) -> None:
    preset = inception_preset(8, fast=fast, boxes_field="boxes")
    batch = {"image": some_images(8), "boxes": [torch.tensor([[0.2, 0.2, 0.7, 0.7]])] * 8}
    batch = applied(preset.train, batch, draws(8))
    assert [*batch] == ["image", "image.colour"]
    expected = centred(distort(batch["image"], batch["image.colour"], FAST_ORDERS if fast else SLIM_ORDERS))
    assert torch.equal(preset.inputs(batch), expected)
    assert preset.train[0].resize == ("bilinear" if fast else "random")  # type: ignore[attr-defined]


def test_a_random_crop_is_anywhere_within_the_image_and_the_black_around_it() -> None:
    pixels = torch.arange(1, 6 * 7 + 1, dtype=torch.uint8).reshape(1, 1, 6, 7)
    found = RandomCrop(5, padding=2)({"image": pixels.expand(3000, -1, -1, -1)}, draws(3000))["image"]
    padded = torch.nn.functional.pad(pixels[0, 0], [2] * 4)
    windows = padded.unfold(0, 5, 1).unfold(1, 5, 1).flatten(0, 1)
    counts = (found[:, 0, None] == windows[None]).flatten(2).all(2).sum(0)
    assert counts.sum() == 3000
    assert counts.shape == (42,)
    assert counts.min() > 3000 / 42 * 0.5
    assert counts.max() < 3000 / 42 * 1.5


def test_the_short_side_is_drawn_and_then_the_place() -> None:
    """The image is a slope: a pixel tells where it was, the difference of two the scale."""
    slope = np.broadcast_to(np.arange(0, 200, 10, dtype=np.uint8)[None, :, None], (10, 20, 3))
    batch = {"image": [encoded(slope)] * 600}
    found = ShortSideCrop(8, (10, 12))(batch, draws(600))["image"]
    assert found.shape == (600, 3, 8, 8)
    lengths = draws(600).integers("ShortSideCrop image side", 10, 13)
    assert {*lengths.tolist()} == {10, 11, 12}
    image = batch["image"][0].decode()
    for row, length in list(zip(found, lengths.tolist(), strict=True))[:50]:
        whole = resized(image, length, 2 * length)
        windows = whole.unfold(1, 8, 1).unfold(2, 8, 1).movedim(0, 2).flatten(0, 1)
        assert (windows == row).flatten(1).all(1).any()


def test_the_middle_of_the_short_side() -> None:
    image = some_images(1)[0]
    found = ShortSideCrop(7, (12, 12), place="middle", resize="bilinear")({"image": [image]}, draws(1))["image"]
    assert torch.equal(found[0], resized(image.decode(), 12, 36, "bilinear")[:, 2:9, 14:21])


@pytest.mark.parametrize("resize", ["antialiased", "nearest"])
@pytest.mark.parametrize("shape", [(3000, 1, 3), (1, 3000, 3)])
def test_an_image_whose_other_side_would_become_too_long_is_refused(shape: tuple[int, ...], resize: str) -> None:
    """A small file may ask for gigabytes: 1 x 3000 pixels become 224 x 672000."""
    images = [encoded(GOLDEN["image"], "usual.png"), encoded(np.zeros(shape, np.uint8), "thin.png")]
    crop = ShortSideCrop(224, (224, 224), resize=resize)
    with pytest.raises(DataError, match=r"thin\.png is too thin to be resized") as raised:
        crop({"image": images}, draws(2))
    assert raised.value.given == f"{shape[0]} rows and {shape[1]} columns, for a short side of 224 pixels"
    assert raised.value.expected == "at most 100000000 pixels once it is resized"
    assert crop({"image": images[:1]}, draws(1))["image"].shape == (1, 3, 224, 224)
    with pytest.raises(DataError, match="An image is too thin"):
        crop({"image": torch.zeros(2, 1, 1, 3000)}, draws(2))


def test_the_limit_of_pixels_once_resized_is_that_of_decoding() -> None:
    image = replace(some_images(1)[0], decoding=Decoding("pillow", max_pixels=12 * 36 - 1))
    with pytest.raises(DataError, match="at most 431 pixels once it is resized"):
        ShortSideCrop(7, (12, 12))({"image": [image]}, draws(1))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 20))
def test_cropping_and_padding_keeps_the_middle(height: int, width: int, size: int) -> None:
    image = torch.randint(1, 255, (1, 1, height, width), generator=torch.Generator().manual_seed(0))
    found = CropOrPad(size)({"image": image}, draws(1))["image"]
    assert found.shape == (1, 1, size, size)
    assert (found > 0).sum() == min(height, size) * min(width, size)
    wide = CropOrPad(max(height, width) + 3)({"image": image}, draws(1))["image"]
    if height % 2 == width % 2 == size % 2 == wide.shape[2] % 2:
        assert torch.equal(CropOrPad(size)({"image": wide}, draws(1))["image"], found)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("training", [True, False])
def test_an_example_depends_on_its_own_draws_alone(name: str, training: bool) -> None:
    preset = PRESETS[name]
    augments = preset.train if training else preset.evaluate
    images = some_images(6)
    batch = applied(augments, {"image": images}, draws(6))
    whole = preset.inputs(batch)
    assert batch["image"].dtype == torch.uint8
    assert whole.dtype == torch.float32
    assert whole.shape == (6, 3, 8, 8)
    for row in range(6):
        alone = applied(augments, {"image": images[row : row + 1]}, draws(1, start=row))
        assert torch.equal(alone["image"][0], batch["image"][row])
        assert torch.equal(preset.inputs(alone)[0], whole[row])


class Encoded:
    """A reader of encoded images."""

    cost: Cost = "decode"

    def __len__(self) -> int:
        return 8

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        images = some_images(8)
        return {"image": [images[index] for index in indices]}

    def example_id(self, index: int) -> str:
        return str(index)


@pytest.mark.parametrize("name", ["cifarnet", "vgg"])
def test_loader_processes_read_the_same_pixels(name: str) -> None:
    found = []
    for num_processes in (0, 1):
        loader = Loader(Encoded(), batch_size=4, augment=PRESETS[name].train, num_processes=num_processes)
        batches = loader.batches(range(1), 1)
        found.append(PRESETS[name].inputs(next(batches)))
        batches.close()
    assert torch.equal(*found)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_sent_to_other_processes(name: str) -> None:
    preset = pickle.loads(pickle.dumps(PRESETS[name]))
    assert preset.train == PRESETS[name].train
    batch = applied(preset.train, {"image": some_images(2)}, draws(2))
    assert torch.equal(preset.inputs(batch), PRESETS[name].inputs(batch))


def test_every_network_of_slim_has_its_preset() -> None:
    assert {*PRESET_OF_NETWORK.values()} == {*SLIM_PRESETS}
    assert slim_preset("resnet_v2_50", 8).train == vgg_preset(8).train
    assert slim_preset("mobilenet_v1", 8).train == slim_preset("inception", 8).train == inception_preset(8).train
    with pytest.raises(InputError, match="preset cannot be 'alexnet'"):
        slim_preset("alexnet", 8)


def test_normalised_takes_bytes_and_shares_alike() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    expected = (images / 255 - torch.tensor(IMAGENET_MEAN)[:, None, None]) / torch.tensor(IMAGENET_STD)[:, None, None]
    torch.testing.assert_close(normalised(images), expected)
    torch.testing.assert_close(normalised(images / 255), expected)
    assert torch.equal(normalised(images[:, :1], (0.0,), (1.0,)), images[:, :1] * torch.tensor(1 / 255))


@pytest.mark.parametrize(
    ("shape", "mean", "std", "says"),
    [
        ((2, 1, 4, 4), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), r"images of shape \(2, 1, 4, 4\), 3 means"),
        ((2, 3, 4, 4), (0.5, 0.5, 0.5), (1.0,), "1 deviations"),
        ((3, 4, 4), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), "cannot be normalised"),
        ((2, 1, 4, 4), (0.5,), (0.0,), "std is out of range"),
        ((2, 1, 4, 4), 0.5, (1.0,), "mean is of the wrong type"),
        ((2, 1, 4, 4), (0.5,), 1.0, "std is of the wrong type"),
        ((2, 1, 4, 4), ("0.5",), (1.0,), r"mean\[0\] is of the wrong type"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    shape: tuple[int, ...], mean: tuple[float, ...], std: tuple[float, ...], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        normalised(torch.zeros(shape), mean, std)


@pytest.mark.parametrize("padding", [0, 3])
def test_an_image_that_is_too_small_is_named(padding: int) -> None:
    images = [encoded(GOLDEN["image"], "large.png"), encoded(GOLDEN["image"][:3], "small.png")]
    with pytest.raises(DataError, match=r"small\.png is too small") as raised:
        RandomCrop(10, padding=padding)({"image": images}, draws(2))
    assert f"3 rows and 14 columns, with {padding} more at each side" in str(raised.value)
    with pytest.raises(DataError, match="An image is too small"):
        RandomCrop(10)({"image": torch.zeros(2, 1, 12, 4)}, draws(2))


@pytest.mark.parametrize("augment", [CropOrPad(4), RandomCrop(4), ShortSideCrop(4, (4, 5))], ids=repr)
def test_what_are_no_images_is_refused(augment: Augment) -> None:
    with pytest.raises(InputError, match=f"{type(augment).__name__} finds no encoded images"):
        augment({"image": torch.zeros(3, 8, 8)}, draws(3))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CropOrPad(0), "size is out of range"),
        (lambda: CropOrPad(8.5), "size is of the wrong type"),  # type: ignore[arg-type]
        (lambda: RandomCrop(0), "size is out of range"),
        (lambda: RandomCrop(8, padding=-1), "padding is out of range"),
        (lambda: ShortSideCrop(8, (7, 9)), "short_side is out of range"),
        (lambda: ShortSideCrop(8, (9, 8)), "short_side is out of range"),
        (lambda: ShortSideCrop(8, (8.5, 9)), r"short_side\[0\] is of the wrong type"),  # type: ignore[arg-type]
        (lambda: ShortSideCrop(8, place="left"), "place cannot be 'left'"),
        (lambda: ShortSideCrop(8, resize="random"), "resize cannot be 'random'"),
        (lambda: ShortSideCrop(224, 256), "short_side is of the wrong type"),  # type: ignore[arg-type]
        (lambda: ShortSideCrop(224, (256,)), "short_side is of the wrong length"),  # type: ignore[arg-type]
        (lambda: vgg_preset(224, 256), "short_side is of the wrong type"),  # type: ignore[arg-type]
        (lambda: vgg_preset(224, (256,)), "short_side is of the wrong length"),  # type: ignore[arg-type]
        (lambda: vgg_preset(300), "short_side is out of range"),
        (lambda: slim_preset("lenet", 0), "size is out of range"),
    ],
)
def test_what_cannot_be_cropped_is_refused(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()
