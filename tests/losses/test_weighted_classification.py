from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import InputError
from lockstep.losses.weighted import hinge_loss, log_loss, sigmoid_cross_entropy, softmax_cross_entropy


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same(value: Tensor, expected: Tensor, inputs: Tensor) -> None:
    """The same value and the same gradients."""
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-15)
    gradients = [torch.autograd.grad(loss.sum(), inputs)[0] for loss in (value, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


# Softmax --------------------------------------------------------------------------------------------------------------


def test_cross_entropy_is_the_mean_of_minus_log_softmax() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -200.0, -200.0]], dtype=torch.float64)
    loss = softmax_cross_entropy(logits, torch.tensor([2, 1]))
    assert loss.shape == ()
    assert loss.item() == pytest.approx((math.log(4) + math.log(4)) / 2)


def test_the_gradient_of_cross_entropy_is_softmax_minus_one_hot_over_the_batch() -> None:
    logits = random(5, 3).requires_grad_()
    labels = torch.tensor([0, 2, 1, 1, 0])
    (gradient,) = torch.autograd.grad(softmax_cross_entropy(logits, labels), logits)
    expected = (logits.softmax(1) - F.one_hot(labels, 3)) / 5
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_of_any_whole_type_will_do(dtype: torch.dtype) -> None:
    logits = torch.eye(3)
    assert softmax_cross_entropy(logits, torch.tensor([0, 1, 2], dtype=dtype)).item() == pytest.approx(
        math.log(math.e + 2) - 1, abs=1e-6
    )


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_softmax_values_and_gradients_are_torchs_own(label_smoothing: float, reduction: Any) -> None:
    logits = random(5, 3).requires_grad_()
    for labels in (torch.tensor([0, 2, 1, 1, 0]), random(5, 3, seed=1).softmax(1)):
        value = softmax_cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction=reduction)
        expected = F.cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction=reduction)
        assert_same(value, expected, logits)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_class_numbers_and_one_hot_labels_are_the_same(label_smoothing: float) -> None:
    logits, labels = random(5, 3).requires_grad_(), torch.tensor([0, 2, 1, 1, 0])
    one_hot = F.one_hot(labels, 3).float()
    for options in ({}, {"weights": 2.0}, {"weights": torch.tensor([1.0, 0, 2, 0, 3])}, {"reduction": "none"}):
        value = softmax_cross_entropy(logits, one_hot, label_smoothing=label_smoothing, **options)
        expected = softmax_cross_entropy(logits, labels, label_smoothing=label_smoothing, **options)
        assert_same(value, expected, logits)


def test_smoothing_spreads_over_all_classes() -> None:
    logits, labels = random(4, 5), torch.tensor([0, 4, 2, 2])
    smoothed = F.one_hot(labels, 5).double() * (1 - 0.3) + 0.3 / 5
    expected = -(smoothed * logits.log_softmax(1)).sum(1).mean()
    value = softmax_cross_entropy(logits, labels, label_smoothing=0.3)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("labels", [torch.tensor([0]), torch.tensor([[1.0, 0.0, 0.0]])], ids=["number", "one_hot"])
def test_smoothing_of_a_sure_answer_costs_what_the_reference_says(labels: Tensor) -> None:
    loss = softmax_cross_entropy(torch.tensor([[100.0, -100.0, -100.0]]), labels, label_smoothing=0.1)
    assert loss.item() == pytest.approx(400 * 0.1 / 3)


ALL_WRONG = torch.tensor([2, 0, 1])


@pytest.mark.parametrize(
    ("labels", "weights", "expected"),
    [
        (torch.tensor([0, 1, 2]), 1.0, 0.0),
        (ALL_WRONG, 1.0, 10.0),
        (ALL_WRONG, 2.3, 23.0),
        (ALL_WRONG, torch.tensor(2.3), 23.0),
        (ALL_WRONG, torch.tensor([1.2, 3.4, 5.6]), 34.0),
        (ALL_WRONG, torch.tensor([[1.2], [3.4], [5.6]]), 34.0),
        (ALL_WRONG, torch.tensor([1.2, 0.0, 0.0]), 12.0),
        (ALL_WRONG, torch.zeros(3), 0.0),
    ],
    ids=str,
)
def test_weighted_softmax_losses_are_those_of_the_reference(labels: Tensor, weights: Any, expected: float) -> None:
    logits = 10 * torch.eye(3)
    for these in (labels, F.one_hot(labels, 3).double()):
        assert softmax_cross_entropy(logits, these, weights=weights).item() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_16_bit_logits_is_made_in_float32(dtype: torch.dtype) -> None:
    logits, labels = random(5, 3).to(dtype), torch.tensor([0, 2, 1, 1, 0])
    loss = softmax_cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    assert loss.item() == softmax_cross_entropy(logits.float(), labels).item()


