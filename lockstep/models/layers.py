"""Layers that the backbones of detectors share, and the outputs of some of a net's layers by name.

Convolutions and pools of stride 2 pad in one of two ways. torch's nets pad both sides alike ("symmetric"); TensorFlow's
SAME ("same") gives one row and one column less at the top and left where the number is odd, as it is for 3x3 over an
even size, so that weights trained with the one do not give the same numbers with the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.models.initial_weights import clear_statistics
from lockstep.tensors import reading_waits

Padding = Literal["symmetric", "same"]
NormLayer = Callable[[int], nn.Module]
"""Makes the norm of so many channels, as `nn.BatchNorm2d` does, or a partial of it."""
ActivationLayer = Callable[[], nn.Module]
RELU: ActivationLayer = partial(nn.ReLU, inplace=True)
RELU6: ActivationLayer = partial(nn.ReLU6, inplace=True)
HARD_SWISH: ActivationLayer = partial(nn.Hardswish, inplace=True)


class Conv2dSame(nn.Conv2d):
    """A convolution that pads as TensorFlow's SAME does: the output has ceil(size / stride) rows and columns."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape (batch, inputs, height, width) to (batch, outputs, ceil(height / stride), ...)."""
        (top, bottom), (left, right) = (
            same_padding(*each)
            for each in zip(hidden.shape[2:], self.kernel_size, self.stride, self.dilation, strict=True)
        )
        if top == bottom and left == right:
            padding = (top, left)
        else:
            hidden, padding = F.pad(hidden, (left, right, top, bottom)), (0, 0)
        return F.conv2d(hidden, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


class Branches(nn.ModuleDict):
    """Modules side by side, whose outputs are joined along the channels."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape (batch, inputs, height, width) to (batch, sum of the branches' outputs, ...)."""
        return torch.cat([branch(hidden) for branch in self.values()], 1)


class MaxPool2dSame(nn.Module):
    """The maximum over windows that are placed as TensorFlow's SAME does; what is outside of the map does not count."""

    def __init__(self, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.kernel_size, self.stride = kernel_size, stride

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape (batch, channels, height, width) to (batch, channels, ceil(height / stride), ...)."""
        (top, bottom), (left, right) = (same_padding(size, self.kernel_size, self.stride) for size in hidden.shape[2:])
        padding = (top, left)
        if top != bottom or left != right:
            hidden, padding = F.pad(hidden, (left, right, top, bottom), value=float("-inf")), (0, 0)
        return F.max_pool2d(hidden, self.kernel_size, self.stride, padding)


def same_padding(size: int, kernel: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """Return the zeros before and after a row of so many values, as TensorFlow's SAME has them."""
    outputs = -(-size // stride)
    total = max((outputs - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


def make_divisible(channels: float, least: int = 8) -> int:
    """Round a scaled number of channels to a multiple of 8, not down by more than a tenth, as TF-Slim does."""
    rounded = max(least, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def conv2d(
    inputs: int,
    outputs: int,
    kernel_size: int | tuple[int, int],
    stride: int = 1,
    *,
    dilation: int = 1,
    groups: int = 1,
    bias: bool = True,
    padding: Padding = "symmetric",
) -> nn.Conv2d:
    """Make a convolution with an odd kernel that keeps height and width, or divides them by the stride."""
    if padding == "same" and stride > 1:
        return Conv2dSame(inputs, outputs, kernel_size, stride, dilation=dilation, groups=groups, bias=bias)
    height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
    zeros = ((height - 1) // 2 * dilation, (width - 1) // 2 * dilation)
    return nn.Conv2d(inputs, outputs, kernel_size, stride, zeros, dilation, groups, bias)


class Conv2dNormActivation(nn.Sequential):
    """A convolution without bias, a norm, an activation, numbered as torchvision's block of this name; see `conv2d`.

    Without a norm the convolution has a bias. A depthwise convolution has as many groups as inputs.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel_size: int = 3,
        stride: int = 1,
        *,
        groups: int = 1,
        norm_layer: NormLayer | None = nn.BatchNorm2d,
        activation_layer: ActivationLayer | None = RELU,
        padding: Padding = "symmetric",
    ) -> None:
        has_bias = norm_layer is None
        layers: list[nn.Module] = [
            conv2d(inputs, outputs, kernel_size, stride, groups=groups, bias=has_bias, padding=padding)
        ]
        if norm_layer is not None:
            layers.append(norm_layer(outputs))
        if activation_layer is not None:
            layers.append(activation_layer())
        super().__init__(*layers)
        self.out_channels = outputs


class InvertedResidual(nn.Module):
    """A convolution of 1x1 to more channels, a depthwise one, and one of 1x1 to few, to which what came in is added.

    That is only where size and channels stay. There is no layer that expands where it would change no number of
    channels. The parameters call the layers "conv" in torchvision's MobileNetV2, "block" in its MobileNetV3.
    """

    def __init__(self, name: Literal["conv", "block"], layers: Sequence[nn.Module], *, is_residual: bool) -> None:
        super().__init__()
        self.add_module(name, nn.Sequential(*layers))
        self._name, self._is_residual = name, is_residual

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape (batch, inputs, height, width) to (batch, outputs, height / stride, width / stride)."""
        return self.project(self.expand(hidden), hidden)

    def expand(self, hidden: Tensor) -> Tensor:
        """Return what the first layer makes of what came in."""
        expanded: Tensor = self._layers[0](hidden)
        return expanded

    def project(self, expanded: Tensor, hidden: Tensor) -> Tensor:
        """Return the output, of what came in and what the first layer made of it."""
        projected = expanded
        for layer in islice(self._layers, 1, None):
            projected = layer(projected)
        return projected + hidden if self._is_residual else projected

    @property
    def _layers(self) -> nn.Sequential:
        return cast(nn.Sequential, getattr(self, self._name))


class BatchNorm2d(nn.BatchNorm2d):
    """Torch's, which may have a shift and no scale: on accelerators, too.

    Torch's CUDA kernels for channels_last return no gradient for the shift where there is no scale, and the backward
    pass fails. There the scale is one of ones, which gives the same bits.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape (batch, channels, height, width) to the same."""
        has_shift_alone = (self._parameters["weight"] is None, self._parameters["bias"] is None) == (True, False)
        if not (has_shift_alone and reading_waits(hidden.device)):
            return super().forward(hidden)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        scale, momentum = torch.ones_like(self.bias), cast("float", self.momentum)
        return F.batch_norm(
            hidden, self.running_mean, self.running_var, scale, self.bias, self.training, momentum, self.eps
        )


class FrozenBatchNorm2d(nn.Module):
    """Batch norm by fixed statistics, scale and shift, which are buffers with torchvision's names for them.

    For batches of few images, on which statistics would be poor: the backbone's weights must come from a trained net.
    """

    is_quantized = False
    """What quantizes a net folds the norm into the layer before it, and has to see torch's function."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Leave what comes in as it is, but for `eps`."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.running_mean)
        nn.init.ones_(self.running_var)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape (batch, channels, height, width) to the same."""
        mean, variance = self.running_mean, self.running_var
        if not hidden.requires_grad or self.is_quantized:
            return F.batch_norm(hidden, mean, variance, self.weight, self.bias, eps=self.eps)
        normed: Tensor = _FrozenBatchNorm.apply(hidden, mean, variance, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _FrozenBatchNorm(torch.autograd.Function):
    """Torch's keeps what came in for the backward pass, from which fixed values take the slope of the output alone."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, mean: Tensor, variance: Tensor, scale: Tensor, shift: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(mean, variance, scale)
        ctx.eps = eps
        return F.batch_norm(hidden, mean, variance, scale, shift, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        mean, variance, scale = ctx.saved_tensors
        slope, _, _ = torch.ops.aten.native_batch_norm_backward(
            slopes[0], slopes[0], scale, mean, variance, None, None, False, ctx.eps, [True, False, False]
        )
        return slope, None, None, None, None, None


def kaiming_fan_out(net: nn.Module, generator: Generator | None = None) -> None:
    """Draw initial weights as torchvision's nets do: He's normal ones by the outputs of a convolution; biases are 0."""
    clear_statistics(net)
    for module in net.modules():
        if isinstance(module, FrozenBatchNorm2d):
            module.reset_parameters()
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class IntermediateLayerGetter(nn.ModuleDict):
    """The layers of a net up to the last one that is asked for; returns the outputs of those by name.

    The names of parameters stay those of the net, as with torchvision's class of this name. What stands after the last
    layer is left out.

    Args:
        net: one whose children run one after the other.
        return_layers: the name of an output by the child that it is the output of. "13.expansion" is what child 13, an
            inverted residual, has after its first convolution: as timm calls it.

    Raises:
        ValueError: the net has no such child.
    """

    def __init__(self, net: nn.Module, return_layers: Mapping[str, str]) -> None:
        children = dict(net.named_children())
        wanted = [name.partition(".")[0] for name in return_layers]
        if unknown := {*wanted} - children.keys():
            raise ValueError(f"{type(net).__name__} has no layers {sorted(unknown)}; it has {[*children]}")
        last = max([*children].index(name) for name in wanted)
        super().__init__(dict([*children.items()][: last + 1]))
        self.return_layers = dict(return_layers)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Map images of shape (batch, channels, height, width) to feature maps, in the order of the layers."""
        maps, hidden = {}, images
        for name, layer in self.items():
            if (expansion := self.return_layers.get(f"{name}.expansion")) is not None:
                inverted_residual = cast(InvertedResidual, layer)
                maps[expansion] = expanded = inverted_residual.expand(hidden)
                hidden = inverted_residual.project(expanded, hidden)
            else:
                hidden = layer(hidden)
            if name in self.return_layers:
                maps[self.return_layers[name]] = hidden
        return maps
