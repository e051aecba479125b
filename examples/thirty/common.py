"""What the thirty scripts share: digits of MNIST, and the first layers of SqueezeNet with ImageNet's weights."""

import gzip
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

DATA = Path(__file__).parent.parent.parent / "data"
EXAMPLES = 512
"""How many examples every data set here has: few, so that a script ends within seconds."""


class Digits(Dataset):
    """Pairs of an image of shape (1, 28, 28) from 0 to 1, and its label."""

    def __init__(self, split="train", transform=None):
        with gzip.open(DATA / "mnist" / f"{split}-images-idx3-ubyte.gz") as file:
            pixels = bytearray(file.read(16 + EXAMPLES * 784)[16:])
        with gzip.open(DATA / "mnist" / f"{split}-labels-idx1-ubyte.gz") as file:
            self.labels = list(file.read(8 + EXAMPLES)[8:])
        self.images = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, 1, 28, 28) / 255
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        return self.transform(image) if self.transform else image, self.labels[index]


class Fire(nn.Module):
    def __init__(self, inputs, squeezed, expanded):
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.squeeze(x))
        return F.relu(torch.cat([self.expand1x1(x), self.expand3x3(x)], 1))


def pretrained_features():
    """Return layers that turn images of shape (batch, 3, height, width) into 128 channels at an eighth of the size."""
    stem = [nn.Conv2d(3, 64, 3, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    layers = nn.Sequential(*stem, Fire(64, 16, 64), Fire(128, 16, 64), nn.MaxPool2d(3, 2))
    weights = load_file(DATA / "squeezenet" / "squeezenet1_1_imagenet_features.safetensors")
    layers.load_state_dict({name: weights[f"features.{name}"] for name in layers.state_dict()})
    return layers
