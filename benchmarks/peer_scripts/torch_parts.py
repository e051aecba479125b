"""Nets, data and the loss of the contenders on torch, ours among them: each trains the same module."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from turns import DETECTORS, RESNET18_BLOCKS, WORKLOADS, arrays, first_weights


class MnistNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * 7 * 7, 1024)
        self.fc2 = nn.Linear(1024, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.down = None
        if stride > 1 or channels != out:
            self.down = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.down is None else self.down(x)
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + shortcut)


class ResNet18(nn.Module):
    """Torchvision's, for 100 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = [64, *(channels for channels, _ in RESNET18_BLOCKS)]
        self.blocks = nn.Sequential(*(Block(num, *block) for num, block in zip(inputs, RESNET18_BLOCKS, strict=False)))
        self.fc = nn.Linear(512, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        return self.fc(self.blocks(x).mean((2, 3)))


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def inception() -> nn.Module:
    """Torchvision's, without what draws random numbers, and without the auxiliary head, which Keras's has not."""
    from torchvision.models import inception_v3

    module: nn.Module = inception_v3(weights=None, aux_logits=False, init_weights=False, dropout=0.0)
    return module


def detector(name: str) -> nn.Module:
    """Torchvision's."""
    from torchvision.models import detection

    num_classes = WORKLOADS["ssd300"].num_classes + 1  # and the background
    module: nn.Module = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=num_classes)
    return module


NETS: Mapping[str, Callable[[], nn.Module]] = {
    "tiny": tiny,
    "mnist": MnistNet,
    "resnet18": ResNet18,
    "inception": inception,
    "ssdlite": lambda: detector("ssdlite320_mobilenet_v3_large"),
    "ssd300": lambda: detector("ssd300_vgg16"),
}


def net(arguments: argparse.Namespace, nets: Mapping[str, Callable[[], nn.Module]] = NETS) -> nn.Module:
    """With the first weights that all begin with."""
    module = nets[WORKLOADS[arguments.workload].net]()
    module.load_state_dict({name: torch.from_numpy(value) for name, value in first_weights(arguments).items()})
    return module.to(memory_format=torch.channels_last)


def loss(module: nn.Module, images: Tensor, labels: Any) -> Tensor:
    """The mean cross entropy; of a detector, whose labels are a list, the sum of its losses."""
    if isinstance(labels, list):
        losses: Tensor = sum(module(list(images / 255), labels).values())
        return losses
    return F.cross_entropy(outputs(module, images), labels)


def outputs(module: nn.Module, images: Tensor) -> Tensor:
    """The net's logits; images of bytes are scaled to -0.5 .. 0.5."""
    if images.dtype == torch.uint8:
        images = images.to(memory_format=torch.channels_last) / 255 - 0.5
    logits: Tensor = module(images)
    return logits


class _Batches(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, images: Tensor, labels: Any) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, indices: Any) -> tuple[Tensor, Any]:
        labels = self._labels
        chosen = labels[indices] if isinstance(labels, Tensor) else [dict(labels[index]) for index in indices]
        return self._images[indices], chosen


def dataset(arguments: argparse.Namespace) -> _Batches:
    """All examples; of detectors the labels are dictionaries, as torchvision's take them."""
    data = {name: torch.from_numpy(values) for name, values in arrays(arguments).items()}
    if arguments.workload not in DETECTORS:
        return _Batches(data["image"], data["label"])
    objects = (values.split(data["lengths"].tolist()) for values in (data["boxes"], data["labels"]))
    return _Batches(data["image"], [{"boxes": boxes, "labels": labels} for boxes, labels in zip(*objects, strict=True)])


class _Cycle(Sampler[int]):
    """The examples of one worker, in order, for so many steps: of each global batch its contiguous part."""

    def __init__(self, num_examples: int, batch_size: int, num_steps: int, rank: int, num_workers: int) -> None:
        self._num_examples, self._batch_size, self._num_steps = num_examples, batch_size, num_steps
        self._rank, self._num_workers = rank, num_workers

    def __len__(self) -> int:
        return self._num_steps * self._batch_size

    def __iter__(self) -> Iterator[int]:
        for step in range(self._num_steps):
            start = (step * self._num_workers + self._rank) * self._batch_size
            for index in range(start, start + self._batch_size):
                yield index % self._num_examples


def data_loader(arguments: argparse.Namespace, rank: int = 0) -> DataLoader[tuple[Tensor, Tensor]]:
    """Torch's, with whole batches indexed at once: `batch_size=None`, as its documentation has it."""
    workload = WORKLOADS[arguments.workload]
    examples = dataset(arguments)
    sampler = _Cycle(len(examples), workload.batch_size, arguments.steps, rank, arguments.num_workers)
    batches = BatchSampler(sampler, workload.batch_size, drop_last=False)
    return DataLoader(examples, sampler=batches, batch_size=None)


def loader_of(arguments: argparse.Namespace, num_steps: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """The batches of so many steps of one worker."""
    return data_loader(argparse.Namespace(**vars(arguments) | {"steps": num_steps}))


def evaluation_loader(arguments: argparse.Namespace) -> DataLoader[tuple[Tensor, Tensor]]:
    """All examples once."""
    workload = WORKLOADS[arguments.workload]
    return loader_of(arguments, workload.num_examples // workload.batch_size)


@torch.no_grad()
def evaluated(loader: Iterable[tuple[Tensor, Tensor]], module: nn.Module) -> float:
    """The mean loss over all batches."""
    module.eval()
    values = [loss(module, images, labels).item() for images, labels in loader]
    return sum(values) / len(values)


def optimizer(arguments: argparse.Namespace, module: nn.Module) -> torch.optim.Optimizer:
    """Torch's fused kernel, the fastest that it has."""
    workload = WORKLOADS[arguments.workload]
    return torch.optim.SGD(module.parameters(), workload.lr, momentum=workload.momentum, fused=True)


@torch.no_grad()
def final_loss(arguments: argparse.Namespace, module: nn.Module) -> float:
    """The loss on the first batch, in float32, with the running statistics unless the workload says otherwise."""
    workload = WORKLOADS[arguments.workload]
    images, labels = dataset(arguments)[list(range(workload.batch_size))]
    return loss(module.train(workload.loss_in_training), images, labels).item()
