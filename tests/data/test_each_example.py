from __future__ import annotations

import io
import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.each_example import EachExample, ExampleDraws, Seeded
from lockstep.data.loader import Loader
from lockstep.errors import DataError, InputError
from lockstep.images.decode import EncodedImage
from lockstep.ragged import Ragged
from lockstep.randomness import Draws
from lockstep.readers.reader import Arrays


class Decoded:
    """Numbers that loader processes read."""

    cost = "decode"

    def __len__(self) -> int:
        return 16

    def read_batch(self, indices: Any) -> dict[str, Any]:
        return {"number": torch.from_numpy(indices).float(), "name": [f"n{index}" for index in indices]}

    def example_id(self, index: int) -> str:
        return f"n{index}"


def noisy(example: dict[str, Any], draws: ExampleDraws) -> dict[str, Any]:
    shift = draws.uniform("shift", -1, 1)
    return {"number": example["number"] + shift, "shift": shift, "side": draws.integer("side", 0, 4)}


def shaken(number: torch.Tensor) -> torch.Tensor:
    return number + torch.rand(2).sum() + random.random() + float(np.random.rand())


def stream(augment: Any, **arguments: Any) -> list[Any]:
    loader = Loader(Decoded(), batch_size=4, seed=3, augment=augment, **arguments)
    batches = loader.batches(range(1), 1)
    found = list(islice(batches, 6))
    batches.close()
    return found


def test_a_function_gets_its_numbers_as_an_argument() -> None:
    batch = stream([EachExample(noisy)], num_processes=0)[1]
    positions = np.arange(4, 8)
    assert batch["shift"].tolist() == pytest.approx((2 * Draws(3, positions).uniform("shift") - 1).tolist())
    assert batch["side"].tolist() == Draws(3, positions).integers("side", 0, 4).tolist()
    assert set(batch) == {"number", "shift", "side"}


@pytest.mark.process
@pytest.mark.parametrize("augment", [EachExample(noisy), Seeded(shaken, "number")])
@pytest.mark.parametrize("pool", [{"num_processes": 1}, {"num_processes": 3}])
def test_whoever_reads_the_result_is_the_same(augment: Any, pool: dict[str, int]) -> None:
    alone = stream([augment], num_processes=0)
    for mine, theirs in zip(alone, stream([augment], **pool), strict=True):
        assert torch.equal(mine["number"], theirs["number"])


def test_threads_run_a_function_with_explicit_draws() -> None:
    alone = stream([EachExample(noisy)], num_processes=0)
    for mine, theirs in zip(alone, stream([EachExample(noisy)], num_threads=2), strict=True):
        assert torch.equal(mine["number"], theirs["number"])


def test_threads_do_not_run_what_draws_globally() -> None:
    with pytest.raises(InputError) as caught:
        stream([Seeded(shaken, "number")], num_threads=2)
    assert str(caught.value).startswith(
        "Seeded may draw from random generators that all threads of a process share.\n  given:    num_threads=2\n"
    )


def test_generators_are_seeded_by_position_and_put_back() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    numbers = torch.zeros(3)
    both = Seeded(shaken, "number")({"number": numbers}, Draws(0, np.array([5, 6, 5])))["number"]
    assert both[0] == both[2] != both[1]
    assert (torch.rand(1), random.random(), np.random.rand()) == before


def test_an_encoded_image_is_decoded_for_a_transform() -> None:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (10, 20, 30)).save(file, "PNG")
    images = [EncodedImage(file.getvalue(), "one.png")] * 2
    batch = Seeded(lambda image: image.float() / 10)({"image": images}, Draws(0, np.arange(2)))
    assert batch["image"].shape == (2, 3, 2, 3)
    assert batch["image"][1, :, 0, 0].tolist() == [1, 2, 3]


def test_each_example_may_return_another_number_of_ragged_values() -> None:
    boxes = [torch.rand(2, 4), torch.zeros(0, 4), torch.rand(3, 4)]
    batch = {"boxes": Ragged.of(boxes), "number": torch.arange(3)}
    first = EachExample(lambda example, _: {**example, "boxes": example["boxes"][:1]})(batch, Draws(0, np.arange(3)))
    assert [row.tolist() for row in first["boxes"]] == [row[:1].tolist() for row in boxes]
    assert first["number"].tolist() == [0, 1, 2]
    alike = Seeded(lambda boxes: boxes.new_zeros(2, 4), "boxes")(batch, Draws(0, np.arange(3)))
    assert (alike["boxes"].lengths.tolist(), alike["number"].tolist()) == ([2, 2, 2], [0, 1, 2])


def test_a_ragged_result_of_another_kind_is_named() -> None:
    lose = EachExample(lambda example, _: {"boxes": example["boxes"] if len(example["boxes"]) else torch.zeros(0)})
    with pytest.raises(DataError) as caught:
        lose({"boxes": Ragged.of([torch.rand(2, 4), torch.zeros(0, 4)])}, Draws(0, np.array([6, 7])))
    assert str(caught.value).startswith(
        "Item 7 of <lambda> cannot be used.\n"
        "  given:    'boxes': float32 of shape (n,)\n"
        "  expected: float32 of shape (n, 4), as in item 6\n"
    )


def test_results_of_other_shapes_are_named() -> None:
    grow = EachExample(lambda example, _: {"x": torch.zeros(int(example["number"]))})
    with pytest.raises(DataError, match=r"Item 7 of <lambda> cannot be used\.") as caught:
        grow({"number": torch.tensor([1.0, 2.0])}, Draws(0, np.array([6, 7])))
    assert "hint:     fix the function of the dataset" not in str(caught.value)


def test_a_field_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError) as caught:
        Seeded(shaken)({"number": torch.zeros(2)}, Draws(0, np.arange(2)))
    assert str(caught.value) == (
        "shaken finds no field 'image'.\n"
        "  given:    the fields number\n"
        "  expected: one called 'image'\n"
        "  hint:     name the field: Seeded(transform, field=...)"
    )


@pytest.mark.parametrize(("make", "name"), [(EachExample, "function"), (Seeded, "transform")])
def test_what_cannot_be_called_is_refused(make: Any, name: str) -> None:
    with pytest.raises(InputError, match=f"{name} .*int"):
        make(3)


class Single:
    """A reader of one example at a time."""

    def __init__(self, **more: Any) -> None:
        vars(self).update(more)

    def __len__(self) -> int:
        return 5

    def read(self, index: int) -> Any:
        return torch.full((2,), index), index % 2


@pytest.mark.process
def test_a_reader_of_single_examples_is_read() -> None:
    loader = Loader(Single(), batch_size=5, order="sequential")
    batch = next(loader.batches(range(1), 1))
    assert batch["image"].tolist() == [[k, k] for k in range(5)]
    assert batch["label"].tolist() == [0, 1, 0, 1, 0]
    assert loader.reader.cost == "decode"
    assert loader.example_ids(0, 2) == ["0", "1"]


def test_a_data_set_may_give_its_cost_ids_and_decoder() -> None:
    loader = Loader(Single(cost="memory", example_id=lambda index: f"no. {index}", decoder="d 1"), batch_size=5)
    assert (loader.reader.cost, loader.reader.example_id(3), loader.reader.decoder) == ("memory", "no. 3", "d 1")


@pytest.mark.parametrize("given", [[1, 2], Arrays, None])
def test_what_is_no_reader_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="a reader: it has a length, and read"):
        Loader(given, batch_size=2)
