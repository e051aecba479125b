"""What every contender's script shares: the workloads, their arguments, and the turns that peers.py gives.

Needs numpy alone, so that it runs in each of the environments.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Workload:
    """A net, its data and the rule by which it learns: all use SGD with this momentum."""

    net: str
    batch_size: int
    """Of each worker."""
    lr: float
    num_examples: int
    """As many as the training cycles through, in order; the loss is compared on the first batch."""
    momentum: float = 0.9
    image_size: int = 0
    """Height and width of those images that are noise of three colours."""
    num_classes: int = 10
    """Of the labels."""
    loss_in_training: bool = False
    """The losses that are compared are those of training: a detector has no others, and in few steps moving statistics
    of many layers come nowhere."""


WORKLOADS = {
    "tiny": Workload("tiny", batch_size=32, lr=0.01, num_examples=3200),
    "mnist": Workload("mnist", batch_size=128, lr=0.01, num_examples=12800),
    "resnet18": Workload("resnet18", batch_size=32, lr=0.01, num_examples=640, image_size=64, num_classes=100),
    "inception": Workload("inception", batch_size=8, lr=0.01, num_examples=32, image_size=299, loss_in_training=True),
    "ssdlite": Workload(
        "ssdlite", batch_size=4, lr=1e-3, num_examples=16, image_size=320, num_classes=90, loss_in_training=True
    ),
    "ssd300": Workload(
        "ssd300", batch_size=4, lr=1e-4, num_examples=16, image_size=300, num_classes=90, loss_in_training=True
    ),
}
DETECTORS = ("ssdlite", "ssd300")
FIRST_STEPS = 20
"""Of the training before evaluations and saves."""
RESNET18_BLOCKS = [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)]
"""Channels and stride of each."""


def parsed() -> argparse.Namespace:
    """The arguments of a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--what", choices=["train", "evaluate", "save"], default="train")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--steps", type=int, required=True, help="after which the script ends")
    parser.add_argument("--folder", type=Path, required=True, help="of the data and the first weights")
    return parser.parse_args()


def arrays(arguments: argparse.Namespace) -> dict[str, Any]:
    """`image` (examples, channels, height, width) or (examples, features), `label`.

    Of detectors `image`; `boxes`, in pixels as left, top, right, bottom, and `labels`, from 1, of all objects;
    `lengths`, how many each image has.
    """
    with np.load(arguments.folder / f"{WORKLOADS[arguments.workload].net}-data.npz") as file:
        return dict(file)


def first_weights(arguments: argparse.Namespace) -> dict[str, Any]:
    """By the names and in the layout of torch."""
    with np.load(arguments.folder / f"{WORKLOADS[arguments.workload].net}-weights.npz") as file:
        return dict(file)


def tensorflow_batches(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The batches of an epoch with the channels last: images (batches, batch, ...), labels (batches, batch)."""
    data, size = arrays(arguments), WORKLOADS[arguments.workload].batch_size
    images, labels = data["image"], data["label"]
    images = images if images.ndim == 2 else np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    return images.reshape(-1, size, *images.shape[1:]), labels.reshape(-1, size)


def inception_kernels(arguments: argparse.Namespace) -> list[Any]:
    """Of Inception-v3, in TensorFlow's layout and the order of its nets, that of the last layer last."""
    kernels = [value for value in first_weights(arguments).values() if value.ndim > 1]
    return [tensorflow_kernel("", kernel) for kernel in kernels]


def tensorflow_kernel(layer: str, kernel: Any) -> Any:
    """The weight of a torch layer as TensorFlow lays it out."""
    if kernel.ndim == 4:
        return kernel.transpose(2, 3, 1, 0)
    if layer == "fc1":  # of the flattened channels, rows, columns
        kernel = kernel.reshape(1024, 64, 7, 7).transpose(0, 2, 3, 1).reshape(1024, -1)
    return kernel.T


class Places:
    """A path of its own for each save; what was saved before the last one is deleted."""

    def __init__(self, arguments: argparse.Namespace, suffix: str = "") -> None:
        self._folder, self._suffix, self._count = arguments.folder, suffix, 0

    def next(self) -> Path:
        self._count += 1
        for count in (self._count - 2, self._count):
            path = self._folder / f"saved-{os.getpid()}-{count}{self._suffix}"
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
        return path


class Turns:
    """The chief's end of the turns: it makes the steps that it is told to, and waits while others make theirs."""

    def __init__(self, *, is_chief: bool = True) -> None:
        self._left = 0
        self._socket = None
        if is_chief:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(os.environ["PEER_SOCKET"])
            self._lines = self._socket.makefile("r")

    def begin(self, **made_of: str) -> None:
        """Say what the contender is made of, and wait for the first turn."""
        self._answer(made_of)
        self._wait()

    def made_step(self) -> None:
        """Count a step; after the last one of a turn, wait for the next turn."""
        self._left -= 1
        if self._left == 0:
            self._answer({})
            self._wait()

    def repeat(self, arguments: argparse.Namespace, work: Callable[[], Any]) -> Any:
        """Do the same in each step; the last result."""
        for _ in range(arguments.steps):
            result = work()
            self.made_step()
        return result

    def end(self, loss: float) -> None:
        """Say the loss on the first batch, after all steps, or what was evaluated."""
        self._answer({"loss": float(loss)})

    def _answer(self, values: dict[str, Any]) -> None:
        if self._socket:
            self._socket.sendall(json.dumps(values).encode() + b"\n")

    def _wait(self) -> None:
        if self._socket:
            self._left = json.loads(self._lines.readline())
