"""Inception-v3 as the reference trains it on ImageNet, with the parameters named as in torchvision.

Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (2015). The details are those of
tensorflow/models, package inception.slim, and of the TF-Slim nets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.checks import Checked, Decay, Fraction, Hint, PositiveFloat, PositiveInt
from lockstep.models.image_checks import check_images
from lockstep.models.inception_blocks import InceptionA, InceptionB, InceptionC, InceptionD, InceptionE, Layers
from lockstep.models.initial_weights import clear_statistics, scaled_normal, truncated_normal, without_memory

Initialization = Literal["truncated_normal", "variance_scaling"]

# Standard deviations before the cut, of the layers that do not have that of the convolutions.
_CONVOLUTION_STDDEV = 0.1
_AUXILIARY_STDDEVS = {"AuxLogits.conv1.conv": 0.01, "AuxLogits.fc": 0.001}
_FINAL_STDDEV = 0.01


@dataclass(frozen=True)
class InceptionV3(Checked):
    """Inception-v3 as a value of a recipe.

    The defaults are the reference trainer's. For the weights that torchvision offers, which expect values from -1 to 1
    too, set `num_classes=1000, batch_norm_scale=True, average_over_padding=True`.
    """

    image_size: ClassVar[int] = 299
    smallest_image: ClassVar[int] = 75

    num_classes: PositiveInt = 1001
    """With the background, which has label 0 in the ImageNet records."""
    auxiliary: bool = True
    """A second head on the last map of 17x17: it is trained and saved, and used in training alone."""
    dropout: Fraction = 0.2
    """The share of the values before the last layer that are left out."""
    batch_norm_decay: Annotated[Decay, Hint("write batch_norm_decay=0.9997")] = 0.9997
    """How much the moving statistics keep of what they were, each step."""
    batch_norm_epsilon: Annotated[PositiveFloat, Hint("write batch_norm_epsilon=0.001")] = 0.001
    batch_norm_scale: bool = False
    """Whether batch norm multiplies after it has normalised, and not only adds."""
    average_over_padding: bool = False
    """Whether the average pools count the zeros around a map, as torchvision's do and TensorFlow's do not."""
    depth_multiplier: Annotated[PositiveFloat, Hint("write depth_multiplier=0.5 for half the channels")] = 1.0
    """Times the channels of each convolution, of which 16 always remain: below 1 for a smaller net."""
    initial_weights: Initialization = "truncated_normal"
    """Fixed standard deviations, as in the reference trainer; or by the inputs of a layer, as in the TF-Slim nets."""

    def build(self, seed: int) -> InceptionV3Net:
        """The net with its initial weights, which depend on the seed alone; no random stream is touched."""
        return InceptionV3Net(self, generator=Generator().manual_seed(seed))


class InceptionLogits(NamedTuple):
    """What the net returns in training, where it has an auxiliary head: scores before the softmax."""

    logits: Tensor
    """Shape (batch, classes)."""
    auxiliary_logits: Tensor
    """Shape (batch, classes), of the auxiliary head."""


class AuxiliaryHead(nn.Module):
    """Scores from a map of 768 channels and 17x17, to train the layers before it.

    Its second convolution is as large as what the pooling leaves of 17x17, that is 5x5. Of smaller maps less is left:
    zeros around it make that 5x5, so the border of the kernel is idle; TF-Slim cuts the kernel there, to the same
    effect. Where images are so large that the convolution fits in several places, their mean is scored.
    """

    KERNEL = 5

    def __init__(self, layers: Layers, inputs: int, num_classes: int) -> None:
        super().__init__()
        reduced, outputs = layers.depth(128), layers.depth(768)
        self.conv0 = layers.convolution(inputs, reduced, 1)
        self.conv1 = layers.reduction(reduced, outputs, self.KERNEL, stride=1)
        self.fc = nn.Linear(outputs, num_classes)

    def forward(self, hidden: Tensor) -> Tensor:
        """Shape (batch, inputs, height, width) to (batch, classes)."""
        height, width = hidden.shape[2:]
        pooled = F.avg_pool2d(hidden, (min(height, self.KERNEL), min(width, self.KERNEL)), stride=3)
        scores: Tensor = self.fc(self.conv1(self._filled_up(self.conv0(pooled))).mean((2, 3)))
        return scores

    def _filled_up(self, hidden: Tensor) -> Tensor:
        """With zeros around it, where it is smaller than the kernel."""
        rows, columns = (max(0, self.KERNEL - side) for side in hidden.shape[2:])
        if rows == columns == 0:
            return hidden
        return F.pad(hidden, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))


class InceptionV3Net(nn.Module):
    """The net. In training it returns `InceptionLogits`, in evaluation (and without auxiliary head) the logits alone.

    Any size of images from 75 pixels on will do: the last map, 8x8 for 299 pixels, is averaged whatever its size.

    Args:
        settings: the defaults of the reference where none are given.
        generator: draws the initial weights; torch's default one where none is given.
    """

    def __init__(self, settings: InceptionV3 | None = None, *, generator: Generator | None = None) -> None:
        super().__init__()
        self.settings = settings or InceptionV3()
        with without_memory():
            self._add_layers(self.settings)
        self.to_empty(device="cpu")
        self.reset_parameters(generator)

    def _add_layers(self, settings: InceptionV3) -> None:
        layers = Layers(
            settings.depth_multiplier,
            settings.batch_norm_decay,
            settings.batch_norm_epsilon,
            settings.batch_norm_scale,
            settings.average_over_padding,
        )
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
        """Scores before the softmax of images of shape (batch, 3, height, width), values from -1 to 1.

        Raises:
            InputError: the images have another shape, are too small, or are not floating point.
        """
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
        """From 299x299 to 192 channels of 35x35."""
        hidden = self.maxpool1(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(images))))
        stem: Tensor = self.maxpool2(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(hidden)))
        return stem
