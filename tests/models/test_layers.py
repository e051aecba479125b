"""Layers that backbones share: TensorFlow's padding, feature maps by name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from device_calls import accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.models.layers import (
    BatchNorm2d,
    Conv2dNormActivation,
    Conv2dSame,
    FrozenBatchNorm2d,
    IntermediateLayerGetter,
    MaxPool2dSame,
    make_divisible,
    same_padding,
)
from lockstep.models.mobilenet import mobilenet_v3_features


@given(
    size=st.integers(1, 70),
    kernel=st.sampled_from([1, 3, 5, 7]),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
)
def test_same_gives_the_ceiling_of_the_size_over_the_stride(size: int, kernel: int, stride: int, dilation: int) -> None:
    before, after = same_padding(size, kernel, stride, dilation)
    outputs = (size + before + after - dilation * (kernel - 1) - 1) // stride + 1
    assert outputs == -(-size // stride)
    assert after - before in (0, 1)


def test_same_pads_an_even_size_at_its_end_alone() -> None:
    convolution = Conv2dSame(1, 1, 3, 2, bias=False)
    nn.init.ones_(convolution.weight)
    row = torch.arange(1.0, 5.0).expand(1, 1, 4, 4)
    assert convolution(row)[0, 0, 0].tolist() == [3 * (1 + 2 + 3), 3 * (3 + 4)]
    assert convolution(row[..., :3])[0, 0, 0].tolist() == [3 * (1 + 2), 3 * (2 + 3)]


def test_what_a_pool_pads_is_never_its_maximum() -> None:
    assert MaxPool2dSame(3, 2)(torch.full((1, 1, 4, 5), -2.0)).unique().tolist() == [-2.0]


def test_widths_stay_divisible_and_within_a_tenth() -> None:
    assert [make_divisible(channels) for channels in (3, 8, 11, 12, 36.0, 84)] == [8, 8, 16, 16, 40, 88]


def test_a_block_has_a_bias_only_without_a_norm() -> None:
    with_norm, without = Conv2dNormActivation(3, 4), Conv2dNormActivation(3, 4, norm_layer=None)
    assert with_norm[0].bias is None
    assert without[0].bias is not None
    assert len(without) == 2


def test_the_getter_returns_the_outputs_that_are_asked_for_and_drops_the_rest() -> None:
    net = mobilenet_v3_features("small", generator=torch.Generator().manual_seed(0)).eval()
    getter = IntermediateLayerGetter(net, {"9.expansion": "C4", "9": "after", "12": "C5"})
    images = torch.rand(1, 3, 64, 64)
    maps = getter(images)
    assert {name: tuple(each.shape[1:]) for name, each in maps.items()} == {
        "C4": (288, 4, 4),
        "after": (96, 2, 2),
        "C5": (576, 2, 2),
    }
    assert torch.equal(maps["C5"], net(images))
    assert [*IntermediateLayerGetter(net, {"2": "low"})] == ["0", "1", "2"]


def test_a_layer_that_there_is_not_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="no layers \\['last'\\]"):
        IntermediateLayerGetter(nn.Sequential(nn.ReLU()), {"last": "out"})


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
def test_batch_norm_with_a_shift_alone_has_the_bits_of_torchs_on_an_accelerator(
    is_training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it has a scale: in channels_last, CUDA gives no gradient for a shift without one."""
    scales: list[Tensor | None] = []
    plain_batch_norm = F.batch_norm

    def noted(hidden: Tensor, mean: Tensor, variance: Tensor, scale: Tensor | None, *rest: Any, **more: Any) -> Tensor:
        scales.append(scale)
        return plain_batch_norm(hidden, mean, variance, scale, *rest, **more)

    monkeypatch.setattr(F, "batch_norm", noted)
    images = torch.randn(4, 6, 5, 5, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    found = []
    for context in (nullcontext, accelerator):
        layer = BatchNorm2d(6, affine=False).train(is_training)
        layer.bias = nn.Parameter(torch.linspace(-1, 1, 6))
        inputs = images.clone().requires_grad_()
        with context():
            output = layer(inputs)
        output.square().sum().backward()
        assert inputs.grad is not None
        assert layer.bias.grad is not None
        found.append([output, inputs.grad, layer.bias.grad, *layer.state_dict().values()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert [scale is None for scale in scales] == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_frozen_norm_gives_torchs_bits_and_keeps_nothing_that_came_in(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    torch.manual_seed(0)
    norm = FrozenBatchNorm2d(16)
    for values in (norm.weight, norm.bias, norm.running_mean):
        values.normal_()
    norm.running_var.uniform_(0.5, 2)
    if dtype == torch.float64:
        norm.double()
    images = torch.randn(4, 16, 9, 11).to(dtype).contiguous(memory_format=memory_format).requires_grad_()
    slopes = torch.randn_like(images)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.numel()) or each, lambda each: each):
        mine = norm(images)
    assert sum(kept) == 3 * 16
    theirs = F.batch_norm(images, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
    assert torch.equal(mine, theirs)
    assert torch.equal(*(torch.autograd.grad(each, images, slopes)[0] for each in (mine, theirs)))
