"""SqueezeNet 1.1, with the parameters named as in torchvision: a small net whose pretrained weights are quickly tuned.

Iandola et al., "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters" (2016); version 1.1 is of the authors'
repository, and takes 2.4 times less computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.checks import check_range, check_whole
from lockstep.models.image_checks import check_images
from lockstep.models.initial_weights import without_memory

_FINAL_STDDEV = 0.01


@dataclass(frozen=True)
class SqueezeNet:
    """SqueezeNet 1.1 as a value of a recipe.

    Raises:
        InputError: a field is out of range.
    """

    image_size: ClassVar[int] = 224
    smallest_image: ClassVar[int] = 17

    num_classes: int = 1000
    dropout: float = 0.5
    """The share of the values before the last layer that are left out in training."""

    def __post_init__(self) -> None:
        check_whole("num_classes", self.num_classes, least=1)
        check_range("dropout", self.dropout, 0, 1)

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
    """The net. Its scores are means over the map of what ReLU leaves: none is negative.

    Args:
        settings: 1000 classes where none are given.
        generator: draws the initial weights; torch's default one where none is given.
    """

    def __init__(self, settings: SqueezeNet | None = None, *, generator: Generator | None = None) -> None:
        super().__init__()
        self.settings = settings or SqueezeNet()
        with without_memory():
            self.features = _features()
            self.classifier = nn.Sequential(
                nn.Dropout(self.settings.dropout),
                nn.Conv2d(512, self.settings.num_classes, 1),
                nn.ReLU(inplace=True),
                nn.AdaptiveAvgPool2d(1),
            )
        self.to_empty(device="cpu")
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the initial weights anew: He's uniform ones, and normal ones of 0.01 in the last layer."""
        *others, last = (module for module in self.modules() if isinstance(module, nn.Conv2d))
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
        logits: Tensor = self.classifier(self.features(images)).flatten(1)
        return logits


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
