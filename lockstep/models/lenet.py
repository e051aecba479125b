"""LeNet as in the TF-Slim nets: wider than LeCun's of 1998, with ReLU, max pooling and dropout."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.models.initial_weights import check_images, give_memory, truncated_normal, without_memory
from lockstep.models.values import LeNet

_STDDEV = 0.1


class LeNetNet(nn.Module):
    """Two 5x5 convolutions with max pooling, then 3136 -> 1024 -> classes; ReLU after all but the last."""

    def __init__(self, settings: LeNet | None = None, *, generator: Generator | None = None) -> None:
        super().__init__()
        self.settings = settings or LeNet()
        with without_memory():
            self.conv1 = nn.Conv2d(self.settings.channels, 32, 5, padding=2)
            self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
            self.fc3 = nn.Linear(64 * 7 * 7, 1024)
            self.dropout = nn.Dropout(self.settings.dropout)
            self.fc4 = nn.Linear(1024, self.settings.num_classes)
        give_memory(self)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the initial weights anew."""
        for layer in (self.conv1, self.conv2, self.fc3, self.fc4):
            truncated_normal(layer.weight, _STDDEV, generator)
            assert layer.bias is not None, "made with one"
            nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Compute scores before the softmax, shape (batch, classes), of images of shape (batch, channels, 28, 28)."""
        size = LeNet.image_size
        check_images("LeNet", images, channels=self.settings.channels, smallest=size, largest=size)
        # The maximum of what ReLU leaves is what ReLU leaves of the maximum: the same bits, on a quarter of the values.
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(F.max_pool2d(self.conv2(hidden), 2))
        logits: Tensor = self.fc4(self.dropout(F.relu(self.fc3(hidden.flatten(1)))))
        return logits
