"""A feature pyramid, with the parameters named as in torchvision (Lin et al.: Feature Pyramid Networks, 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.models.initial_weights import give_memory, without_memory
from lockstep.models.layers import Conv2dNormActivation


class LastLevelMaxPool(nn.Module):
    """Adds one level, "pool": each second value of the last one."""

    def forward(self, pyramid: dict[str, Tensor], maps: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the pyramid with its new level; the maps that it was made of are not used."""
        return {**pyramid, "pool": F.max_pool2d([*pyramid.values()][-1], 1, stride=2)}


class LastLevelP6P7(nn.Module):
    """Adds two levels, "p6" and "p7", by convolutions of stride 2, whose weights the pyramid draws.

    Args:
        in_channels: of what "p6" is made of: the last level where it is the number of its channels, otherwise the last
            map that the pyramid is made of.
        out_channels: of both.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        with without_memory():
            self.p6 = nn.Conv2d(in_channels, out_channels, 3, 2, 1)
            self.p7 = nn.Conv2d(out_channels, out_channels, 3, 2, 1)
        self._of_pyramid = in_channels == out_channels

    def forward(self, pyramid: dict[str, Tensor], maps: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the pyramid with its new levels."""
        p6 = self.p6([*(pyramid if self._of_pyramid else maps).values()][-1])
        return {**pyramid, "p6": p6, "p7": self.p7(F.relu(p6))}


class FeaturePyramidNetwork(nn.Module):
    """Makes of feature maps as many with one number of channels: each sees also what the coarser ones saw.

    The channels that come in are of each map, from the finest to the coarsest.
    """

    def __init__(
        self,
        in_channels_list: Sequence[int],
        out_channels: int,
        extra_blocks: LastLevelMaxPool | LastLevelP6P7 | None = None,
        *,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        made = partial(Conv2dNormActivation, norm_layer=None, activation_layer=None)
        with without_memory():
            self.inner_blocks = nn.ModuleList(made(channels, out_channels, 1) for channels in in_channels_list)
            self.layer_blocks = nn.ModuleList(made(out_channels, out_channels, 3) for _ in in_channels_list)
        self.extra_blocks = extra_blocks
        give_memory(self)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the initial weights anew: He's uniform ones for no activation, as torchvision does; biases are 0."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_uniform_(module.weight, a=1, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, maps: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map feature maps of shape (batch, channels, height, width) to levels under the same names, finest first."""
        names = [*maps]
        laterals = [block(maps[name]) for block, name in zip(self.inner_blocks, names, strict=True)]
        for finer in reversed(range(len(names) - 1)):
            size = laterals[finer].shape[2:]
            laterals[finer] = laterals[finer] + F.interpolate(laterals[finer + 1], size=size, mode="nearest")
        pyramid: dict[str, Tensor] = {
            name: block(lateral) for name, block, lateral in zip(names, self.layer_blocks, laterals, strict=True)
        }
        return pyramid if self.extra_blocks is None else self.extra_blocks(pyramid, maps)
