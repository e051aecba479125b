from __future__ import annotations

import math

import pytest
import torch

from lockstep.errors import InputError
from lockstep.losses import softmax_cross_entropy


def test_it_is_the_mean_of_minus_log_softmax() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -200.0, -200.0]], dtype=torch.float64)
    loss = softmax_cross_entropy(logits, torch.tensor([2, 1]))
    assert loss.shape == ()
    assert loss.item() == pytest.approx((math.log(4) + math.log(4)) / 2)


def test_its_gradient_is_softmax_minus_one_hot_over_the_batch() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 2, 1, 1, 0])
    (gradient,) = torch.autograd.grad(softmax_cross_entropy(logits, labels), logits)
    expected = (logits.softmax(1) - torch.nn.functional.one_hot(labels, 3)) / 5
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_of_any_whole_type_will_do(dtype: torch.dtype) -> None:
    logits = torch.eye(3)
    assert softmax_cross_entropy(logits, torch.tensor([0, 1, 2], dtype=dtype)).item() == pytest.approx(
        math.log(math.e + 2) - 1, abs=1e-6
    )


@pytest.mark.parametrize(
    ("logits", "labels", "shown"),
    [
        ((4, 10), torch.zeros(4, 10, dtype=torch.int64), r"logits of shape \(4, 10\), labels of shape \(4, 10\)"),
        ((4, 10), torch.zeros(3, dtype=torch.int64), r"labels of shape \(3,\), torch.int64"),
        ((4, 10), torch.zeros(4), r"labels of shape \(4,\), torch.float32"),
        ((4,), torch.zeros(4, dtype=torch.int64), r"logits of shape \(4,\)"),
    ],
)
def test_what_cannot_be_compared_is_refused(logits: tuple[int, ...], labels: torch.Tensor, shown: str) -> None:
    with pytest.raises(InputError, match=r"Cross entropy cannot compare") as caught:
        softmax_cross_entropy(torch.zeros(logits), labels)
    caught.match(rf"given: .*{shown}")
    caught.match(r"expected: logits of shape \(batch, classes\), labels of shape \(batch,\), whole numbers")
    caught.match(r"mend: .*labels.argmax\(1\)")
