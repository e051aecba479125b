"""The blocks of Inception-v3: convolutions with batch norm, side by side and joined along the channels.

Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (2015); the letters of the blocks, and the
names of what is in them, are torchvision's, so that its files fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    Size = int | tuple[int, int]

LEAST_CHANNELS = 16
"""What no convolution has fewer of, however small the depth multiplier."""


@dataclass(frozen=True)
class Layers:
    """What all convolutions of a net have in common."""

    depth_multiplier: float
    batch_norm_decay: float
    batch_norm_epsilon: float
    batch_norm_scale: bool
    average_over_padding: bool

    def depth(self, channels: int) -> int:
        """The number of channels in place of the usual one: TF-Slim's rule."""
        return max(int(channels * self.depth_multiplier), LEAST_CHANNELS)

    def convolution(self, inputs: int, outputs: int, kernel: Size) -> ConvolutionBatchNorm:
        """One that keeps height and width, with channels as they are."""
        height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        return ConvolutionBatchNorm(self, inputs, outputs, kernel, padding=(height // 2, width // 2))

    def reduction(self, inputs: int, outputs: int, kernel: Size, *, stride: int = 2) -> ConvolutionBatchNorm:
        """One without padding."""
        return ConvolutionBatchNorm(self, inputs, outputs, kernel, stride=stride)

    def batch_norm(self, channels: int) -> nn.BatchNorm2d:
        """Batch norm with a shift, and a scale only where that is asked for."""
        layer = nn.BatchNorm2d(
            channels, self.batch_norm_epsilon, momentum=1 - self.batch_norm_decay, affine=self.batch_norm_scale
        )
        if not self.batch_norm_scale:
            # No scale at all, rather than one of ones: torch gives the same bits in the same time, and there is
            # nothing that could be trained, averaged, saved or sent.
            layer.bias = nn.Parameter(torch.empty(channels))
        return layer

    def average_pool(self, hidden: Tensor) -> Tensor:
        """The mean of 3x3 values, at the border of those that are there (or of 9 with zeros, as torchvision has it)."""
        return F.avg_pool2d(hidden, 3, stride=1, padding=1, count_include_pad=self.average_over_padding)


class ConvolutionBatchNorm(nn.Module):
    """A convolution without bias, batch norm, ReLU."""

    def __init__(
        self, layers: Layers, inputs: int, outputs: int, kernel: Size, *, stride: int = 1, padding: Size = 0
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = layers.batch_norm(outputs)

    def forward(self, hidden: Tensor) -> Tensor:
        """Shape (batch, inputs, height, width) to (batch, outputs, ...)."""
        return F.relu(self.bn(self.conv(hidden)), inplace=True)


class InceptionA(nn.Module):
    """1x1, 5x5, two 3x3, and the mean: at 35x35."""

    def __init__(self, layers: Layers, inputs: int, pooled: int) -> None:
        super().__init__()
        conv, depth, self._pool = layers.convolution, layers.depth, layers.average_pool
        self.outputs = 2 * depth(64) + depth(96) + depth(pooled)
        self.branch1x1 = conv(inputs, depth(64), 1)
        self.branch5x5_1 = conv(inputs, depth(48), 1)
        self.branch5x5_2 = conv(depth(48), depth(64), 5)
        self.branch3x3dbl_1 = conv(inputs, depth(64), 1)
        self.branch3x3dbl_2 = conv(depth(64), depth(96), 3)
        self.branch3x3dbl_3 = conv(depth(96), depth(96), 3)
        self.branch_pool = conv(inputs, depth(pooled), 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Keeps height and width."""
        branches = [
            self.branch1x1(hidden),
            self.branch5x5_2(self.branch5x5_1(hidden)),
            self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(hidden))),
            self.branch_pool(self._pool(hidden)),
        ]
        return torch.cat(branches, 1)


class InceptionB(nn.Module):
    """3x3, two 3x3, and the maximum, each of stride 2: from 35x35 to 17x17."""

    def __init__(self, layers: Layers, inputs: int) -> None:
        super().__init__()
        conv, depth = layers.convolution, layers.depth
        self.outputs = depth(384) + depth(96) + inputs
        self.branch3x3 = layers.reduction(inputs, depth(384), 3)
        self.branch3x3dbl_1 = conv(inputs, depth(64), 1)
        self.branch3x3dbl_2 = conv(depth(64), depth(96), 3)
        self.branch3x3dbl_3 = layers.reduction(depth(96), depth(96), 3)

    def forward(self, hidden: Tensor) -> Tensor:
        """Halves height and width."""
        branches = [
            self.branch3x3(hidden),
            self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(hidden))),
            F.max_pool2d(hidden, 3, stride=2),
        ]
        return torch.cat(branches, 1)


class InceptionC(nn.Module):
    """1x1, 7x7 in two parts, twice 7x7 in four, and the mean: at 17x17."""

    def __init__(self, layers: Layers, inputs: int, width: int) -> None:
        super().__init__()
        conv, depth, self._pool = layers.convolution, layers.depth, layers.average_pool
        inner, outer = depth(width), depth(192)
        self.outputs = 4 * outer
        self.branch1x1 = conv(inputs, outer, 1)
        self.branch7x7_1 = conv(inputs, inner, 1)
        self.branch7x7_2 = conv(inner, inner, (1, 7))
        self.branch7x7_3 = conv(inner, outer, (7, 1))
        self.branch7x7dbl_1 = conv(inputs, inner, 1)
        self.branch7x7dbl_2 = conv(inner, inner, (7, 1))
        self.branch7x7dbl_3 = conv(inner, inner, (1, 7))
        self.branch7x7dbl_4 = conv(inner, inner, (7, 1))
        self.branch7x7dbl_5 = conv(inner, outer, (1, 7))
        self.branch_pool = conv(inputs, outer, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Keeps height and width."""
        twice = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(hidden)))
        branches = [
            self.branch1x1(hidden),
            self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(hidden))),
            self.branch7x7dbl_5(self.branch7x7dbl_4(twice)),
            self.branch_pool(self._pool(hidden)),
        ]
        return torch.cat(branches, 1)


