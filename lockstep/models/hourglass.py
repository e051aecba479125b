"""The stacked hourglass of CenterNet (Newell et al., 2016; Law and Deng: CornerNet, 2018), without its predictions.

The layers are those of the Object Detection API's hourglass_104; its batch norm keeps a tenth of the statistics.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.layers import Conv2dNormActivation, conv2d

_STEM_CHANNELS = 128
_CHANNELS, _BLOCKS = (256, 256, 384, 384, 384, 512), (2, 2, 2, 2, 2, 4)
"""Channels of, and residual blocks at, each size of an hourglass, each half of the one before."""
_NORM = partial(nn.BatchNorm2d, eps=1e-5, momentum=0.9)
_CONVOLUTION = partial(Conv2dNormActivation, norm_layer=_NORM)


class StackedHourglass(nn.Module):
    """Maps images (batch, 3, height, width) to maps of 256 channels at stride 4, one of each of two hourglasses.

    Height and width are multiples of 128. The weights are not initialised.
    """

    out_channels = _CHANNELS[0]
    num_hourglasses = 2

    def __init__(self) -> None:
        super().__init__()
        channels, between = self.out_channels, range(self.num_hourglasses - 1)
        self.stem = nn.Sequential(_CONVOLUTION(3, _STEM_CHANNELS, 7, 2), ResidualPair(_STEM_CHANNELS, channels, 2))
        self.hourglasses = nn.ModuleList(Hourglass(_CHANNELS, _BLOCKS) for _ in range(self.num_hourglasses))
        self.outputs = nn.ModuleList(_CONVOLUTION(channels, channels) for _ in range(self.num_hourglasses))
        made = partial(_CONVOLUTION, channels, channels, 1, activation_layer=None)
        self.of_input = nn.ModuleList(made() for _ in between)
        self.of_output = nn.ModuleList(made() for _ in between)
        self.merged = nn.ModuleList(ResidualPair(channels, channels) for _ in between)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return the maps of the hourglasses, the last one's last."""
        hidden = self.stem(images)
        found = [self.outputs[0](self.hourglasses[0](hidden))]
        rest = zip(self.of_input, self.of_output, self.merged, self.hourglasses[1:], self.outputs[1:], strict=True)
        for of_input, of_output, merged, hourglass, output in rest:
            hidden = merged(F.relu(of_input(hidden) + of_output(found[-1])))
            found.append(output(hourglass(hidden)))
        return found


class Hourglass(nn.Module):
    """Halves a map again and again, doubles it as often, and adds what each size was before."""

    def __init__(self, channels: Sequence[int], blocks: Sequence[int]) -> None:
        super().__init__()
        (outer, inner), number = channels[:2], blocks[0]
        self.skip = nn.Sequential(*(ResidualPair(outer, outer) for _ in range(number)))
        self.down = nn.Sequential(
            ResidualPair(outer, inner, 2), *(ResidualPair(inner, inner) for _ in range(number - 1))
        )
        self.inside: nn.Module
        if len(channels) > 2:
            self.inside = Hourglass(channels[1:], blocks[1:])
        else:
            self.inside = nn.Sequential(*(ResidualPair(inner, inner) for _ in range(blocks[1])))
        self.up = nn.Sequential(*(ResidualPair(inner, inner) for _ in range(number - 1)), ResidualPair(inner, outer))

    def forward(self, hidden: Tensor) -> Tensor:
        """Keep the shape, (batch, channels, height, width)."""
        doubled = F.interpolate(self.up(self.inside(self.down(hidden))), scale_factor=2.0)
        skipped: Tensor = self.skip(hidden)
        return skipped + doubled


class ResidualPair(nn.Module):
    """Two convolutions of 3x3, to which what came in is added: by a 1x1 convolution where its shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _CONVOLUTION(inputs, outputs, 3, stride)
        self.conv2 = nn.Sequential(OrderedDict(conv=conv2d(outputs, outputs, 3, bias=False), norm=_NORM(outputs)))
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = _CONVOLUTION(inputs, outputs, 1, stride, activation_layer=None)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape (batch, inputs, height, width) to (batch, outputs, height / stride, width / stride)."""
        return F.relu(self.conv2(self.conv1(hidden)) + self.shortcut(hidden))
