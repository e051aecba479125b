"""ResNet-50, -101 and -152 without their classifier, with the parameters named as in torchvision.

He et al., "Deep Residual Learning for Image Recognition" (2015). In torchvision's nets the first block of a layer has
its stride, in its 3x3 convolution; in Keras's the first block has it in its first 1x1 convolution, as in the original
nets of Caffe; in TF-Slim's, and in Keras's nets of version 2, the last block of the layer before has it.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.models.initial_weights import give_memory, without_memory
from lockstep.models.layers import RELU, ActivationLayer, MaxPool2dSame, NormLayer, conv2d, kaiming_fan_out

_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_STRIDES = {
    "torchvision": (1, 2, 2, 2),
    "slim": (2, 2, 2, 1),
    "keras": (1, 2, 2, 2),
    "keras_applications": (1, 2, 2, 2),
}
_STEM_CHANNELS, _STEM_STRIDE = 64, 4


class ResNet(nn.Sequential):
    """The layers from images to 2048 channels: "conv1", "bn1", "relu", "maxpool", "layer1" to "layer4".

    The four have 256, 512, 1024 and 2048 channels, at strides 4, 8, 16 and 32; TF-Slim's have theirs at 8, 16, 32 and
    32, or 8, 16, 16 and 16 with an output stride of 16. Where a stride would go beyond that of the output, there is
    none, and the convolutions after it are dilated (atrous).

    Weights of TF-Slim's ResNet v1 give its numbers with the style "slim"; its norms have a decay of 0.997 (momentum
    0.003) and epsilon 1e-5. With the style "keras" they give the same numbers, but for strides that are dilated, and
    the outputs of its layers before they are strided. "keras_applications" is that of Keras's own ResNet-50 and -101,
    whose pool pads both sides; their biases before norms are left out, as they change nothing that is trained.

    Args:
        depth: layers with weights, of the classifier's too.
        output_stride: the largest stride.
        style: whose strides and pool, as said above.
        activation_layer: follows convolutions inside of a block, and the first one.
        sum_activation: follows the sum at the end of a block.
        generator: draws the initial weights; torch's default one where none is given.
    """

    def __init__(
        self,
        depth: Literal[50, 101, 152] = 50,
        *,
        output_stride: Literal[8, 16, 32] = 32,
        style: Literal["torchvision", "slim", "keras", "keras_applications"] = "torchvision",
        norm_layer: NormLayer = nn.BatchNorm2d,
        activation_layer: ActivationLayer | None = RELU,
        sum_activation: ActivationLayer | None = RELU,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        with without_memory():
            self.conv1 = conv2d(3, _STEM_CHANNELS, 7, 2, bias=False)
            self.bn1 = norm_layer(_STEM_CHANNELS)
            self.relu = nn.Identity() if activation_layer is None else activation_layer()
            self.maxpool = MaxPool2dSame(3, 2) if style in ("slim", "keras") else nn.MaxPool2d(3, stride=2, padding=1)
            inputs, reached, dilation = _STEM_CHANNELS, _STEM_STRIDE, 1
            for index, (count, layer_stride) in enumerate(zip(_BLOCKS[depth], _STRIDES[style], strict=True)):
                layer, channels = nn.Sequential(), _STEM_CHANNELS << index
                strided = count - 1 if style == "slim" else 0
                for block in range(count):
                    wanted = layer_stride if block == strided else 1
                    stride = wanted if reached < output_stride else 1
                    layer.append(
                        Bottleneck(
                            inputs,
                            channels,
                            stride,
                            dilation,
                            norm_layer,
                            activation_layer=activation_layer,
                            sum_activation=sum_activation,
                            stride_in_1x1=style.startswith("keras"),
                        )
                    )
                    inputs, reached = Bottleneck.expansion * channels, reached * stride
                    dilation = dilation * wanted // stride
                self.add_module(f"layer{index + 1}", layer)
        give_memory(self)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the initial weights anew, and forget the moving statistics."""
        kaiming_fan_out(self, generator)


