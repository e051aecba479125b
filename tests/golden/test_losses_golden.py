"""Losses and penalties have the values and the gradients that TensorFlow's and TF-Slim's had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import update_inputs as inputs
from torch import Tensor
from update_reference import BOTH, RECORDED, TOLERANCE, assert_close, tensors

from lockstep import losses
from lockstep.losses.regularization import Regularizer
from lockstep.losses.weighted import log_loss


def cosine_distance_of_rows(predictions: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return losses.cosine_distance(predictions, labels, dim=1, **kwargs)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "softmax_cross_entropy": losses.softmax_cross_entropy,
    "sigmoid_cross_entropy": losses.sigmoid_cross_entropy,
    "log_loss": log_loss,
    "hinge_loss": losses.hinge_loss,
    "absolute_difference": losses.absolute_difference,
    "mean_squared_error": losses.squared_error,
    "cosine_distance": cosine_distance_of_rows,
}


@BOTH
@pytest.mark.parametrize("weighting", ["none", "scalar", "per_example", "some_zero", "all_zero"])
@pytest.mark.parametrize("name", RECORDED["losses"])
def test_loss_and_its_gradients(name: str, weighting: str, dtype: str) -> None:
    case, given = RECORDED["losses"][name], tensors(inputs.loss_inputs(dtype))
    recorded = case[dtype][weighting]
    weights = {"none": 1.0, **inputs.loss_weights(dtype)}[weighting]
    predictions = given[case["predictions"]].requires_grad_()
    value = LOSSES[case["kind"]](
        predictions,
        given[case["labels"]],
        weights=float(weights) if np.ndim(weights) == 0 else torch.from_numpy(weights),
        **case["kwargs"],
    )
    (gradients,) = torch.autograd.grad(value, predictions)
    assert_close(value.detach(), recorded["value"], TOLERANCE[dtype])
    assert_close(value.detach(), recorded.get("slim_value", recorded["value"]), TOLERANCE[dtype])
    assert_close(gradients, recorded["gradients"], TOLERANCE[dtype])


@pytest.mark.parametrize("weighting", ["none", "per_example", "some_zero"])
def test_class_numbers_make_the_loss_of_one_hot_labels(weighting: str) -> None:
    recorded = RECORDED["losses"]["softmax_cross_entropy_smoothed"]["float64"][weighting]
    given = tensors(inputs.loss_inputs("float64"))
    weights = inputs.loss_weights("float64").get(weighting, np.float64(1.0))
    numbers = given["one_hot"].argmax(1)
    value = losses.softmax_cross_entropy(
        given["logits"], numbers, label_smoothing=0.1, weights=torch.from_numpy(np.array(weights))
    )
    assert_close(value, recorded["value"], TOLERANCE["float64"])


REGULARIZERS: dict[str, list[type[Regularizer]]] = {
    "l1": [losses.L1],
    "l2": [losses.L2],
    "l1_l2": [losses.L1, losses.L2],
}


@BOTH
@pytest.mark.parametrize("name", REGULARIZERS)
def test_regularizer_and_its_gradients(name: str, dtype: str) -> None:
    recorded = RECORDED["regularizers"]
    weights = torch.from_numpy(inputs.initial(dtype)["weights"])
    total, gradients = 0.0, torch.zeros_like(weights)
    for kind in REGULARIZERS[name]:
        penalty = kind(recorded[kind.name]).bind({"weights": weights})
        total += penalty.loss()
        (added,) = penalty.add_gradients([gradients])
        assert added is not None
        gradients = added
    assert total == pytest.approx(recorded[dtype][name]["value"], rel=TOLERANCE[dtype])
    assert_close(gradients, recorded[dtype][name]["gradients"], TOLERANCE[dtype])
