"""Layers by configuration: norms, first weights and penalties as TF-Slim has them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Generator, nn

from lockstep.detection.tf_configs import (
    BatchNorm,
    GroupNorm,
    Hyperparams,
    Initializer,
    L1Regularizer,
    L2Regularizer,
    RandomNormalInitializer,
    TruncatedNormalInitializer,
    VarianceScalingInitializer,
)
from lockstep.detection.tf_layers import PartPenalties, activation_layer, draw_weights, norm_layer


def made(config: Hyperparams, channels: int = 4, **given: bool) -> nn.Module:
    make = norm_layer(config, **given)
    assert make is not None
    return make(channels)


def test_batch_norm_has_only_what_the_configuration_gives_it() -> None:
    norm = made(Hyperparams(batch_norm=BatchNorm(decay=0.9, center=False, scale=True, epsilon=0.01)))
    assert isinstance(norm, nn.BatchNorm2d)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    assert (norm.momentum, norm.eps) == (pytest.approx(0.1), 0.01)


@pytest.mark.parametrize(("train", "freeze"), [(False, False), (True, True)])
def test_fixed_statistics_normalise_in_training_too(train: bool, freeze: bool) -> None:
    norm = made(Hyperparams(batch_norm=BatchNorm(train=train, epsilon=1e-12)), freeze_batchnorm=freeze).train()
    hidden = torch.full((2, 4, 3, 3), 5.0)
    assert torch.equal(norm(hidden), hidden)
    assert norm.get_buffer("num_batches_tracked") == 0


def test_there_may_be_no_norm_or_one_of_groups() -> None:
    assert norm_layer(Hyperparams()) is None
    assert isinstance(made(Hyperparams(group_norm=GroupNorm()), 64), nn.GroupNorm)


def test_there_may_be_no_activation() -> None:
    assert activation_layer(Hyperparams(activation="none")) is None
    made = activation_layer(Hyperparams(activation="relu_6"))
    assert made is not None
    assert made()(torch.tensor([-1.0, 3, 9])).tolist() == [0, 3, 6]


@pytest.mark.parametrize(
    ("config", "mean", "deviation"),
    [
        (TruncatedNormalInitializer(mean=1.0, stddev=0.5), 1, 0.5 * 0.8796),
        (RandomNormalInitializer(mean=-1.0, stddev=0.5), -1, 0.5),
        (VarianceScalingInitializer(factor=2.0, mode="fan_in"), 0, math.sqrt(1.3 * 2 / 90) * 0.8796),
        (VarianceScalingInitializer(factor=1.0, mode="fan_out", uniform=True), 0, math.sqrt(1 / 1800)),
        (None, 0, math.sqrt(2 / (90 + 1800))),
    ],
)
def test_first_weights_have_the_law_of_the_configuration(
    config: Initializer | None, mean: float, deviation: float
) -> None:
    layer = nn.Conv2d(10, 200, 3)
    draw_weights(layer, config, Generator().manual_seed(0))
    assert layer.weight.mean().item() == pytest.approx(mean, abs=0.02)
    assert layer.weight.std().item() == pytest.approx(deviation, rel=0.02)
    assert not layer.bias.any()


def test_a_penalty_is_on_kernels_and_on_depthwise_ones_only_if_asked() -> None:
    model = nn.ModuleDict({"a": nn.Conv2d(2, 2, 1), "b": nn.Conv2d(2, 2, 3, groups=2), "other": nn.Conv2d(2, 2, 1)})
    for parameter in model.parameters():
        nn.init.constant_(parameter, 2.0)
    part = nn.ModuleList([model["a"], model["b"]])
    plain = Hyperparams(regularizer=L2Regularizer(0.1))
    deep = Hyperparams(regularizer=L1Regularizer(0.1), regularize_depthwise=True)
    l2 = PartPenalties(model, [(plain, part), (Hyperparams(), part)]).losses(model)
    l1 = PartPenalties(model, [(deep, part)]).losses(model)
    assert l2["regularization"].item() == pytest.approx(0.1 / 2 * 4 * 4)
    assert l1["regularization"].item() == pytest.approx(0.1 * 2 * (4 + 18))


def test_a_part_that_is_frozen_has_no_penalty() -> None:
    model = nn.ModuleDict({"a": nn.Conv2d(2, 2, 1), "b": nn.Conv2d(2, 2, 1)})
    config = Hyperparams(regularizer=L2Regularizer(0.1))
    penalties = PartPenalties(model, [(config, model["a"]), (config, model["b"])])
    model["a"].requires_grad_(False)
    expected = 0.1 / 2 * model["b"].weight.square().sum()
    torch.testing.assert_close(penalties.losses(model)["regularization"], expected)
    model.requires_grad_(False)
    assert penalties.losses(model) == {}
