"""Inception-v3 as the reference trains it on ImageNet: blocks of convolutions, joined along the channels.

Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (2015). The details are those of
tensorflow/models, package inception.slim, and of the TF-Slim nets; the names of blocks and parameters are
torchvision's, so that its files fit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.models.initial_weights import (
    check_images,
    clear_statistics,
    give_memory,
    scaled_normal,
    truncated_normal,
    without_memory,
)
from lockstep.models.layers import BatchNorm2d
from lockstep.models.values import InceptionV3

_Size = int | tuple[int, int]

# Standard deviations before the cut.
_CONVOLUTION_STDDEV = 0.1
_AUXILIARY_STDDEVS = {"AuxLogits.conv1.conv": 0.01, "AuxLogits.fc": 0.001}
_FINAL_STDDEV = 0.01


class InceptionLogits(NamedTuple):
    """The output in training of a net with an auxiliary head: scores before the softmax."""

    logits: Tensor
    """Shape (batch, classes)."""
    auxiliary_logits: Tensor
    """Shape (batch, classes), of the auxiliary head."""


class InceptionV3Net(nn.Module):
    """The net; in training it returns `InceptionLogits`, in evaluation, or without auxiliary head, the logits alone.

    Any size of images from 75 pixels on will do: the last map, 8x8 for 299 pixels, is averaged whatever its size.
    `layers` makes the layers; where none are given, as the settings say.
    """

    def __init__(
        self, settings: InceptionV3 | None = None, *, generator: Generator | None = None, layers: Layers | None = None
    ) -> None:
        super().__init__()
        self.settings = settings or InceptionV3()
        with without_memory():
            self._add_layers(self.settings, layers or Layers(self.settings))
        give_memory(self)
        self.reset_parameters(generator)

    def _add_layers(self, settings: InceptionV3, layers: Layers) -> None:
        depth = layers.depth
        self.Conv2d_1a_3x3 = layers.reduction(3, depth(32), 3)
        self.Conv2d_2a_3x3 = layers.reduction(depth(32), depth(32), 3, stride=1)
        self.Conv2d_2b_3x3 = layers.convolution(depth(32), depth(64), 3)
        self.maxpool1 = nn.MaxPool2d(3, stride=2)
        self.Conv2d_3b_1x1 = layers.convolution(depth(64), depth(80), 1)
        self.Conv2d_4a_3x3 = layers.reduction(depth(80), depth(192), 3, stride=1)
        self.maxpool2 = nn.MaxPool2d(3, stride=2)
        self.Mixed_5b = InceptionA(layers, depth(192), pooled=32)
        self.Mixed_5c = InceptionA(layers, self.Mixed_5b.outputs, pooled=64)
        self.Mixed_5d = InceptionA(layers, self.Mixed_5c.outputs, pooled=64)
        self.Mixed_6a = InceptionB(layers, self.Mixed_5d.outputs)
        self.Mixed_6b = InceptionC(layers, self.Mixed_6a.outputs, width=128)
        self.Mixed_6c = InceptionC(layers, self.Mixed_6b.outputs, width=160)
        self.Mixed_6d = InceptionC(layers, self.Mixed_6c.outputs, width=160)
        self.Mixed_6e = InceptionC(layers, self.Mixed_6d.outputs, width=192)
        self.AuxLogits = (
            AuxiliaryHead(layers, self.Mixed_6e.outputs, settings.num_classes) if settings.auxiliary else None
        )
        self.Mixed_7a = InceptionD(layers, self.Mixed_6e.outputs)
        self.Mixed_7b = InceptionE(layers, self.Mixed_7a.outputs)
        self.Mixed_7c = InceptionE(layers, self.Mixed_7b.outputs)
        self.dropout = nn.Dropout(settings.dropout)
        self.fc = nn.Linear(self.Mixed_7c.outputs, settings.num_classes)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the initial weights anew, and forget the moving statistics."""
        clear_statistics(self)
        for name, module in self.named_modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                self._initialise(name, module, generator)

    def _initialise(self, name: str, module: nn.Conv2d | nn.Linear, generator: Generator | None) -> None:
        if module.bias is not None:
            nn.init.zeros_(module.bias)
        if name in _AUXILIARY_STDDEVS:
            truncated_normal(module.weight, _AUXILIARY_STDDEVS[name], generator)
        elif self.settings.initial_weights == "variance_scaling":
            scaled_normal(module.weight, generator)
        else:
            truncated_normal(module.weight, _FINAL_STDDEV if name == "fc" else _CONVOLUTION_STDDEV, generator)

    def forward(self, images: Tensor) -> Tensor | InceptionLogits:
        """Compute scores before the softmax of images of shape (batch, 3, height, width), values from -1 to 1."""
        check_images("Inception-v3", images, channels=3, smallest=InceptionV3.smallest_image)
        hidden = self._stem(images)
        hidden = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(hidden)))
        hidden = self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(hidden)))
        hidden = self.Mixed_6e(self.Mixed_6d(hidden))
        auxiliary = self.AuxLogits(hidden) if self.AuxLogits is not None and self.training else None
        hidden = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(hidden)))
        logits: Tensor = self.fc(self.dropout(hidden.mean((2, 3))))
        return logits if auxiliary is None else InceptionLogits(logits, auxiliary)

    def _stem(self, images: Tensor) -> Tensor:
        """Map 299x299 to 192 channels of 35x35."""
        hidden = self.maxpool1(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(images))))
        stem: Tensor = self.maxpool2(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(hidden)))
        return stem