class Bottleneck(nn.Module):
    """A residual block: 1x1 to fewer channels, 3x3, 1x1 to four times as many, and what came in is added.

    What came in has a convolution of its own where its channels change; TF-Slim's blocks with a stride of their own
    take each second value of it. With `stride_in_1x1` the first convolution has the stride, and not the second.
    """

    expansion = 4

    def __init__(
        self,
        inputs: int,
        channels: int,
        stride: int,
        dilation: int,
        norm_layer: NormLayer,
        *,
        activation_layer: ActivationLayer | None = RELU,
        sum_activation: ActivationLayer | None = RELU,
        stride_in_1x1: bool = False,
    ) -> None:
        super().__init__()
        outputs = self.expansion * channels
        first, second = (stride, 1) if stride_in_1x1 else (1, stride)
        self.conv1 = conv2d(inputs, channels, 1, first, bias=False)
        self.bn1 = norm_layer(channels)
        self.conv2 = conv2d(channels, channels, 3, second, dilation=dilation, bias=False)
        self.bn2 = norm_layer(channels)
        self.conv3 = conv2d(channels, outputs, 1, bias=False)
        self.bn3 = norm_layer(outputs)
        self.activation = nn.Identity() if activation_layer is None else activation_layer()
        self.relu = nn.Identity() if sum_activation is None else sum_activation()
        self.downsample: nn.Module | None = None
        if inputs != outputs:
            self.downsample = nn.Sequential(conv2d(inputs, outputs, 1, stride, bias=False), norm_layer(outputs))
        elif stride > 1:
            self.downsample = nn.MaxPool2d(1, stride)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape (batch, inputs, height, width) to (batch, 4 * channels, height / stride, width / stride)."""
        shortcut = hidden if self.downsample is None else self.downsample(hidden)
        hidden = self.activation(self.bn1(self.conv1(hidden)))
        hidden = self.activation(self.bn2(self.conv2(hidden)))
        hidden = self.bn3(self.conv3(hidden))
        hidden += shortcut
        summed: Tensor = self.relu(hidden)
        return summed


class ResNetV2(nn.Sequential):
    """ResNet-50 or -101 of version 2 as Keras has it: norms and ReLUs stand before convolutions (He et al., 2016).

    The layers are "conv1", "maxpool", "layer1" to "layer4", with the channels of a `ResNet`; they have the strides 8,
    16, 32 and 32, and neither norm nor activation at their end.
    """

    def __init__(self, depth: Literal[50, 101] = 50, *, norm_layer: NormLayer = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = conv2d(3, _STEM_CHANNELS, 7, 2)
        self.maxpool = nn.Sequential(nn.ZeroPad2d(1), nn.MaxPool2d(3, stride=2))
        inputs = _STEM_CHANNELS
        for index, (count, stride) in enumerate(zip(_BLOCKS[depth], _STRIDES["slim"], strict=True)):
            layer, channels = nn.Sequential(), _STEM_CHANNELS << index
            for block in range(count):
                layer.append(BottleneckV2(inputs, channels, stride if block == count - 1 else 1, norm_layer))
                inputs = Bottleneck.expansion * channels
            self.add_module(f"layer{index + 1}", layer)


class BottleneckV2(nn.Module):
    """A residual block whose input has a norm and a ReLU; what came in is added as it was, or by a 1x1 convolution."""

    def __init__(self, inputs: int, channels: int, stride: int, norm_layer: NormLayer) -> None:
        super().__init__()
        outputs = Bottleneck.expansion * channels
        self.norm = norm_layer(inputs)
        self.conv1 = conv2d(inputs, channels, 1, bias=False)
        self.bn1 = norm_layer(channels)
        self.conv2 = conv2d(channels, channels, 3, stride, bias=False)
        self.bn2 = norm_layer(channels)
        self.conv3 = conv2d(channels, outputs, 1)
        self.downsample = conv2d(inputs, outputs, 1, stride) if inputs != outputs else None
        self.shortcut = nn.MaxPool2d(1, stride) if stride > 1 else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape (batch, inputs, height, width) to (batch, 4 * channels, height / stride, width / stride)."""
        active = F.relu(self.norm(hidden))
        shortcut = self.shortcut(hidden) if self.downsample is None else self.downsample(active)
        hidden = F.relu(self.bn1(self.conv1(active)))
        hidden = F.relu(self.bn2(self.conv2(hidden)))
        summed: Tensor = self.conv3(hidden) + shortcut
        return summed