@pytest.mark.parametrize(
    ("logits", "labels", "shown"),
    [
        ((4, 10), torch.zeros(4, 10, dtype=torch.int64), r"logits of shape \(4, 10\), labels of shape \(4, 10\)"),
        ((4, 10), torch.zeros(3, dtype=torch.int64), r"labels of shape \(3,\), torch.int64"),
        ((4, 10), torch.zeros(4, 1, dtype=torch.int64), r"labels of shape \(4, 1\), torch.int64"),
        ((4, 10), torch.zeros(4), r"labels of shape \(4,\), torch.float32"),
        ((4, 10), torch.zeros(4, 9), r"labels of shape \(4, 9\), torch.float32"),
        ((4,), torch.zeros(4, dtype=torch.int64), r"logits of shape \(4,\)"),
        ((4,), torch.zeros(4), r"logits of shape \(4,\)"),
    ],
)
def test_logits_and_labels_of_other_shapes_are_refused(
    logits: tuple[int, ...], labels: torch.Tensor, shown: str
) -> None:
    with pytest.raises(InputError, match=r"Cross entropy cannot compare") as caught:
        softmax_cross_entropy(torch.zeros(logits), labels)
    caught.match(rf"given: .*{shown}")
    caught.match(r"expected: logits of shape \(batch, classes\), labels of shape \(batch,\), whole numbers")
    caught.match(r"or probabilities of shape \(batch, classes\), floating point")
    caught.match(r"hint: .*labels.argmax\(1\)")


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weights": torch.ones(4)}], ids=str)
@pytest.mark.parametrize("wrong", [3, -1, -100])
def test_a_class_number_out_of_range_is_refused(wrong: int, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"A label is not the number of a class") as caught:
        softmax_cross_entropy(torch.zeros(4, 3), torch.tensor([0, wrong, 2, wrong]), **options)
    caught.match(rf"given: +{wrong} \(example 1\), {wrong} \(example 3\)")
    caught.match(r"expected: whole numbers from 0 to 2: the logits have 3 classes")
    caught.match(r"hint: +number the classes from 0")


def test_many_class_numbers_out_of_range_are_not_all_listed() -> None:
    with pytest.raises(InputError, match=r"7 \(example 7\) and 2 more\n"):
        softmax_cross_entropy(torch.zeros(10, 3), torch.full((10,), 7))


@pytest.mark.parametrize("label_smoothing", [-0.1, 1.0, float("nan")])
@pytest.mark.parametrize("loss", [softmax_cross_entropy, sigmoid_cross_entropy])
def test_smoothing_out_of_range_is_refused(loss: Any, label_smoothing: float) -> None:
    with pytest.raises(InputError, match=r"label_smoothing is out of range") as caught:
        loss(torch.zeros(2, 2), torch.zeros(2, 2), label_smoothing=label_smoothing)
    caught.match(rf"given: +label_smoothing={label_smoothing}")
    caught.match(r"expected: 0 or more, below 1")


# Sigmoid --------------------------------------------------------------------------------------------------------------

SURE = 100.0 * (2 * torch.eye(3) - 1)
"""Logits of 100 on the diagonal, of -100 elsewhere."""
ALL_BUT_RIGHT = torch.tensor([[0, 0, 1], [1, 0, 0], [0, 1, 0]])


@pytest.mark.parametrize(
    ("logits", "labels", "weights", "expected"),
    [
        (SURE, torch.eye(3), 1.0, 0.0),
        (SURE, ALL_BUT_RIGHT, 1.0, 600 / 9),
        (SURE, ALL_BUT_RIGHT, torch.tensor([[3, 4, 5], [2, 6, 0], [8, 0, 1]]), 1700 / 7),
        (torch.ones(32, 1), torch.ones(32, 1), torch.ones(32, 1), math.log(1 + math.exp(-1))),
        (torch.ones(32, 2), torch.ones(32, 2), torch.ones(32, 2), math.log(1 + math.exp(-1))),
    ],
)
def test_sigmoid_losses_are_those_of_the_reference(
    logits: Tensor, labels: Tensor, weights: Any, expected: float
) -> None:
    assert sigmoid_cross_entropy(logits, labels, weights=weights).item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_sigmoid_values_and_gradients_are_torchs_own(reduction: Any) -> None:
    logits, labels = random(5, 3).requires_grad_(), random(5, 3, seed=1).sigmoid()
    expected = F.binary_cross_entropy_with_logits(logits, labels, reduction=reduction)
    assert_same(sigmoid_cross_entropy(logits, labels, reduction=reduction), expected, logits)


def test_sigmoid_smoothing_moves_labels_towards_a_half() -> None:
    logits, labels = random(5, 3).requires_grad_(), torch.tensor([[1.0, 0.0, 1.0]] * 5)
    expected = F.binary_cross_entropy_with_logits(logits, labels.double() * 0.9 + 0.05)
    assert_same(sigmoid_cross_entropy(logits, labels, label_smoothing=0.1), expected, logits)
    sure = sigmoid_cross_entropy(SURE[:1], torch.tensor([[1, 0, 1]]), label_smoothing=0.1)
    assert sure.item() == pytest.approx((100 + 50 * 0.1) / 3)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.6])
