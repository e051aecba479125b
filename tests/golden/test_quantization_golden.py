"""Quantization-aware training beside TensorFlow's own rewriter: the kernel, and updates of a small net."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import quantization_inputs as inputs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.layers import RELU6, BatchNorm2d, Conv2dNormActivation
from lockstep.models.quantization import fake_quantized, quantize

PARTS = ("stem", "expand", "depthwise", "project", "last")
OUTPUTS = (
    *("stem/act", "expand/act", "depthwise/act", "project/act", "post_activation_bypass"),
    *("last/conv", "act", "logits/act"),
)
"""The rewriter's names of what it quantizes besides weights, in the order in which it is computed."""


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(inputs.PATH) as file:
        return dict(file)


@pytest.mark.parametrize(("bits", "narrow"), [(8, False), (8, True), (4, False), (2, True)])
def test_the_kernel_has_the_bits_of_tensorflow(golden: dict[str, Any], bits: int, narrow: bool) -> None:
    wanted = torch.from_numpy(golden[f"fake_{bits}_{narrow}"])
    passes = np.unpackbits(golden[f"slopes_{bits}_{narrow}"])[: wanted.numel()].reshape(wanted.shape)
    assert 0.1 < passes.mean() < 0.9
    for (low, high), made, slope in zip(inputs.RANGES, wanted, passes, strict=True):
        values = torch.from_numpy(inputs.values()).requires_grad_()
        found = fake_quantized(values, torch.tensor(low), torch.tensor(high), bits, narrow=narrow)
        found.sum().backward()
        assert torch.equal(found, made)
        assert torch.equal(values.grad, torch.from_numpy(slope).float())


class Net(nn.Module):
    """The net of `make_quantization_golden.py`."""

    def __init__(self) -> None:
        super().__init__()

        def made(*shape: int, **options: Any) -> Conv2dNormActivation:
            return Conv2dNormActivation(
                *shape, norm_layer=lambda channels: BatchNorm2d(channels, 0.001, 1 - inputs.MOMENTUM), **options
            )

        self.stem = made(3, 8, 3, 2, activation_layer=RELU6, padding="same")
        self.expand = made(8, 12, 1, activation_layer=RELU6)
        self.depthwise = made(12, 12, 3, groups=12, activation_layer=RELU6)
        self.project = made(12, 8, 1, activation_layer=None)
        self.last = made(8, 8, 1, activation_layer=None)
        self.logits = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        stem = self.stem(images)
        added = self.project(self.depthwise(self.expand(stem))) + stem
        last = F.relu(self.last(added) + added)
        logits: Tensor = self.logits(last.mean((2, 3)))
        return logits

    def variables(self) -> dict[str, nn.Parameter]:
        """The parameters by TensorFlow's names, in its order."""
        found = {}
        for name in PARTS:
            layer: Any = getattr(self, name)
            found[f"{name}/{'depthwise_' if name == 'depthwise' else ''}weights"] = layer[0].weight
            found |= {f"{name}/BatchNorm/beta": layer[1].bias, f"{name}/BatchNorm/gamma": layer[1].weight}
        return {**found, "logits/weights": self.logits.weight, "logits/biases": self.logits.bias}


def to_tensorflow(name: str, values: Tensor) -> Tensor:
    if name.endswith("depthwise_weights"):
        return values.permute(2, 3, 0, 1)
    if values.dim() == 4:
        return values.permute(2, 3, 1, 0)
    return values.T if values.dim() == 2 else values


@torch.no_grad()
def with_first_values(net: Net) -> Net:
    for name, variable in net.variables().items():
        there = to_tensorflow(name, variable)
        there.copy_(torch.from_numpy(inputs.weights(name, tuple(there.shape))))
    for name in PARTS:
        norm: Any = getattr(net, name)[1]
        for kind, values in (("mean", norm.running_mean), ("variance", norm.running_var)):
            values.copy_(torch.from_numpy(inputs.weights(f"{name}/BatchNorm/moving_{kind}", values.shape)))
    return net


def as_input(images: Any) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def test_updates_are_those_of_the_rewriter(golden: dict[str, Any]) -> None:
    net = with_first_values(Net()).train()
    quantize(net, as_input(inputs.images(0)), delay=inputs.DELAY)
    variables = net.variables()
    assert [*variables] == golden["names"].tolist()
    for step in range(inputs.STEPS):
        loss = F.mse_loss(net(as_input(inputs.images(step))), torch.from_numpy(inputs.targets(step)))
        slopes = torch.autograd.grad(loss, [*variables.values()])
        flat = torch.cat([to_tensorflow(n, each).flatten() for n, each in zip(variables, slopes, strict=True)])
        assert loss.item() == pytest.approx(golden["losses"][step], rel=1e-6)
        assert torch.allclose(flat, torch.from_numpy(golden["gradients"][step]), rtol=0, atol=1e-6)
        with torch.no_grad():
            for variable, slope in zip(variables.values(), slopes, strict=True):
                variable -= inputs.LEARNING_RATE * slope
    check_state(net, golden)
    predicted = net.eval()(as_input(inputs.images(99)))
    assert torch.allclose(predicted, torch.from_numpy(golden["evaluated"]), rtol=0, atol=1e-6)


def check_state(net: Net, golden: dict[str, Any]) -> None:
    """Ranges and statistics are those of the rewritten graph."""
    quantization: Any = net.quantization
    found = {}
    for key, ends in zip(quantization.plan.layers, quantization.weights, strict=True):
        found[f"{key.partition('.')[0].partition(':')[0]}/weights_quant"] = ends
    for name, ends in zip(OUTPUTS, quantization.ranges(), strict=True):
        found[f"{name}_quant"] = ends
    ends = [
        found[name][int(kind == "max")] for name, _, kind in (each.rpartition("/") for each in golden["range_names"])
    ]
    assert len(ends) == 2 * len(found)
    assert torch.allclose(torch.stack(ends), torch.from_numpy(golden["ranges"]), rtol=1e-6, atol=1e-7)
    norms: list[Any] = [getattr(net, name)[1] for name in sorted(PARTS)]
    statistics = torch.cat([torch.cat([norm.running_mean, norm.running_var]) for norm in norms])
    assert torch.allclose(statistics, torch.from_numpy(golden["statistics"]), rtol=1e-5, atol=1e-6)
