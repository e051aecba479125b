"""Where the memory is not enough: for which batch and tower, how much was in use, and what needs less."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.errors import InputError
from lockstep.ragged import Ragged
from lockstep.towers.towers import Towers
from lockstep.types import Batch

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
_OF_CPU_ALLOCATOR = "can't allocate memory"


@contextmanager
def lack_of_memory_told(batch: str, hint: str) -> Iterator[None]:
    """Turn an allocator's error into one that says for which batch the memory is not enough, and what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_lack_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
    else:
        return
    raise InputError(
        "The memory is not enough for the largest batch of this run.",
        given=f"{batch} ({reason})",
        expected="a batch that there is memory for",
        hint=hint,
    )


def is_lack_of_memory(error: Exception) -> bool:
    """Whether an allocator has raised it; an OutOfMemoryError of torch is a RuntimeError, too."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _OF_CPU_ALLOCATOR in str(error)


def note_on_memory(batch: Batch, tower: int, towers: Towers, device: torch.device) -> str:
    """Say for which tower's part of a batch the memory is not enough, how much was in use, and what needs less."""
    where, peak = f"tower {tower} of {towers.num_towers}", peak_bytes(device) / 1e9
    return (
        f"Lockstep: {where} had no memory for its part of {describe_batch(batch, towers)}; {peak:.2f} GB were in use "
        "at most. Less is needed with a smaller batch_size, more towers, towers.activation_checkpointing, or "
        "towers.precision=bf16."
    )


def describe_batch(batch: Batch, towers: Towers) -> str:
    """Describe what of a batch takes memory: `8 examples over 2 towers, image 3 x 800 x 1344, up to 100 boxes each`."""
    shapes = {name: _largest_shape(value) for name, value in batch.items()}
    images = [f"{name} {' x '.join(map(str, shape))}" for name, shape in shapes.items() if len(shape) > 1]
    most = {name: int(value.lengths.max()) for name, value in batch.items() if isinstance(value, Ragged) and len(value)}
    objects = [f"up to {most['boxes']} box{'' if most['boxes'] == 1 else 'es'} each"] if "boxes" in most else []
    examples = "example" if batch.batch_size == 1 else "examples"
    tower = "tower" if towers.num_towers == 1 else "towers"
    return ", ".join([f"{batch.batch_size} {examples} over {towers.num_towers} {tower}", *images, *objects])


def _largest_shape(value: Any) -> list[int]:
    """Return the most that an example of a field has in each dimension; nothing for what is no tensors."""
    rows = value if isinstance(value, list | torch.Tensor) else []
    shapes = [row.shape for row in rows if isinstance(row, torch.Tensor)]
    return [max(sizes) for sizes in zip(*shapes, strict=True)]


def peak_bytes(device: torch.device) -> int:
    """The most bytes in use: on an accelerator since its peak was reset, on a CPU since the process began."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
