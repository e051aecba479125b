"""SqueezeNet 1.1, with the parameters named as in torchvision: a small net whose pretrained weights are quickly tuned.

Iandola et al., "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters" (2016); version 1.1 is of the authors'
repository, and takes 2.4 times less computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.checks import Checked, Fraction, PositiveInt, Range
from lockstep.models.image_checks import check_images
from lockstep.models.initial_weights import without_memory

_FINAL_STDDEV = 0.01
_NUM_FIRES = 8


@dataclass(frozen=True)
class SqueezeNet(Checked):
    """SqueezeNet 1.1 as a value of a recipe."""

    image_size: ClassVar[int] = 224
    smallest_image: ClassVar[int] = 17

    num_classes: PositiveInt = 1000
    dropout: Fraction = 0.5
    """The share of the values before the last layer that are left out in training."""
    fires_seen: Annotated[int, Range(ge=1, le=_NUM_FIRES)] | None = None
    """The last layer sees the means of all channels of so many Fire modules, the last ones, normalised together: from
    few images it learns more than the published one, None, which sees the last map place by place."""

    def build(self, seed: int) -> SqueezeNetNet:
        """The net with its initial weights, which depend on the seed alone; no random stream is touched."""
        return SqueezeNetNet(self, generator=Generator().manual_seed(seed))


class Fire(nn.Module):
    """A 1x1 convolution to few channels; from them, side by side, 1x1 and 3x3 to many. ReLU after each."""

    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Shape (batch, inputs, height, width) to (batch, 2 * expanded, height, width)."""
        hidden = F.relu(self.squeeze(hidden), inplace=True)
        return F.relu(torch.cat([self.expand1x1(hidden), self.expand3x3(hidden)], 1), inplace=True)


class SqueezeNetNet(nn.Module):
    """The net. As published, its scores are means over the map of what ReLU leaves: none is negative.

    Args:
        settings: 1000 classes where none are given.
        generator: draws the initial weights; torch's default one where none is given.
    """

    def __init__(self, settings: SqueezeNet | None = None, *, generator: Generator | None = None) -> None:
        super().__init__()
        self.settings = settings or SqueezeNet()
        with without_memory():
            self.features = _features()
            fires = [layer for layer in self.features if isinstance(layer, Fire)]
            self._seen = fires[-self.settings.fires_seen :] if self.settings.fires_seen else []
            self.classifier = _of_means(self.settings, self._seen) if self._seen else _of_map(self.settings)
        self.to_empty(device="cpu")
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the initial weights anew: He's uniform ones, and normal ones of 0.01 in the last layer."""
        *others, last = (module for module in self.modules() if isinstance(module, nn.Conv2d | nn.Linear))
        for layer in others:
            nn.init.kaiming_uniform_(layer.weight, generator=generator)
        nn.init.normal_(last.weight, std=_FINAL_STDDEV, generator=generator)
        for layer in (*others, last):
            assert layer.bias is not None, "made with one"
            nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Scores before the softmax, shape (batch, classes), of images of shape (batch, 3, height, width).

        Raises:
            InputError: the images have another shape, are too small, or are not floating point.
        """
        check_images("SqueezeNet", images, channels=3, smallest=SqueezeNet.smallest_image)
        logits: Tensor = self.classifier(self._means(images) if self._seen else self.features(images)).flatten(1)
        return logits

    def _means(self, hidden: Tensor) -> Tensor:
        means = []
        for layer in self.features:
            hidden = layer(hidden)
            if layer in self._seen:
                means.append(hidden.mean((2, 3)))
        return torch.cat(means, 1)


def _of_map(settings: SqueezeNet) -> nn.Sequential:
    """The published classifier."""
    return nn.Sequential(
        nn.Dropout(settings.dropout),
        nn.Conv2d(512, settings.num_classes, 1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
    )


def _of_means(settings: SqueezeNet, seen: Sequence[Fire]) -> nn.Sequential:
    """A linear one of the means of all channels of these modules, together of mean 0 and variance 1."""
    num_means = sum(2 * fire.expand1x1.out_channels for fire in seen)
    return nn.Sequential(
        nn.LayerNorm(num_means, elementwise_affine=False),
        nn.Dropout(settings.dropout),
        nn.Linear(num_means, settings.num_classes),
    )


def _features() -> nn.Sequential:
    """From 224x224 to 512 channels of 13x13."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        Fire(64, 16, 64),
        Fire(128, 16, 64),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        Fire(128, 32, 128),
        Fire(256, 32, 128),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        Fire(256, 48, 192),
        Fire(384, 48, 192),
        Fire(384, 64, 256),
        Fire(512, 64, 256),
    )
