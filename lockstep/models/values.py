"""Models as values of a recipe: each makes its net, whose module is imported only then."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch

from lockstep.checks import Checked, Decay, Fraction, Hint, PositiveFloat, PositiveInt, Range

if TYPE_CHECKING:
    from torch import nn

    from lockstep.models.mnist import MnistNet


class Model(Checked):
    """Base of the models of recipes: a value that makes its net, whose module is imported only then."""

    net: ClassVar[str]
    """What makes the net of the value and a generator, by its full name."""

    def build(self, seed: int) -> nn.Module:
        """Make the net; its initial weights depend on the seed alone, and no random stream is touched."""
        module, _, name = self.net.rpartition(".")
        made: nn.Module = getattr(import_module(module), name)(self, generator=torch.Generator().manual_seed(seed))
        return made


Initialization = Literal["truncated_normal", "variance_scaling"]
_NUM_FIRES = 8


@dataclass(frozen=True)
class Mnist:
    """The MNIST net as a value of a recipe."""

    lrn: bool = False
    """Local response normalisation around the second convolution."""

    num_classes: ClassVar[int] = 10
    image_size: ClassVar[int] = 28
    smallest_image: ClassVar[int] = 28

    def build(self, seed: int) -> MnistNet:
        """Make the net; its initial weights depend on the seed alone, and no random stream is touched."""
        from lockstep.models.mnist import MnistNet

        return MnistNet(lrn=self.lrn, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class LeNet(Model):
    """LeNet as a value of a recipe."""

    net: ClassVar[str] = "lockstep.models.lenet.LeNetNet"
    image_size: ClassVar[int] = 28
    smallest_image: ClassVar[int] = 28

    num_classes: PositiveInt = 10
    """Number of classes."""
    channels: PositiveInt = 1
    """Channels of the images: 1 for grey ones, 3 for colour."""
    dropout: Fraction = 0.5
    """The share of the values before the last layer that are left out in training."""


@dataclass(frozen=True)
class SqueezeNet(Model):
    """SqueezeNet 1.1 as a value of a recipe."""

    net: ClassVar[str] = "lockstep.models.squeezenet.SqueezeNetNet"
    image_size: ClassVar[int] = 224
    smallest_image: ClassVar[int] = 17

    num_classes: PositiveInt = 1000
    """Number of classes."""
    dropout: Fraction = 0.5
    """The share of the values before the last layer that are left out in training."""
    fires_seen: Annotated[int, Range(ge=1, le=_NUM_FIRES)] | None = None
    """How many Fire modules, from the last one back, the last layer sees: it gets the means of all their channels,
    normalised together, and learns more from few images. None is the published net, whose last layer sees the last map
    place by place."""


@dataclass(frozen=True)
class InceptionV3(Model):
    """Inception-v3 as a value of a recipe.

    The defaults are the reference trainer's. For the weights that torchvision offers, which expect values from -1 to 1
    too, set `num_classes=1000, batch_norm_scale=True, average_over_padding=True`.
    """

    net: ClassVar[str] = "lockstep.models.inception_v3.InceptionV3Net"
    image_size: ClassVar[int] = 299
    smallest_image: ClassVar[int] = 75

    num_classes: PositiveInt = 1001
    """With the background, which has label 0 in the ImageNet records."""
    auxiliary: bool = True
    """A second head on the last map of 17x17: it is trained and saved, and used in training alone."""
    dropout: Fraction = 0.2
    """The share of the values before the last layer that are left out."""
    batch_norm_decay: Annotated[Decay, Hint("write batch_norm_decay=0.9997")] = 0.9997
    """The share of the moving statistics that a step keeps."""
    batch_norm_epsilon: Annotated[PositiveFloat, Hint("write batch_norm_epsilon=0.001")] = 0.001
    """Added to the variance in batch norm."""
    batch_norm_scale: bool = False
    """Batch norm multiplies after it has normalised, and does not only add."""
    average_over_padding: bool = False
    """The average pools count the zeros around a map, as torchvision's do and TensorFlow's do not."""
    depth_multiplier: Annotated[PositiveFloat, Hint("write depth_multiplier=0.5 for half the channels")] = 1.0
    """Scales the channels of each convolution: below 1 for a smaller net."""
    initial_weights: Initialization = "truncated_normal"
    """Fixed standard deviations, as in the reference trainer; or by the inputs of a layer, as in the TF-Slim nets."""
    min_depth: PositiveInt = 16
    """The channels that remain in a convolution, however small the depth multiplier is."""