class InceptionD(nn.Module):
    """3x3, 7x7 in two parts with 3x3, and the maximum, each of stride 2: from 17x17 to 8x8."""

    def __init__(self, layers: Layers, inputs: int) -> None:
        super().__init__()
        conv, depth = layers.convolution, layers.depth
        width = depth(192)
        self.outputs = depth(320) + width + inputs
        self.branch3x3_1 = conv(inputs, width, 1)
        self.branch3x3_2 = layers.reduction(width, depth(320), 3)
        self.branch7x7x3_1 = conv(inputs, width, 1)
        self.branch7x7x3_2 = conv(width, width, (1, 7))
        self.branch7x7x3_3 = conv(width, width, (7, 1))
        self.branch7x7x3_4 = layers.reduction(width, width, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        """Halves height and width."""
        branches = [
            self.branch3x3_2(self.branch3x3_1(hidden)),
            self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(hidden)))),
            F.max_pool2d(hidden, 3, stride=2),
        ]
        return torch.cat(branches, 1)


class InceptionE(nn.Module):
    """1x1, 3x3 whose halves stand side by side, the same after another 3x3, and the mean: at 8x8."""

    def __init__(self, layers: Layers, inputs: int) -> None:
        super().__init__()
        conv, depth, self._pool = layers.convolution, layers.depth, layers.average_pool
        width = depth(384)
        self.outputs = depth(320) + 4 * width + depth(192)
        self.branch1x1 = conv(inputs, depth(320), 1)
        self.branch3x3_1 = conv(inputs, width, 1)
        self.branch3x3_2a = conv(width, width, (1, 3))
        self.branch3x3_2b = conv(width, width, (3, 1))
        self.branch3x3dbl_1 = conv(inputs, depth(448), 1)
        self.branch3x3dbl_2 = conv(depth(448), width, 3)
        self.branch3x3dbl_3a = conv(width, width, (1, 3))
        self.branch3x3dbl_3b = conv(width, width, (3, 1))
        self.branch_pool = conv(inputs, depth(192), 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Keeps height and width."""
        single, double = self.branch3x3_1(hidden), self.branch3x3dbl_2(self.branch3x3dbl_1(hidden))
        branches = [
            self.branch1x1(hidden),
            self.branch3x3_2a(single),
            self.branch3x3_2b(single),
            self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double),
            self.branch_pool(self._pool(hidden)),
        ]
        return torch.cat(branches, 1)
