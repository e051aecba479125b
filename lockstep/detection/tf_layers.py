"""Layers by the `Hyperparams` of a configuration: their norm, activation, first weights, and regularizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Generator, Tensor, nn

from lockstep.detection import tf_configs
from lockstep.losses.regularization import L1, L2
from lockstep.models.initial_weights import clear_statistics, truncated_normal
from lockstep.models.layers import RELU, RELU6, ActivationLayer, BatchNorm2d, NormLayer
from lockstep.weights.initializers import fans

_ACTIVATIONS: Mapping[str, ActivationLayer | None] = {
    "none": None,
    "relu": RELU,
    "relu_6": RELU6,
    "swish": partial(nn.SiLU, inplace=True),
}
_GROUPS = 32
"""Number of groups in TF-Slim's group norm."""
_SLIM_FACTOR = 1.3
"""Factor by which TF-Slim raises the variance of a normal distribution that is cut."""


class TfBatchNorm(BatchNorm2d):
    """Batch norm as a configuration has it: perhaps without scale or shift, perhaps with fixed statistics."""

    def __init__(self, config: tf_configs.BatchNorm, channels: int, *, is_fixed: bool = False) -> None:
        super().__init__(channels, config.epsilon, momentum=1 - config.decay)
        if not config.scale:
            self.register_parameter("weight", None)
        if not config.center:
            self.register_parameter("bias", None)
        self._is_fixed = is_fixed or not config.train

    def train(self, mode: bool = True) -> TfBatchNorm:
        """Normalise with the statistics of the batch in training, unless they are fixed."""
        super().train(mode and not self._is_fixed)
        return self


def norm_layer(config: tf_configs.Hyperparams, *, freeze_batchnorm: bool = False) -> NormLayer | None:
    """Return what makes the norms after convolutions; None where they have none."""
    if config.group_norm is not None:
        return partial(nn.GroupNorm, _GROUPS)
    if config.batch_norm is None:
        return None
    return partial(TfBatchNorm, config.batch_norm, is_fixed=freeze_batchnorm)


def activation_layer(config: tf_configs.Hyperparams) -> ActivationLayer | None:
    """Return what makes the activations after convolutions; None where they have none."""
    return _ACTIVATIONS[config.activation]


def draw_weights(module: nn.Module, config: tf_configs.Initializer | None, generator: Generator | None = None) -> None:
    """Draw first weights as TF-Slim does; biases are 0, and norms multiply by 1.

    Without a configuration the weights of convolutions and linear layers are Glorot's uniform ones, TF-Slim's own
    default; without a generator, torch's default one draws.
    """
    clear_statistics(module)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            _draw(layer, config, generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@torch.no_grad()
def _draw(
    layer: nn.Conv2d | nn.ConvTranspose2d | nn.Linear,
    config: tf_configs.Initializer | None,
    generator: Generator | None,
) -> None:
    weight = layer.weight
    match config:
        case None:
            _scaled(layer, tf_configs.VarianceScalingInitializer(1.0, uniform=True, mode="fan_avg"), generator)
        case tf_configs.VarianceScalingInitializer():
            _scaled(layer, config, generator)
        case tf_configs.TruncatedNormalInitializer():
            truncated_normal(weight, config.stddev, generator)
            weight += config.mean
        case _:
            weight.normal_(config.mean, config.stddev, generator=generator)


def _scaled(
    layer: nn.Conv2d | nn.ConvTranspose2d | nn.Linear,
    config: tf_configs.VarianceScalingInitializer,
    generator: Generator | None,
) -> None:
    weight = layer.weight
    inputs, outputs = fans(weight.shape)
    if getattr(layer, "groups", 1) > 1:  # TensorFlow's depthwise kernels have all channels as inputs, and one output
        inputs, outputs = outputs, inputs
    number = {"fan_in": inputs, "fan_out": outputs, "fan_avg": (inputs + outputs) / 2}[config.mode]
    variance = config.factor / max(1.0, number)
    if config.uniform:
        limit = math.sqrt(3 * variance)
        weight.uniform_(-limit, limit, generator=generator)
    else:
        truncated_normal(weight, math.sqrt(_SLIM_FACTOR * variance), generator)


class PartPenalties:
    """The regularizers of the parts of a detector, each on the convolutions and linear layers of its part.

    A part without a regularizer, or with a weight of 0, has no penalty.
    """

    def __init__(self, model: nn.Module, parts: Iterable[tuple[tf_configs.Hyperparams, nn.Module]]) -> None:
        self._each: list[tuple[L1 | L2, list[str]]] = []
        for config, part in parts:
            if config.regularizer is not None and config.regularizer.weight > 0:
                kind = L2 if isinstance(config.regularizer, tf_configs.L2Regularizer) else L1
                self._each.append((kind(config.regularizer.weight), _penalised(model, part, config)))

    def losses(self, model: nn.Module) -> dict[str, Tensor]:
        """Compute the sum of the penalties on what the model trains, by its name; nothing where there are none."""
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        values = []
        for penalty, names in self._each:
            if tensors := [trained[name] for name in names if name in trained]:  # a part may be frozen
                values.append(penalty.penalty(tensors))
        return {"regularization": torch.stack(values).sum()} if values else {}


def _penalised(model: nn.Module, part: nn.Module, config: tf_configs.Hyperparams) -> list[str]:
    """Name the weights of a part that have its penalty: those of depthwise convolutions only if asked for."""
    chosen = {
        id(layer.weight)
        for layer in part.modules()
        if isinstance(layer, nn.Linear)
        or (isinstance(layer, nn.Conv2d) and (config.regularize_depthwise or layer.groups == 1))
    }
    return [name for name, parameter in model.named_parameters() if id(parameter) in chosen]
