from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.errors import DataError
from lockstep.readers.reader import Collation

COLLATION = Collation("Stream", "__iter__")


def batch_of(*items: Any) -> dict[str, Any]:
    return COLLATION.batch_of(items, np.arange(40, 40 + len(items)))


def test_a_pair_is_an_image_and_a_label() -> None:
    batch = batch_of((torch.zeros(2), 3), [np.ones(2, np.float32), np.int64(4)])
    assert [*batch] == ["image", "label"]
    assert batch["image"].tolist() == [[0, 0], [1, 1]]
    assert batch["label"].tolist() == [3, 4]


def test_numbers_are_stacked_and_all_else_is_a_list() -> None:
    batch = batch_of({"x": True, "name": "a", "some": [1]}, {"x": False, "name": "b", "some": None})
    assert batch["x"].tolist() == [True, False]
    assert (batch["name"], batch["some"]) == (["a", "b"], [[1], None])


def test_an_array_that_may_not_be_written_is_copied() -> None:
    array = np.zeros(2)
    array.flags.writeable = False
    batch_of({"x": array})["x"].fill_(1)
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
        batch_of(*items)
    assert caught.value.what == f"Item {number} of Stream cannot be used."
    assert (caught.value.given, caught.value.expected) == (given_, expected)
    assert caught.value.hint == "fix __iter__, or leave the item out"


def test_an_error_in_the_place_of_an_item_is_told() -> None:
    error = COLLATION.failed(7, KeyError("gone"))
    assert (error.what, error.given) == ("Item 7 of Stream cannot be used.", "KeyError: 'gone'")
