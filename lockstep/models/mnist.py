"""The convolutional net of the reference MNIST trainer, kept as it was: its last hidden layer has ten ReLU units.

Ten units between 1024 and the ten scores look like a slip, but they are what gave the published curve. They also make
the net fragile at the reference's rate of 0.1: where all ten die, it never learns.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.errors import InputError
from lockstep.models.initial_weights import give_memory, without_memory

IMAGE_SHAPE = (1, 28, 28)
NUM_CLASSES = 10


class MnistNet(nn.Module):
    """Two 5x5 convolutions with max pooling, then 3136 -> 1024 -> 10 -> 10; ReLU after all but the last.

    Args:
        lrn: local response normalisation after the first pooling and before the second, as in the CIFAR-10 tutorial
            from which the net descends.
        generator: draws the initial weights; torch's default one where none is given.
    """

    def __init__(self, *, lrn: bool = False, generator: Generator | None = None) -> None:
        super().__init__()
        self.lrn = lrn
        with without_memory():
            self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
            self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
            self.local3 = nn.Linear(64 * 7 * 7, 1024)
            self.local4 = nn.Linear(1024, 10)
            self.softmax_linear = nn.Linear(10, NUM_CLASSES)
        give_memory(self)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the initial weights anew."""
        _initialise(self.conv1, 0.05, 0.0, generator)
        _initialise(self.conv2, 0.05, 0.1, generator)
        _initialise(self.local3, 0.04, 0.1, generator)
        _initialise(self.local4, 0.04, 0.1, generator)
        _initialise(self.softmax_linear, 1 / 192, 0.0, generator)

    def forward(self, images: Tensor) -> Tensor:
        """Compute scores before the softmax, shape (batch, 10), of images (batch, 1, 28, 28) in [-0.5, 0.5]."""
        _check(images)
        # The maximum of what ReLU leaves is what ReLU leaves of the maximum: the same bits, on a quarter of the values.
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(self.conv2(local_response_norm(hidden) if self.lrn else hidden))
        hidden = F.max_pool2d(local_response_norm(hidden) if self.lrn else hidden, 2)
        hidden = F.relu(self.local3(hidden.flatten(1)))
        scores: Tensor = self.softmax_linear(F.relu(self.local4(hidden)))
        return scores


def _initialise(layer: nn.Conv2d | nn.Linear, std: float, bias: float, generator: Generator | None) -> None:
    """Draw weights from a normal distribution cut at two standard deviations (before the cut); set a constant bias."""
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std, generator=generator)
    assert layer.bias is not None, "made with one"
    nn.init.constant_(layer.bias, bias)


def local_response_norm(hidden: Tensor) -> Tensor:
    """Divide each value by (1 + 0.001 / 9 * sum of squares)^0.75, the sum taken over the 9 channels around it.

    Torch divides its alpha by the number of channels, so it is given 0.001, the reference's alpha of 0.001 / 9 times 9.
    """
    return F.local_response_norm(hidden, size=9, alpha=0.001, beta=0.75, k=1.0)


def _check(images: Tensor) -> None:
    if images.ndim == 4 and images.shape[1:] == IMAGE_SHAPE and images.is_floating_point():
        return
    raise InputError(
        "The MNIST net cannot use these images.",
        given=f"shape {tuple(images.shape)}, {images.dtype}",
        expected="shape (batch, 1, 28, 28), floating point, values from -0.5 to 0.5",
        hint="give grey images with a channel axis, as image / 255 - 0.5",
    )