class AuxiliaryHead(nn.Module):
    """Scores a map of 768 channels and 17x17, to train the layers before it.

    The pooling leaves 5x5 of 17x17, which is the size of the second convolution. What it leaves of smaller maps gets
    zeros around it, up to 5x5; TF-Slim cuts the kernel instead, to the same effect. Where images are so large that the
    convolution fits in several places, their mean is scored.
    """

    KERNEL = 5

    def __init__(self, layers: Layers, inputs: int, num_classes: int) -> None:
        super().__init__()
        reduced, outputs = layers.depth(128), layers.depth(768)
        self.conv0 = layers.convolution(inputs, reduced, 1)
        self.conv1 = layers.reduction(reduced, outputs, self.KERNEL, stride=1)
        self.fc = nn.Linear(outputs, num_classes)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape (batch, inputs, height, width) to (batch, classes)."""
        height, width = hidden.shape[2:]
        pooled = F.avg_pool2d(hidden, (min(height, self.KERNEL), min(width, self.KERNEL)), stride=3)
        scores: Tensor = self.fc(self.conv1(self._filled_up(self.conv0(pooled))).mean((2, 3)))
        return scores

    def _filled_up(self, hidden: Tensor) -> Tensor:
        """Put zeros around a map that is smaller than the kernel."""
        rows, columns = (max(0, self.KERNEL - side) for side in hidden.shape[2:])
        if rows == columns == 0:
            return hidden
        return F.pad(hidden, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))


class InceptionA(nn.Module):
    """Joins 1x1, 5x5, two 3x3, and the mean: at 35x35."""

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
        """Keep height and width."""
        branches = [
            self.branch1x1(hidden),
            self.branch5x5_2(self.branch5x5_1(hidden)),
            self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(hidden))),
            self.branch_pool(self._pool(hidden)),
        ]
        return torch.cat(branches, 1)


class InceptionB(nn.Module):
    """Joins 3x3, two 3x3, and the maximum, each of stride 2: from 35x35 to 17x17."""

    def __init__(self, layers: Layers, inputs: int) -> None:
        super().__init__()
        conv, depth = layers.convolution, layers.depth
        self.outputs = depth(384) + depth(96) + inputs
        self.branch3x3 = layers.reduction(inputs, depth(384), 3)
        self.branch3x3dbl_1 = conv(inputs, depth(64), 1)
        self.branch3x3dbl_2 = conv(depth(64), depth(96), 3)
        self.branch3x3dbl_3 = layers.reduction(depth(96), depth(96), 3)

    def forward(self, hidden: Tensor) -> Tensor:
        """Halve height and width."""
        branches = [
            self.branch3x3(hidden),
            self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(hidden))),
            F.max_pool2d(hidden, 3, stride=2),
        ]
        return torch.cat(branches, 1)


class InceptionC(nn.Module):
    """Joins 1x1, 7x7 in two parts, twice 7x7 in four, and the mean: at 17x17."""

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
        """Keep height and width."""
        twice = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(hidden)))
        branches = [
            self.branch1x1(hidden),
            self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(hidden))),
            self.branch7x7dbl_5(self.branch7x7dbl_4(twice)),
            self.branch_pool(self._pool(hidden)),
        ]
        return torch.cat(branches, 1)


class InceptionD(nn.Module):
    """Joins 3x3, 7x7 in two parts with 3x3, and the maximum, each of stride 2: from 17x17 to 8x8."""

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
        """Halve height and width."""
        branches = [
            self.branch3x3_2(self.branch3x3_1(hidden)),
            self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(hidden)))),
            F.max_pool2d(hidden, 3, stride=2),
        ]
        return torch.cat(branches, 1)


class InceptionE(nn.Module):
    """Joins 1x1, 3x3 whose halves stand side by side, the same after another 3x3, and the mean: at 8x8."""

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
        """Keep height and width."""
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


class ConvolutionBatchNorm(nn.Module):
    """A convolution without bias, batch norm, an activation."""

    def __init__(
        self, layers: Layers, inputs: int, outputs: int, kernel: _Size, *, stride: int = 1, padding: _Size = 0
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = layers.batch_norm(outputs)
        self._activate = layers.activate

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape (batch, inputs, height, width) to (batch, outputs, ...)."""
        return self._activate(self.bn(self.conv(hidden)))


