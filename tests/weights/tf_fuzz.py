"""Checkpoints damaged at random, and what then comes of them: the exact tensors, or an error that names a file."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lockstep.errors import CheckpointError
from lockstep.weights.open import open_tensorflow
from lockstep.weights.source import WeightSource

MADE = Path(__file__).parents[1] / "fixtures" / "tf_ckpt" / "made"


def contents(source: WeightSource) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of numbers: its kind, shape and bytes."""
    return {
        name: (info.dtype, tuple(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8).numpy()))
        for name, info in source.tensors.items()
        if not info.dtype.startswith("DT_")
        for tensor in [source.read(name)]
    }


def copied(prefix: Path, folder: Path) -> tuple[Path, list[Path]]:
    """A checkpoint's files in another folder, and its prefix there."""
    for path in prefix.parent.glob(f"{prefix.name}*"):
        shutil.copy(path, folder)
    return folder / prefix.name, sorted(folder.glob(f"{prefix.name}*"))


def check_damage(prefix: Path, folder: Path, tries: int, damage: Callable[[random.Random, bytes], bytes]) -> None:
    """Damage one file at a time: whatever is read must be exact, and all else a CheckpointError that names a file."""
    exact = contents(open_tensorflow(prefix))
    copy, paths = copied(prefix, folder)
    generator = random.Random(prefix.name)
    num_skipped = 0
    for _ in range(tries):
        path = generator.choice(paths)
        whole = path.read_bytes()
        path.write_bytes(damage(generator, whole))
        num_skipped += sum(1 for _ in refusals(copy, exact))
        path.write_bytes(whole)
    assert num_skipped


def refusals(prefix: Path, exact: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Iterator[str]:
    """Yield each refusal in reading a checkpoint, each tensor on its own."""
    try:
        source = open_tensorflow(prefix)
    except CheckpointError as error:
        yield get_name_map(error, prefix)
        return
    assert source.tensors.keys() >= exact.keys()
    for name, expected in exact.items():
        try:
            tensor = source.read(name)
        except CheckpointError as error:
            yield get_name_map(error, prefix)
        else:
            content = bytes(tensor.reshape(-1).view(torch.uint8).numpy())
            assert (source.tensors[name].dtype, tuple(tensor.shape), content) == expected


def get_name_map(error: CheckpointError, prefix: Path) -> str:
    assert str(prefix) in error.what
    return error.what


def flip_a_bit(generator: random.Random, data: bytes) -> bytes:
    place = generator.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << generator.randrange(8)]) + data[place + 1 :]


def cut(generator: random.Random, data: bytes) -> bytes:
    return data[: generator.randrange(len(data))]
