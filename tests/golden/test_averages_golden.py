"""Moving averages of parameters, losses and batch-norm statistics are TensorFlow's and TF-Slim's."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import update_inputs as inputs
from torch import nn
from update_reference import BOTH, LATER_TOLERANCE, RECORDED, TOLERANCE, assert_close

from lockstep import join, optim
from lockstep.towers.batch_norm import around_towers
from lockstep.towers.towers import Towers
from lockstep.training.attempt import LossAverage
from lockstep.training.state import SmoothedLosses

AVERAGES = {
    "constant_0.9": optim.MovingAverage(0.9, dynamic=False),
    "dynamic_0.9999": optim.MovingAverage(0.9999),
    "dynamic_0.5": optim.MovingAverage(0.5),
}


@BOTH
@pytest.mark.parametrize("name", AVERAGES)
def test_average_of_parameters(name: str, dtype: str) -> None:
    parameter = torch.from_numpy(inputs.initial(dtype)["biases"])
    average = AVERAGES[name].bind({"biases": parameter}, {})
    recorded = RECORDED["averages"][dtype][name]
    for step, (value, expected) in enumerate(zip(inputs.followed(dtype), recorded, strict=True), start=1):
        parameter.copy_(torch.from_numpy(value))
        average.update(step)
        tolerance = (TOLERANCE if step == 1 else LATER_TOLERANCE)[dtype]
        assert_close(average.tensors["biases"], expected, tolerance)


@BOTH
@pytest.mark.parametrize("kind", ["plain", "zero_debias"])
def test_average_of_losses(kind: str, dtype: str) -> None:
    recorded = RECORDED["loss_averages"]
    smoothed = SmoothedLosses(LossAverage(recorded["decay"], bias_correction=kind == "zero_debias"))
    for loss, expected in zip(inputs.loss_series(dtype).tolist(), recorded[dtype][kind], strict=True):
        smoothed.update({"loss": loss})
        assert smoothed.now()["loss"] == pytest.approx(expected, rel=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("kernel", "variance", "dtype"),
    [("plain", "biased", "float64"), ("plain", "biased", "float32"), ("fused", "unbiased", "float32")],
)
def test_batch_norm_and_its_moving_statistics(kernel: str, variance: Literal["biased", "unbiased"], dtype: str) -> None:
    recorded, case = RECORDED["batch_norm"], RECORDED["batch_norm"][kernel][dtype]
    norm = nn.BatchNorm2d(3, eps=recorded["epsilon"], momentum=1 - recorded["decay"], affine=False)
    norm.to(getattr(torch, dtype))
    images = torch.from_numpy(inputs.batch_norm_images(dtype)).permute(0, 1, 4, 2, 3)
    outputs = []
    with around_towers(norm, Towers(variance=variance), join()):
        for step, batch in enumerate(images, start=1):
            outputs.append(norm(batch).permute(0, 2, 3, 1).flatten())
            assert_close(norm.running_mean, case["statistics"][str(step)]["moving_mean"], TOLERANCE[dtype])
            assert_close(norm.running_var, case["statistics"][str(step)]["moving_variance"], TOLERANCE[dtype])
    assert_close(outputs[0], case["first_outputs"], TOLERANCE[dtype])
    assert_close(norm.eval()(images[0]).permute(0, 2, 3, 1).flatten(), case["scored_outputs"], TOLERANCE[dtype])