class Layers:
    """Makes the layers of a net by its settings."""

    activate: Callable[[Tensor], Tensor] = staticmethod(partial(F.relu, inplace=True))

    def __init__(self, settings: InceptionV3) -> None:
        self._settings = settings

    def depth(self, channels: int) -> int:
        """Scale a number of channels, by TF-Slim's rule."""
        return max(int(channels * self._settings.depth_multiplier), self._settings.min_depth)

    def convolution(self, inputs: int, outputs: int, kernel: _Size) -> ConvolutionBatchNorm:
        """Make a convolution that keeps height and width; its channels are not scaled here."""
        height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        return ConvolutionBatchNorm(self, inputs, outputs, kernel, padding=(height // 2, width // 2))

    def reduction(self, inputs: int, outputs: int, kernel: _Size, *, stride: int = 2) -> ConvolutionBatchNorm:
        """Make a convolution without padding."""
        return ConvolutionBatchNorm(self, inputs, outputs, kernel, stride=stride)

    def batch_norm(self, channels: int) -> nn.Module:
        """Make batch norm with a shift, and a scale only where the settings ask for it."""
        epsilon, decay = self._settings.batch_norm_epsilon, self._settings.batch_norm_decay
        layer = BatchNorm2d(channels, epsilon, momentum=1 - decay, affine=self._settings.batch_norm_scale)
        if not self._settings.batch_norm_scale:
            # No scale at all, rather than one of ones: torch gives the same bits in the same time, and there is
            # nothing that could be trained, averaged, saved or sent.
            layer.bias = nn.Parameter(torch.empty(channels))
        return layer

    def average_pool(self, hidden: Tensor) -> Tensor:
        """Average 3x3 values; at the border those that are there, or 9 with zeros, as torchvision has it."""
        counted = self._settings.average_over_padding
        return F.avg_pool2d(hidden, 3, stride=1, padding=1, count_include_pad=counted)
