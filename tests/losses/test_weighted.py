"""The safe mean, over every loss that uses it: what TF-Slim's and tf.losses' own tests assert, and more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import InputError
from lockstep.losses import (
    absolute_difference,
    cosine_distance,
    hinge_loss,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    squared_error,
    weighted_loss,
)
from lockstep.losses.weighted import log_loss

Loss = Callable[..., Tensor]
PAIRED: dict[str, Loss] = {
    "sigmoid_cross_entropy": sigmoid_cross_entropy,
    "log_loss": log_loss,
    "hinge_loss": hinge_loss,
    "absolute_difference": absolute_difference,
    "squared_error": squared_error,
}
ALL: dict[str, Loss] = {
    "softmax_cross_entropy": softmax_cross_entropy,
    "cosine_distance": partial(cosine_distance, dim=1),
    **PAIRED,
}
each_loss = pytest.mark.parametrize("loss", ALL.values(), ids=list(ALL))
each_paired = pytest.mark.parametrize("loss", PAIRED.values(), ids=list(PAIRED))


def example_inputs() -> tuple[Tensor, Tensor]:
    """Four examples of three numbers in (0, 1): logits, predictions or probabilities alike."""
    generator = torch.Generator().manual_seed(5)
    return tuple(0.1 + 0.8 * torch.rand(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


LOSSES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("weights", "mean"),
    [
        (1.0, 3.5),
        (2, 7.0),
        (0.0, 0.0),
        (torch.tensor(2.0), 7.0),
        (torch.tensor([2.0]), 7.0),
        (torch.tensor([2.0, 1.0]), (12 + 15) / 6),
        (torch.tensor([2.0, 0.0]), 12 / 3),
        (torch.tensor([[2.0], [0.0]]), 12 / 3),
        (torch.tensor([[1.0, 0.0, 3.0]]), (1 + 9 + 4 + 18) / 4),
        (torch.tensor([[3, 6, 5], [0, 4, 2]]), (3 + 12 + 15 + 20 + 12) / 5),
        (torch.tensor([[0, 0, 0], [0, 0, 2]]), 12.0),
        (torch.tensor([[[2.0]], [[0.0]]]), 12 / 3),
        (torch.tensor([True, False]), 6 / 3),
        (torch.tensor([-2.0, 0.0]), -12 / 3),
        (torch.zeros(2), 0.0),
        (torch.zeros(2, 3), 0.0),
    ],
    ids=str,
)
def test_the_mean_is_over_the_elements_present(weights: Any, mean: float) -> None:
    loss = weighted_loss(LOSSES, weights=weights)
    assert loss.shape == ()
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(mean, rel=1e-15)


@pytest.mark.parametrize("weights", [2.0, torch.tensor([2.0, 0.0]), torch.tensor([[3, 6, 5], [0, 4, 2]])], ids=str)
def test_sum_and_none_scale_and_do_not_divide(weights: Any) -> None:
    expected = LOSSES * (weights if isinstance(weights, float) else weights.reshape(2, -1))
    assert weighted_loss(LOSSES, weights=weights, reduction="sum").item() == pytest.approx(expected.sum().item())
    assert torch.equal(weighted_loss(LOSSES, weights=weights, reduction="none"), expected)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_weights_of_any_fitting_shape_equal_those_written_out(data: st.DataObject, shape: list[int]) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    losses = torch.randn(shape, generator=generator, dtype=torch.float64)
    of_weights = [data.draw(st.sampled_from([1, n])) for n in shape[: data.draw(st.integers(0, len(shape)))]]
    weights = torch.randint(-1, 2, of_weights, generator=generator)
    written_out = weights.reshape(of_weights + [1] * (len(shape) - len(of_weights))).expand(shape)
    present = written_out != 0
    expected = (losses * written_out)[present].mean().item() if present.any() else 0.0
    assert weighted_loss(losses, weights=weights).item() == pytest.approx(expected, abs=1e-14)
    assert weighted_loss(losses, weights=written_out).item() == pytest.approx(expected, abs=1e-14)


def test_the_loss_of_no_elements_is_zero() -> None:
    for weights in (1.0, torch.ones(0), torch.ones(0, 3)):
        assert weighted_loss(torch.ones(0, 3), weights=weights).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_losses_are_added_up_in_float32(dtype: torch.dtype) -> None:
    losses = torch.full((300, 301), 3.0, dtype=dtype)
    assert weighted_loss(losses, reduction="sum").item() == 3 * 300 * 301
    mean = weighted_loss(losses, weights=torch.full((300,), 2.0, dtype=torch.float64))
    assert mean.item() == 6.0
    assert mean.dtype == torch.float32


@each_loss
@pytest.mark.parametrize("weights", [0.0, torch.zeros(()), torch.zeros(4)], ids=["number", "scalar", "tensor"])
def test_where_all_weights_are_zero_loss_and_gradients_are_zero(loss: Loss, weights: Any) -> None:
    predictions, labels = example_inputs()
    predictions.requires_grad_()
    value = loss(predictions, labels, weights=weights)
    (gradient,) = torch.autograd.grad(value, predictions)
    assert value.item() == 0.0
    assert torch.equal(gradient, torch.zeros(4, 3, dtype=torch.float64))


@each_loss
def test_every_loss_takes_weights_and_reductions_alike(loss: Loss) -> None:
    predictions, labels = example_inputs()
    single = loss(predictions, labels, reduction="none")
    weights = torch.tensor([0.5, 0.0, 3.0, 1.0], dtype=torch.float64)
    column = weights.reshape(4, *[1] * (single.ndim - 1))
    assert single.shape[0] == 4
    torch.testing.assert_close(loss(predictions, labels), single.mean(), rtol=1e-14, atol=0)
    torch.testing.assert_close(loss(predictions, labels, weights=2.3), 2.3 * single.mean(), rtol=1e-14, atol=0)
    torch.testing.assert_close(loss(predictions, labels, weights=weights, reduction="none"), single * column)
    torch.testing.assert_close(loss(predictions, labels, weights=weights, reduction="sum"), (single * column).sum())
    expected = (single * column).sum() * 4 / 3 / single.numel()
    torch.testing.assert_close(loss(predictions, labels, weights=weights), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(loss(predictions, labels, weights=weights[:, None]), expected, rtol=1e-14, atol=0)


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_are_those_of_differences(loss: Loss, reduction: str) -> None:
    predictions, labels = example_inputs()
    weights = torch.tensor([0.5, 0.0, 3.0, 1.0], dtype=torch.float64)
    predictions.requires_grad_()
    assert torch.autograd.gradcheck(partial(loss, labels=labels, weights=weights, reduction=reduction), (predictions,))


@each_loss
def test_a_batch_of_nothing_is_a_loss_of_zero(loss: Loss) -> None:
    assert loss(torch.zeros(0, 3), torch.zeros(0, 3)).item() == 0.0


@each_loss
def test_weights_that_are_none_are_refused(loss: Loss) -> None:
    with pytest.raises(InputError, match=r"weights is of the wrong type") as caught:
        loss(*example_inputs(), weights=None)
    caught.match(r"given: +weights is NoneType")
    caught.match(r"expected: a number or a tensor")
    caught.match(r"hint: +leave the weights out where all are 1")


@each_loss
@pytest.mark.parametrize("shape", [(3,), (4, 2), (4, 3, 2), (1, 4)], ids=str)
def test_weights_of_another_shape_are_refused(loss: Loss, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"The weights do not fit the losses") as caught:
        loss(*example_inputs(), weights=torch.ones(shape))
    caught.match(rf"given: +weights of shape \({', '.join(map(str, shape))},?\), losses of shape \(4,( 3)?\)")
    caught.match(r"expected: a number, one weight an example, shape \(batch,\), or one an element")
    caught.match(r"hint: +give the weights the first dimensions of the losses")


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_weight_that_is_not_finite_is_refused(number: float) -> None:
    with pytest.raises(InputError, match=r"weights cannot scale a loss") as caught:
        squared_error(*example_inputs(), weights=number)
    caught.match(rf"given: +weights={number}")
    caught.match(r"expected: a finite number")
    caught.match(r"hint: +give a weight such as 1.0")


@each_loss
def test_an_unknown_reduction_is_refused(loss: Loss) -> None:
    with pytest.raises(InputError, match=r"reduction cannot be 'average'") as caught:
        loss(*example_inputs(), reduction="average")
    caught.match(r"expected: 'mean' or 'sum' or 'none'")


@each_paired
@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 3), (3, 4)], ids=str)
def test_labels_that_would_be_broadcast_are_refused(loss: Loss, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"Labels are compared with predictions one by one") as caught:
        loss(torch.ones(4, 3), torch.ones(shape))
    caught.match(rf"given: +predictions of shape \(4, 3\), labels of shape \({', '.join(map(str, shape))},?\)")
    caught.match(r"expected: two tensors of the same shape")
    caught.match(r"hint: +reshape one of them, as in labels.view_as\(predictions\)")


@each_paired
def test_labels_of_any_type_will_do_and_the_loss_is_of_the_predictions_type(loss: Loss) -> None:
    predictions = torch.tensor([0.25, 0.75, 0.5])
    labels = torch.tensor([0, 1, 1])
    expected = loss(predictions, labels.float())
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float64):
        value = loss(predictions, labels.to(dtype))
        assert value.dtype == torch.float32
        assert value.item() == expected.item()
    assert loss(predictions.bfloat16(), labels).dtype == torch.float32
    assert loss(predictions.bfloat16(), labels).item() == expected.item()
