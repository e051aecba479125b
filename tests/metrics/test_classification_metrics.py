"""Top-k accuracy and the confusion matrix, which can become CSV."""

from __future__ import annotations

import csv
from collections import Counter
from io import StringIO
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.metrics import ConfusionMatrix, in_top_k
from lockstep.metrics.classification import confusion_csv


@given(data=st.data(), num_classes=st.integers(1, 6), k=st.integers(1, 8))
@settings(max_examples=50)
def test_in_top_k_counts_the_classes_that_score_higher(data: st.DataObject, num_classes: int, k: int) -> None:
    # Few values, so that ties are common.
    row = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=num_classes, max_size=num_classes)
    rows = data.draw(st.lists(row, min_size=1, max_size=5))
    labels = data.draw(st.lists(st.integers(0, num_classes - 1), min_size=len(rows), max_size=len(rows)))
    hits = in_top_k(torch.tensor(rows), torch.tensor(labels), k)
    expected = [sum(s > row[label] for s in row) < k for row, label in zip(rows, labels, strict=True)]
    assert hits.tolist() == [float(hit) for hit in expected]


def test_in_top_k_is_one_number_an_example() -> None:
    hits = in_top_k(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]], dtype=torch.bfloat16), torch.tensor([1, 1, 1]))
    assert hits.dtype == torch.float32
    assert hits.tolist() == [1, 0, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_example_with_a_score_that_is_not_finite_is_no_hit(bad: float) -> None:
    logits = torch.tensor([[0.1, 0.9, bad], [0.1, 0.9, 0.3]])
    assert in_top_k(logits, torch.tensor([1, 1]), k=3).tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_a_label_that_is_no_class_is_no_hit(dtype: torch.dtype) -> None:
    labels = torch.tensor([1, 2, 200 if dtype == torch.uint8 else -1], dtype=dtype)
    assert in_top_k(torch.ones(3, 2), labels, k=2).tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        (torch.zeros(4, 10, dtype=torch.int64), r"labels of shape \(4, 10\), torch.int64"),
        (torch.zeros(4, 1, dtype=torch.int64), r"labels of shape \(4, 1\), torch.int64"),
        (torch.zeros(4), r"labels of shape \(4,\), torch.float32"),
    ],
)
def test_in_top_k_refuses_what_cannot_be_compared(labels: torch.Tensor, shown: str) -> None:
    with pytest.raises(InputError, match=r"Top k cannot compare these logits and labels") as caught:
        in_top_k(torch.zeros(4, 10), labels)
    caught.match(rf"given: .*logits of shape \(4, 10\), {shown}")
    caught.match(r"expected: logits of shape \(batch, classes\), labels of shape \(batch,\), whole numbers")
    caught.match(r"hint: .*labels.argmax\(1\)")


def test_k_below_1_is_refused() -> None:
    message = r"No class can be among the top 0.\n.*given: .*k=0\n.*expected: 1 or more\n.*hint: .*k=1 for accuracy"
    with pytest.raises(InputError, match=message):
        in_top_k(torch.zeros(4, 10), torch.zeros(4, dtype=torch.int64), k=0)


@given(
    num_classes=st.integers(1, 4),
    parts=st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5), max_size=4),
)
@settings(max_examples=40)
def test_a_confusion_matrix_counts_pairs_of_classes(num_classes: int, parts: list[list[tuple[int, int]]]) -> None:
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


def test_a_computed_confusion_matrix_does_not_change_later() -> None:
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
def test_a_confusion_matrix_refuses_what_it_cannot_count_and_counts_nothing(
    predicted: Any, labels: Any, message: str
) -> None:
    matrix = ConfusionMatrix(3)
    with pytest.raises(InputError, match=message):
        matrix.update(torch.tensor(predicted), torch.tensor(labels))
    assert not matrix.compute().any()


def test_a_confusion_matrix_has_a_class_at_least() -> None:
    with pytest.raises(InputError, match=r"num_classes is out of range\.\n.*num_classes=0\n.*1 or more"):
        ConfusionMatrix(0)


COUNTS = [[5, 0, 1], [0, 0, 0], [2, 3, 4]]


def test_lines_are_right_classes_and_columns_predicted_ones() -> None:
    expected = "is / predicted,daisy,rose,tulip\ndaisy,5,0,1\nrose,0,0,0\ntulip,2,3,4\n"
    assert confusion_csv(COUNTS, ["daisy", "rose", "tulip"]) == expected
    assert confusion_csv(torch.tensor(COUNTS), ["daisy", "rose", "tulip"]) == expected


@pytest.mark.parametrize("names", [["background", 'hook, "line"'], {1: 'hook, "line"', 0: "background", 9: "none"}])
def test_names_are_quoted_and_classes_without_one_are_numbers(names: Any) -> None:
    rows = list(csv.reader(StringIO(confusion_csv(COUNTS, names))))
    assert rows[0] == ["is / predicted", "background", 'hook, "line"', "2"]
    assert [row[0] for row in rows] == rows[0]


@given(st.text(st.characters(), min_size=1))
def test_any_name_stays_in_its_cell(name: str) -> None:
    rows = list(csv.reader(StringIO(confusion_csv([[1, 0], [2, 3]], [name, "b"]), newline="")))
    assert rows == [["is / predicted", name, "b"], [name, "1", "0"], ["b", "2", "3"]]


@pytest.mark.parametrize("counts", [[[1, 2]], [[1, 2], [3]], torch.zeros(2, 3), torch.zeros(2)])
def test_counts_that_are_no_square_are_refused(counts: Any) -> None:
    with pytest.raises(InputError, match=r"no confusion matrix\.\n.*rows, of which not all.*\n.*\n.*compute returns"):
        confusion_csv(counts)
