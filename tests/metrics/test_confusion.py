from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.metrics import ConfusionMatrix


@given(
    num_classes=st.integers(1, 4),
    parts=st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5), max_size=4),
)
@settings(max_examples=40)
def test_it_counts_pairs_of_classes(num_classes: int, parts: list[list[tuple[int, int]]]) -> None:
    parts = [[(a % num_classes, b % num_classes) for a, b in part] for part in parts]
    matrix = ConfusionMatrix(num_classes)
    for part in parts:
        labels, predicted = torch.tensor(part, dtype=torch.int64).reshape(-1, 2).T
        matrix.update(predicted, labels)
    counts = Counter(pair for part in parts for pair in part)
    expected = [[counts[right, predicted] for predicted in range(num_classes)] for right in range(num_classes)]
    assert matrix.compute().tolist() == expected
    assert matrix.compute().dtype == torch.int64
    matrix.reset()
    assert not matrix.compute().any()


def test_recall_is_over_the_right_class_and_precision_over_the_predicted_one() -> None:
    matrix = ConfusionMatrix(4)
    matrix.update(torch.tensor([0, 0, 1, 0, 3]), torch.tensor([0, 0, 0, 1, 0]))
    nan = float("nan")
    torch.testing.assert_close(matrix.recall(), torch.tensor([2 / 4, 0, nan, nan], dtype=torch.float64), equal_nan=True)
    torch.testing.assert_close(
        matrix.precision(), torch.tensor([2 / 3, 0, nan, 0], dtype=torch.float64), equal_nan=True
    )


@pytest.mark.parametrize("num_classes", [200, 257, 1001])
def test_narrow_whole_numbers_do_not_overflow(num_classes: int) -> None:
    matrix = ConfusionMatrix(num_classes)
    matrix.update(torch.tensor([199], dtype=torch.uint8), torch.tensor([150], dtype=torch.uint8))
    matrix.update(torch.tensor([1], dtype=torch.int8), torch.tensor([0], dtype=torch.int8))
    assert matrix.compute().nonzero().tolist() == [[0, 1], [150, 199]]


def test_what_was_computed_does_not_change_later() -> None:
    matrix = ConfusionMatrix(2)
    before = matrix.compute()
    matrix.update(torch.tensor([0]), torch.tensor([1]))
    assert not before.any()


@pytest.mark.parametrize(
    ("predicted", "labels", "message"),
    [
        ([0, 3], [0, 1], r"A predicted class is none of the 3 classes\.\n.*3 in row 1\n.*0 to 2\n.*background"),
        ([0, 1, 2], [0, 1, -1], r"A label is none of the 3 classes\.\n.*-1 in row 2\n.*0 to 2\n.*check the labels"),
        ([0.0, 1.0], [0, 1], r"cannot count.*\n.*\(2,\), torch\.float32; labels of shape \(2,\).*\n.*\n.*argmax"),
        ([[0, 1], [1, 0]], [0, 1], r"cannot count.*\n.*predictions of shape \(2, 2\)"),
        ([0, 1], [0, 1, 1], r"cannot count.*\n.*labels of shape \(3,\), torch\.int64\n.*shape \(batch,\)"),
    ],
)
def test_what_it_cannot_count_is_refused_and_nothing_is_counted(predicted: Any, labels: Any, message: str) -> None:
    matrix = ConfusionMatrix(3)
    with pytest.raises(InputError, match=message):
        matrix.update(torch.tensor(predicted), torch.tensor(labels))
    assert not matrix.compute().any()


def test_there_is_a_class_at_least() -> None:
    with pytest.raises(InputError, match=r"num_classes is out of range\.\n.*num_classes=0\n.*1 or more"):
        ConfusionMatrix(0)
