"""SqueezeNet 1.1, with the parameters named as in torchvision: a small net whose pretrained weights are quickly tuned.

Iandola et al., "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters" (2016); version 1.1 is of the authors'
repository, and takes 2.4 times less computation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.models.initial_weights import check_images, give_memory, without_memory
from lockstep.models.values import SqueezeNet

_FINAL_STDDEV = 0.01


class Fire(nn.Module):
    """A 1x1 convolution to few channels; from them, side by side, 1x1 and 3x3 to many. ReLU after each."""

    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape (batch, inputs, height, width) to (batch, 2 * expanded, height, width)."""
        hidden = F.relu(self.squeeze(hidden), inplace=True)
        return F.relu(torch.cat([self.expand1x1(hidden), self.expand3x3(hidden)], 1), inplace=True)


class SqueezeNetNet(nn.Module):
    """SqueezeNet 1.1: as published, its scores are means over a map after ReLU, and none is negative."""

    def __init__(self, settings: SqueezeNet | None = None, *, generator: Generator | None = None) -> None:
        super().__init__()
        self.settings = settings or SqueezeNet()
        with without_memory():
            self.features = squeezenet_features()
            fires = [layer for layer in self.features if isinstance(layer, Fire)]
            self._seen = fires[-self.settings.fires_seen :] if self.settings.fires_seen else []
            self.classifier = (
                _classifier_of_means(self.settings, self._seen) if self._seen else _classifier_of_map(self.settings)
            )
        give_memory(self)
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
        """Compute scores before the softmax, shape (batch, classes), of images of shape (batch, 3, height, width)."""
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


def _classifier_of_map(settings: SqueezeNet) -> nn.Sequential:
    return nn.Sequential(
        nn.Dropout(settings.dropout),
        nn.Conv2d(512, settings.num_classes, 1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
    )


def _classifier_of_means(settings: SqueezeNet, seen: Sequence[Fire]) -> nn.Sequential:
    """Make a linear classifier of the means of all channels of these modules, normalised together."""
    num_means = sum(2 * fire.expand1x1.out_channels for fire in seen)
    return nn.Sequential(
        nn.LayerNorm(num_means, elementwise_affine=False),
        nn.Dropout(settings.dropout),
        nn.Linear(num_means, settings.num_classes),
    )


def squeezenet_features() -> nn.Sequential:
    """Make the layers from images to 512 channels at stride 16; the weights are torch's, where torch gives them some.

    Layers 3 and 4 have 128 channels at stride 4, 6 and 7 have 256 at stride 8, 9 and 10 have 384, 11 and 12 have 512.
    """
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
