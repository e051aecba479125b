from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.metrics import in_top_k


@given(data=st.data(), num_classes=st.integers(1, 6), k=st.integers(1, 8))
@settings(max_examples=50)
def test_it_counts_the_classes_that_score_higher(data: st.DataObject, num_classes: int, k: int) -> None:
    # Few values, so that ties are common.
    row = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=num_classes, max_size=num_classes)
    rows = data.draw(st.lists(row, min_size=1, max_size=5))
    labels = data.draw(st.lists(st.integers(0, num_classes - 1), min_size=len(rows), max_size=len(rows)))
    hits = in_top_k(torch.tensor(rows), torch.tensor(labels), k)
    expected = [sum(s > row[label] for s in row) < k for row, label in zip(rows, labels, strict=True)]
    assert hits.tolist() == [float(hit) for hit in expected]


def test_a_score_is_one_number_an_example() -> None:
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
def test_what_cannot_be_compared_is_refused(labels: torch.Tensor, shown: str) -> None:
    with pytest.raises(InputError, match=r"Top k cannot compare these logits and labels") as caught:
        in_top_k(torch.zeros(4, 10), labels)
    caught.match(rf"given: .*logits of shape \(4, 10\), {shown}")
    caught.match(r"expected: logits of shape \(batch, classes\), labels of shape \(batch,\), whole numbers")
    caught.match(r"hint: .*labels.argmax\(1\)")


def test_k_below_1_is_refused() -> None:
    message = r"No class can be among the top 0.\n.*given: .*k=0\n.*expected: 1 or more\n.*hint: .*k=1 for accuracy"
    with pytest.raises(InputError, match=message):
        in_top_k(torch.zeros(4, 10), torch.zeros(4, dtype=torch.int64), k=0)
