"""Inception-ResNet-v2 without its classifier, as detectors of TensorFlow have it, with timm's names of parameters.

Szegedy et al., "Inception-v4, Inception-ResNet and the Impact of Residual Connections on Learning" (2016). The layers
up to "repeat_1" keep their maps aligned with the image: they pad as TensorFlow's SAME does, where those of a classifier
leave borders out. The layers after it are for regions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from lockstep.models.initial_weights import give_memory, without_memory
from lockstep.models.layers import RELU, Branches, MaxPool2dSame, NormLayer, conv2d

_MakeLayer = Callable[..., nn.Module]


def inception_resnet_v2_features(
    *,
    output_stride: Literal[8, 16] = 16,
    norm_layer: NormLayer = nn.BatchNorm2d,
    style: Literal["slim", "keras"] = "slim",
) -> nn.Sequential:
    """Make the layers from images to 1536 channels: "conv2d_1a" to "conv2d_7b"; first weights are still to be drawn.

    "repeat_1" has 1088 channels at the output stride; where that is 8, its convolutions are dilated (atrous).
    "mixed_7a" has a stride of 2, and leaves the borders out; in Keras's style it pads as the layers before it.
    """
    conv, stride = partial(_conv, norm_layer=norm_layer), output_stride // 8
    with without_memory():
        layers = OrderedDict[str, nn.Module](
            conv2d_1a=conv(3, 32, 3, 2),
            conv2d_2a=conv(32, 32, 3),
            conv2d_2b=conv(32, 64, 3),
            maxpool_3a=MaxPool2dSame(3, 2),
            conv2d_3b=conv(64, 80, 1),
            conv2d_4a=conv(80, 192, 3),
            maxpool_5a=MaxPool2dSame(3, 2),
            mixed_5b=_mixed_5b(conv),
            repeat=nn.Sequential(*(_block35(conv) for _ in range(10))),
            mixed_6a=_joined(
                conv(320, 384, 3, stride),
                nn.Sequential(conv(320, 256, 1), conv(256, 256, 3), conv(256, 384, 3, stride)),
                MaxPool2dSame(3, stride),
            ),
            repeat_1=nn.Sequential(*(_block17(partial(conv, dilation=2 // stride)) for _ in range(20))),
            mixed_7a=_mixed_7a(conv, pads=style == "keras"),
            repeat_2=nn.Sequential(*(_block8(conv) for _ in range(9))),
            block8=_block8(conv, is_last=True),
            conv2d_7b=conv(2080, 1536, 1),
        )
        net = nn.Sequential(layers)
    return give_memory(net)


class ResidualBranches(nn.Module):
    """Branches whose outputs, joined by a convolution of 1x1, are scaled and added to what came in."""

    def __init__(self, inputs: int, joined: int, scale: float, *branches: nn.Module, is_active: bool = True) -> None:
        super().__init__()
        for number, branch in enumerate(branches):
            self.add_module(f"branch{number}", branch)
        self._branches = [f"branch{number}" for number in range(len(branches))]
        self.conv2d = nn.Conv2d(joined, inputs, 1)
        self.scale, self.is_active = scale, is_active

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape (batch, inputs, height, width) to the same."""
        joined = torch.cat([self.get_submodule(name)(hidden) for name in self._branches], 1)
        summed: Tensor = hidden + self.scale * self.conv2d(joined)
        return summed.relu() if self.is_active else summed


def _conv(
    inputs: int,
    outputs: int,
    kernel_size: int | tuple[int, int],
    stride: int = 1,
    *,
    norm_layer: NormLayer,
    dilation: int = 1,
    pads: bool = True,
) -> nn.Module:
    if pads:
        made = conv2d(inputs, outputs, kernel_size, stride, dilation=dilation, bias=False, padding="same")
    else:
        made = nn.Conv2d(inputs, outputs, kernel_size, stride, bias=False)
    return nn.Sequential(OrderedDict(conv=made, bn=norm_layer(outputs), act=RELU()))


def _joined(*branches: nn.Module) -> Branches:
    return Branches({f"branch{number}": branch for number, branch in enumerate(branches)})


def _mixed_5b(conv: _MakeLayer) -> Branches:
    return _joined(
        conv(192, 96, 1),
        nn.Sequential(conv(192, 48, 1), conv(48, 64, 5)),
        nn.Sequential(conv(192, 64, 1), conv(64, 96, 3), conv(96, 96, 3)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), conv(192, 64, 1)),
    )


def _mixed_7a(conv: _MakeLayer, *, pads: bool) -> Branches:
    return _joined(
        nn.Sequential(conv(1088, 256, 1), conv(256, 384, 3, 2, pads=pads)),
        nn.Sequential(conv(1088, 256, 1), conv(256, 288, 3, 2, pads=pads)),
        nn.Sequential(conv(1088, 256, 1), conv(256, 288, 3), conv(288, 320, 3, 2, pads=pads)),
        MaxPool2dSame(3, 2) if pads else nn.MaxPool2d(3, 2),
    )


def _block35(conv: _MakeLayer) -> ResidualBranches:
    third = nn.Sequential(conv(320, 32, 1), conv(32, 48, 3), conv(48, 64, 3))
    return ResidualBranches(320, 128, 0.17, conv(320, 32, 1), nn.Sequential(conv(320, 32, 1), conv(32, 32, 3)), third)


def _block17(conv: _MakeLayer) -> ResidualBranches:
    second = nn.Sequential(conv(1088, 128, 1), conv(128, 160, (1, 7)), conv(160, 192, (7, 1)))
    return ResidualBranches(1088, 384, 0.10, conv(1088, 192, 1), second)


def _block8(conv: _MakeLayer, *, is_last: bool = False) -> ResidualBranches:
    second = nn.Sequential(conv(2080, 192, 1), conv(192, 224, (1, 3)), conv(224, 256, (3, 1)))
    scale = 1.0 if is_last else 0.20
    return ResidualBranches(2080, 448, scale, conv(2080, 192, 1), second, is_active=not is_last)
