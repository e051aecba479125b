"""Files of weights damaged at random, and what may come of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch

from lockstep.errors import CheckpointError
from lockstep.weights.open import open_weights_file
from lockstep.weights.source import WeightSource

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "weights"
RESNET = FIXTURES / "resnet20-12fca82f.th"
SQUEEZENET = ROOT / "data" / "squeezenet" / "squeezenet1_1_imagenet_features.safetensors"

TENSORS = {
    "conv.weight": torch.arange(24.0).reshape(2, 3, 2, 2),
    "conv.bias": torch.tensor([0.5, -1.5], dtype=torch.float64),
    "steps": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
}


def contents(source: WeightSource) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    read = {name: source.read(name) for name in source.tensors}
    assert all(tensor.is_contiguous() for tensor in read.values())
    return {
        name: (tensor.dtype, tuple(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8).numpy()))
        for name, tensor in read.items()
    }


def truncated(generator: random.Random, whole: bytes) -> bytes:
    return whole[: generator.randrange(len(whole))]


def with_a_flipped_bit(generator: random.Random, whole: bytes) -> bytes:
    place = generator.randrange(len(whole))
    return whole[:place] + bytes([whole[place] ^ 1 << generator.randrange(8)]) + whole[place + 1 :]


def count_refused(
    path: Path, tries: int, damage: Callable[[random.Random, bytes], bytes], *, has_checksums: bool
) -> int:
    """How often damage was refused; nothing but a CheckpointError may come of it, and where there are checksums of all
    tensors, never another tensor."""
    exact, whole, generator = contents(open_weights_file(path)), path.read_bytes(), random.Random(path.name)
    refused = []
    for _ in range(tries):
        path.write_bytes(damage(generator, whole))
        try:
            found = contents(open_weights_file(path))
        except CheckpointError as error:
            refused.append(str(error))
        else:
            assert not has_checksums or all(exact[name] == value for name, value in found.items() if name in exact)
    path.write_bytes(whole)
    assert all(str(path) in message for message in refused)
    return len(refused)
