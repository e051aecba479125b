from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lockstep.errors import DataError, InputError, WorkerError
from lockstep.ragged import Ragged
from lockstep.readers.coco import Coco
from lockstep.readers.image_folder import ImageFolder
from lockstep.readers.open import open_source
from lockstep.readers.reader import Arrays, Collation, Reader, TorchDataset
from lockstep.readers.tar_shards import TarShards
from lockstep.readers.voc import Voc

INDICES = np.array([3, 0, 3])


class Items(Dataset[Any]):
    """A dataset of what it is given; an exception among it is raised."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.items[index], Exception):
            raise self.items[index]
        return self.items[index]


def batch_of(*items: Any) -> dict[str, Any]:
    return TorchDataset(Items(*items)).read_batch(np.arange(len(items)))


def test_arrays_are_gathered_by_row() -> None:
    images = torch.arange(5 * 6, dtype=torch.uint8).view(5, 1, 2, 3)
    reader: Reader = Arrays({"image": images, "label": torch.arange(5)})
    batch = reader.read_batch(INDICES)
    assert len(reader) == 5
    assert reader.cost == "memory"
    assert reader.example_id(3) == "3"
    assert torch.equal(batch["image"], images[INDICES])
    assert batch["image"].dtype == torch.uint8
    assert batch["label"].tolist() == [3, 0, 3]


def test_ragged_arrays_are_gathered_by_row() -> None:
    boxes = Ragged.of([torch.full((number, 4), float(number)) for number in range(5)])
    reader = Arrays({"boxes": boxes, "label": torch.arange(5)})
    assert [row.shape[0] for row in reader.read_batch(INDICES)["boxes"]] == [3, 0, 3]
    moved = Ragged(boxes.values, boxes.lengths.flip(0))
    assert reader.fingerprint() != Arrays({"boxes": moved, "label": torch.arange(5)}).fingerprint()


def test_a_batch_of_arrays_is_a_copy() -> None:
    labels = torch.arange(5)
    Arrays({"label": labels}).read_batch(INDICES)["label"].zero_()
    assert labels.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("fields", "what", "given_"),
    [
        ({}, "There are no fields, so there are no examples.", "no fields"),
        (
            {"image": torch.zeros(4), "label": torch.zeros(3)},
            "Field 'label' has another number of rows than 'image'.",
            "3 rows",
        ),
        ({"image": torch.zeros(())}, "Field 'image' has no rows.", "a tensor without dimensions"),
        ({"image": [1, 2]}, "Field 'image' has no rows.", "a list"),
    ],
)
def test_arrays_that_are_no_table_are_refused(fields: Any, what: str, given_: str) -> None:
    with pytest.raises(InputError) as caught:
        Arrays(fields)
    assert (caught.value.what, caught.value.given) == (what, given_)
    assert caught.value.expected
    assert caught.value.hint


def test_a_dataset_of_pairs_gives_images_and_labels() -> None:
    reader: Reader = TorchDataset(TensorDataset(torch.arange(10.0).view(5, 2), torch.arange(5)))
    batch = reader.read_batch(INDICES)
    assert len(reader) == 5
    assert reader.cost == "decode"
    assert reader.example_id(3) == "3"
    assert batch["image"].tolist() == [[6, 7], [0, 1], [6, 7]]
    assert batch["label"].tolist() == [3, 0, 3]


def test_a_dataset_of_dicts_gives_its_fields() -> None:
    batch = batch_of({"pixels": torch.zeros(2), "name": "a"}, {"pixels": torch.ones(2), "name": "b"})
    assert batch["pixels"].tolist() == [[0, 0], [1, 1]]
    assert batch["name"] == ["a", "b"]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], torch.int64),
        ([0.5, 1.5], torch.float32),
        ([True, False], torch.bool),
        ([np.int32(1), np.int32(2)], torch.int32),
        ([np.zeros((2, 3), np.uint8), np.ones((2, 3), np.uint8)], torch.uint8),
        ([np.broadcast_to(np.float64(1), 3), np.arange(3.0)[::-1]], torch.float64),
        ([torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)], torch.bfloat16),
    ],
)
def test_numbers_are_stacked(values: list[Any], dtype: torch.dtype) -> None:
    batch = batch_of(*({"x": value} for value in values))
    assert batch["x"].dtype == dtype
    for row, value in zip(batch["x"], values, strict=True):
        assert torch.equal(row, torch.tensor(np.array(value)) if not isinstance(value, Tensor) else value)


def test_what_is_no_number_becomes_a_list() -> None:
    boxes = [[torch.zeros(4)], []]
    assert batch_of({"boxes": boxes[0]}, {"boxes": boxes[1]})["boxes"] == boxes
    assert batch_of({"x": None}, {"x": "y"})["x"] == [None, "y"]


@pytest.mark.parametrize(
    ("items", "given_", "expected"),
    [
        ([(0, 0), KeyError("gone")], "KeyError: 'gone'", "an item"),
        ([(0, 0), (0, 0, 0)], "a tuple of 3", "a dict of fields, or a pair (image, label)"),
        ([(0, 0), 7], "a int", "a dict of fields, or a pair (image, label)"),
        ([{"a": 1, "b": 2}, {"a": 1}], "the fields a", "a, b, as in item 0"),
        (
            [{"a": torch.zeros(2)}, {"a": torch.zeros(3)}],
            "'a': float32 of shape (3,)",
            "float32 of shape (2,), as in item 0",
        ),
    ],
)
def test_an_item_that_cannot_be_used_is_named(items: list[Any], given_: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        batch_of(*items)
    assert caught.value.what == "Item 1 of Items cannot be used."
    assert (caught.value.given, caught.value.expected) == (given_, expected)
    assert caught.value.hint == "fix __getitem__ of the dataset, or leave the item out"


def test_the_values_of_a_tuple_get_the_names_that_are_given() -> None:
    triples = TorchDataset(Items((1, 2, 3), (4, 5, 6)), fields=("anchor", "positive", "negative"))
    batch = triples.read_batch(np.arange(2))
    assert {name: values.tolist() for name, values in batch.items()} == {
        "anchor": [1, 4],
        "positive": [2, 5],
        "negative": [3, 6],
    }
    for items in [(1.0, 2.0), ((1.0,), (2.0,)), ({"image": 1.0}, {"image": 2.0})]:
        assert TorchDataset(Items(*items), ("image",)).read_batch(np.arange(2))["image"].tolist() == [1, 2]
    with pytest.raises(DataError, match=r"given: +a tuple of 2\n +expected: a dict of fields, or a tuple \(a, b, c\)"):
        TorchDataset(Items((1, 2)), ("a", "b", "c")).read_batch(np.arange(1))
    with pytest.raises(InputError, match=r'fields is of the wrong type.*\n.*\n.*\n.*write fields=\("image", "mask"\)'):
        TorchDataset(Items((1, 2)), "image")  # type: ignore[arg-type]


def test_an_error_of_ours_is_passed_on() -> None:
    error = WorkerError("x", given="", expected="", hint="")
    with pytest.raises(WorkerError) as caught:
        batch_of(error)
    assert caught.value is error


def test_a_dataset_without_indices_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    with pytest.raises(InputError, match=r"Stream has no examples by index.\n.*an iterable dataset\n.*map-style"):
        TorchDataset(Stream())
    with pytest.raises(InputError, match=r"list_iterator has no examples by index.\n.*list_iterator object"):
        TorchDataset(iter([1]))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [None, 5, b"x"])
@pytest.mark.parametrize(
    "reader",
    [Voc, ImageFolder, TarShards, open_source, lambda path: Coco(path, "images"), lambda path: Coco("a", path)],
    ids=["voc", "folder", "tar", "source", "coco", "coco images"],
)
def test_readers_refuse_what_is_no_path(reader: Callable[[Any], object], path: Any) -> None:
    with pytest.raises(InputError, match="is of the wrong type"):
        reader(path)


COLLATION = Collation("Stream", "__iter__")


def collated(*items: Any) -> dict[str, Any]:
    return COLLATION.batch_of(items, np.arange(40, 40 + len(items)))


def test_a_pair_is_an_image_and_a_label() -> None:
    batch = collated((torch.zeros(2), 3), [np.ones(2, np.float32), np.int64(4)])
    assert [*batch] == ["image", "label"]
    assert batch["image"].tolist() == [[0, 0], [1, 1]]
    assert batch["label"].tolist() == [3, 4]


def test_numbers_are_stacked_and_all_else_is_a_list() -> None:
    batch = collated({"x": True, "name": "a", "some": [1]}, {"x": False, "name": "b", "some": None})
    assert batch["x"].tolist() == [True, False]
    assert (batch["name"], batch["some"]) == (["a", "b"], [[1], None])


@pytest.mark.parametrize("count", [1, 3])
def test_arrays_are_contiguous_in_a_batch_whatever_the_order_of_their_axes(count: int) -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3).transpose(2, 0, 1)
    batch = Collation("D", "m").batch_of([{"image": pixels}] * count, np.arange(count))["image"]
    assert batch.is_contiguous()
    assert batch.tolist() == [pixels.tolist()] * count


def test_an_array_that_may_not_be_written_is_copied() -> None:
    array = np.zeros(2)
    array.flags.writeable = False
    collated({"x": array})["x"].fill_(1)
    assert array.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("items", "number", "given_", "expected"),
    [
        ([7], 40, "a int", "a dict of fields, or a pair (image, label)"),
        ([(0, 0), (1, 2, 3)], 41, "a tuple of 3", "a dict of fields, or a pair (image, label)"),
        ([{"a": 1, "b": 2}, {"a": 1}], 41, "the fields a", "a, b, as in item 40"),
        (
            [{"a": torch.zeros(2)}, {"a": np.zeros(3)}],
            41,
            "'a': float64 of shape (3,)",
            "float32 of shape (2,), as in item 40",
        ),
        ([{"a": 1}, {"a": 2.5}], 41, "'a': float32 of shape ()", "int64 of shape (), as in item 40"),
        ([{"a": 1}, {"a": None}], 41, "'a': no tensor", "int64 of shape (), as in item 40"),
        ([{"a": 1}, {"a": 2**70}], 41, "'a': Overflow when unpacking long long", "numbers that torch can hold"),
    ],
    ids=["number", "triple", "other-fields", "other-shape", "other-type", "none", "huge"],
)
def test_an_item_that_does_not_fit_is_named_by_its_number(
    items: list[Any], number: int, given_: str, expected: str
) -> None:
    with pytest.raises(DataError) as caught:
        collated(*items)
    assert caught.value.what == f"Item {number} of Stream cannot be used."
    assert (caught.value.given, caught.value.expected) == (given_, expected)
    assert caught.value.hint == "fix __iter__, or leave the item out"


def test_an_error_in_the_place_of_an_item_is_told() -> None:
    error = COLLATION.failed(7, KeyError("gone"))
    assert (error.what, error.given) == ("Item 7 of Stream cannot be used.", "KeyError: 'gone'")
