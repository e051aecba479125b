"""The preprocessing of slim's networks, by the numbers of TensorFlow."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from preset_images import GOLDEN, draws, encoded, first_channels, some_images
from torch import Tensor

from lockstep.augmentations.augment import Augment
from lockstep.augmentations.colours import ColourDraws
from lockstep.augmentations.slim_presets import (
    PRESET_OF_NETWORK,
    SLIM_PRESETS,
    Preset,
    cifarnet_preset,
    inception_preset,
    lenet_preset,
    slim_preset,
    vgg_preset,
)
from lockstep.data.loader import Loader
from lockstep.data.order import Int64s
from lockstep.errors import InputError
from lockstep.images.colour import FAST_ORDERS, SLIM_ORDERS
from lockstep.images.normalisation import centred
from lockstep.randomness import Draws
from lockstep.readers.reader import Cost

PRESETS = {
    "lenet": lenet_preset(8),
    "cifarnet": cifarnet_preset(8),
    "vgg": vgg_preset(8, (9, 12)),
    "inception": inception_preset(8),
    "slow inception": inception_preset(8, fast=False),
}


def golden_batch() -> dict[str, Any]:
    return {"image": [encoded(GOLDEN["image"])]}


def applied(augments: tuple[Augment, ...], batch: dict[str, Any], numbers: Draws) -> dict[str, Any]:
    for augment in augments:
        batch = augment(batch, numbers)
    return batch


def inputs(preset: Preset, batch: dict[str, Any]) -> Tensor:
    """Those of an evaluation."""
    return preset.inputs(applied(preset.evaluate, batch, draws(1)))


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
    expected = centred(ColourDraws().apply(batch, FAST_ORDERS if fast else SLIM_ORDERS))
    assert torch.equal(preset.inputs(batch), expected)
    assert preset.train[0].resize == ("bilinear" if fast else "random")  # type: ignore[attr-defined]


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


@pytest.mark.process
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


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: vgg_preset(224, 256), "short_side is of the wrong type"),  # type: ignore[arg-type]
        (lambda: vgg_preset(224, (256,)), "short_side is of the wrong length"),  # type: ignore[arg-type]
        (lambda: vgg_preset(300), "short_side is out of range"),
        (lambda: slim_preset("lenet", 0), "size is out of range"),
    ],
)
def test_parameters_out_of_range_are_refused(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()