def test_sigmoid_smoothing_is_that_of_a_softmax_over_two_classes(label_smoothing: float) -> None:
    for logits in (SURE[0].double(), random(3)):
        answers = torch.tensor([1, 0, 1])
        two_classes = torch.stack([torch.zeros_like(logits), logits], 1)
        torch.testing.assert_close(
            sigmoid_cross_entropy(logits, answers, label_smoothing=label_smoothing),
            softmax_cross_entropy(two_classes, answers, label_smoothing=label_smoothing),
            rtol=1e-12,
            atol=1e-15,
        )


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_sigmoid_cross_entropy_does_not_overflow(size: float) -> None:
    logits = torch.tensor([size, -size, size, -size]).requires_grad_()
    losses = sigmoid_cross_entropy(logits, torch.tensor([1, 0, 0, 1]), reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert losses.tolist() == [0.0, 0.0, logits[0].item(), logits[0].item()]
    assert gradient.tolist() == [0.0, 0.0, 1.0, -1.0]


# Log loss -------------------------------------------------------------------------------------------------------------

PROBABILITIES = torch.tensor([[0.9, 0.2, 0.2], [0.8, 0.4, 0.6]], dtype=torch.float64)
ANSWERS = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
LOG_LOSSES = -torch.tensor([[0.9, 0.8, 0.2], [0.8, 0.6, 0.4]], dtype=torch.float64).add(1e-7).log()


@pytest.mark.parametrize(
    ("weights", "present"),
    [
        (1.0, 6),
        (2.3, 6),
        (torch.tensor([1.2, 3.4]), 6),
        (torch.tensor([1.2, 0.0]), 3),
        (torch.tensor([[1.2], [0.0]]), 3),
        (torch.tensor([[3, 6, 5], [0, 4, 2]]), 5),
        (torch.tensor([[0, 0, 0], [0, 0, 2]]), 1),
        (torch.zeros(2, 3), 1),
    ],
    ids=str,
)
def test_log_losses_are_those_of_the_reference(weights: Any, present: int) -> None:
    factors = weights.double().reshape(2, -1) if isinstance(weights, Tensor) else weights
    expected = (LOG_LOSSES * factors).sum().item() / present
    assert log_loss(PROBABILITIES, ANSWERS, weights=weights).item() == pytest.approx(expected, rel=1e-9)


def test_log_loss_is_torchs_own_but_for_what_keeps_it_finite() -> None:
    probabilities = random(5, 3).sigmoid().requires_grad_()
    labels = random(5, 3, seed=1).sigmoid()
    assert_same(log_loss(probabilities, labels, eps=0.0), F.binary_cross_entropy(probabilities, labels), probabilities)


def test_log_loss_of_what_was_held_impossible_is_finite() -> None:
    sure = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    losses = log_loss(sure, torch.tensor([0, 1, 1, 0]), reduction="none")
    expected = [-math.log(1 + 1e-7)] * 2 + [-math.log(1e-7)] * 2
    assert losses.tolist() == pytest.approx(expected, rel=1e-8)
    assert log_loss(sure, torch.tensor([0, 0, 1, 1]), eps=1e-3, reduction="sum").item() == pytest.approx(
        -2 * math.log(1e-3) - 2 * math.log(1.001)
    )


@pytest.mark.parametrize("eps", [-1e-7, float("inf")])
def test_an_eps_out_of_range_is_refused(eps: float) -> None:
    with pytest.raises(InputError, match=r"eps is out of range") as caught:
        log_loss(PROBABILITIES, ANSWERS, eps=eps)
    caught.match(r"expected: 0 or more, finite")


# Hinge ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "labels", "expected"),
    [
        ([1.2, -1.4, -1.0, 2.1], [1, 0, 0, 1], [0.0, 0.0, 0.0, 0.0]),
        ([[-0.7], [-1.4], [1.4], [0.6]], [[0], [0], [1], [1]], [[0.3], [0.0], [0.0], [0.4]]),
        ([[[1.2], [0.4], [-1.0], [-1.1]]], [[[1], [0], [0], [1]]], [[[0.0], [1.4], [0.0], [2.1]]]),
    ],
    ids=["outside the margin", "inside", "wrong"],
)
def test_hinge_losses_are_those_of_the_reference(logits: Any, labels: Any, expected: Any) -> None:
    losses = hinge_loss(torch.tensor(logits), torch.tensor(labels), reduction="none")
    torch.testing.assert_close(losses, torch.tensor(expected))
    assert hinge_loss(torch.tensor(logits), torch.tensor(labels)).item() == pytest.approx(losses.mean().item())


def test_the_hinge_loss_is_torchs_multi_margin_loss_of_two_classes() -> None:
    logits, labels = random(6).requires_grad_(), torch.tensor([0, 1, 1, 0, 0, 1])
    two_classes = torch.stack([-logits, logits], 1) / 2
    expected = 2 * F.multi_margin_loss(two_classes, labels, reduction="none")  # torch divides by the classes
    assert_same(hinge_loss(logits, labels, reduction="none"), expected, logits)
