"""Quantization-aware training: what of a net is quantized, and when; beside TensorFlow in tests/golden."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import tensors
from lockstep.errors import InputError
from lockstep.models.layers import Conv2dNormActivation, FrozenBatchNorm2d
from lockstep.models.mnist import MnistNet
from lockstep.models.quantization import Quantizer, fake_quantized, quantize


def ranges_of(model: nn.Module) -> Quantizer:
    found = model.get_submodule("quantization")
    assert isinstance(found, Quantizer)
    return found


def small(delay: int = 0) -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(Conv2dNormActivation(3, 4), nn.Dropout(), nn.Flatten(), nn.Linear(64, 2)).train()
    quantize(net, torch.zeros(2, 3, 4, 4), delay=delay)
    return net


def images(seed: int = 0) -> Tensor:
    return torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def test_what_is_quantized_does_not_depend_on_modules() -> None:
    """The net for MNIST calls functions, and its ReLU stands behind the pooling."""
    net = MnistNet()
    quantize(net, torch.zeros(2, 1, 28, 28), delay=0)
    plan = ranges_of(net).plan
    names = ("conv1:0", "conv2:0", "local3:0", "local4:0", "softmax_linear:0")
    assert (plan.layers, plan.outputs, plan.normed) == (names, names, frozenset())
    assert plan.activated == {*names[:-1]}


class Shared(nn.Module):
    """A convolution for two maps, each with a norm of its own; a swish, which is no part of a layer; a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = (norm(self.conv(each)) for norm, each in zip(self.norms, (inputs, inputs / 2), strict=True))
        gate: Tensor = F.silu(first) * second
        return gate


def test_a_layer_that_is_called_twice_has_two_ranges() -> None:
    net = Shared().train()
    quantize(net, torch.zeros(2, 3, 4, 4), delay=0)
    plan = ranges_of(net).plan
    assert plan.layers == ("conv:0", "conv:1")
    assert plan.outputs == ("conv:0", "conv:1", "conv:1+0")
    assert plan.normed == {*plan.layers}
    net(images())
    net(images())  # each is folded with its own moving variance
    first, second = ranges_of(net).weights
    assert not torch.equal(first, second)


def test_a_layer_that_was_not_found_is_refused_by_its_name() -> None:
    net = Shared()
    quantize(net, torch.zeros(2, 3, 4, 4), delay=0)
    net.register_forward_pre_hook(lambda model, args: model.conv(args[0]))
    with pytest.raises(InputError, match="other layers than it did on black images") as caught:
        net(images())
    assert caught.value.given == "call 2 (from 0) of layer conv"


@pytest.mark.parametrize("waits", [False, True])
def test_quantizing_begins_after_the_delay_and_ranges_before(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """Also where the host would wait for the device, which then chooses itself."""
    if waits:
        monkeypatch.setattr(tensors, "READ_AT_ONCE", frozenset())
    net, plain = small(delay=2), small()
    plain._forward_pre_hooks.clear()
    plain._forward_hooks.clear()
    outputs = []
    for model in (net, plain):
        torch.manual_seed(3)
        outputs.append([model(images(step)) for step in range(2)])
    assert torch.allclose(outputs[0][0], outputs[1][0], atol=1e-6)
    assert not torch.allclose(outputs[0][1], outputs[1][1], atol=1e-6)
    found = ranges_of(net)
    assert (int(found.steps), len({*outputs[0][1].flatten().tolist()})) == (2, 10)
    low, high = found.ranges()[-1]
    steps = (outputs[0][1] / ((high - low) / 255)).detach()
    assert torch.allclose(steps, steps.round(), atol=1e-3)


def test_an_evaluation_has_the_ranges_of_the_training_and_changes_none() -> None:
    net = small()
    unseen = net.eval()(images(9))
    net.train()(images())
    before = {name: tensor.clone() for name, tensor in net.named_buffers()}
    twin = copy.deepcopy(net).eval()
    scored = twin(images(9) * 100).detach()
    low, high = ranges_of(net).ranges()[-1]
    step = (high - low) / 255
    assert low - step <= scored.min() < scored.max() <= high + step
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.named_buffers())
    assert unseen.abs().max() > 0  # before the first step there is no range, and nothing is quantized
    twin.train()(images(1))
    assert int(ranges_of(net).steps) == 1  # the copy has ranges of its own


def test_frozen_statistics_are_folded_as_they_are() -> None:
    net = small()
    net(images())
    norm: Any = net[0][1]
    kept = norm.running_var.clone()
    norm.eval()
    net(images(1)).sum().backward()
    assert torch.equal(norm.running_var, kept)
    assert norm.weight.grad.abs().max() > 0


@pytest.mark.parametrize("layers", [{"flatten": nn.Flatten()}, {"quantization": nn.Linear(4, 4)}])
def test_a_net_that_cannot_be_quantized_is_refused(layers: dict[str, nn.Module]) -> None:
    with pytest.raises(InputError, match=r"This network cannot be quantized\."):
        quantize(nn.Sequential(OrderedDict(layers)), torch.zeros(2, 4), delay=0)


def test_ranges_far_from_0_keep_it_and_an_empty_one_gives_zeros() -> None:
    values = torch.tensor([0.5, 1.0, 3.0])
    found = fake_quantized(values, torch.tensor(2.0), torch.tensor(4.0))
    assert found.tolist() == pytest.approx([0.5, 1.0, 2.0], abs=0.01)
    assert fake_quantized(values, torch.tensor(0.0), torch.tensor(0.0)).tolist() == [0, 0, 0]


def test_a_frozen_norm_is_folded_in_training_as_batch_norm_in_evaluation_is() -> None:
    """Between two convolutions, so that what comes into the norm has a gradient."""

    def learned(norm: nn.Module) -> tuple[frozenset[str], list[Tensor]]:
        torch.manual_seed(2)
        net = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), norm, nn.ReLU(), nn.Conv2d(4, 2, 1)).train()
        norm.eval()
        with torch.no_grad():
            norm.get_buffer("running_var").fill_(3)
        quantize(net, torch.zeros(2, 3, 4, 4), delay=0)
        net(images()).square().sum().backward()
        return ranges_of(net).plan.normed, [p.grad for p in (net[0].weight, net[3].weight)]

    frozen, usual = learned(FrozenBatchNorm2d(4)), learned(nn.BatchNorm2d(4))
    assert frozen[0] == usual[0] == {"0:0"}
    assert all(map(torch.equal, frozen[1], usual[1]))
