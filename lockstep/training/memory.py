"""Where the memory is not enough: for which batch and tower, how much was in use, and what needs less."""

from __future__ import annotations

import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from lockstep.cores import cgroup_folders
from lockstep.errors import InputError
from lockstep.ragged import Ragged
from lockstep.screen import log
from lockstep.towers.towers import Towers
from lockstep.types import Batch

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
_OF_ALLOCATORS = re.compile(r"can't allocate memory|CUDA error: out of memory|[A-Z]_(\w+_)?ALLOC(ATION)?_FAILED")
"""Words of torch's allocator on a CPU, of CUDA itself, and of its libraries: CUBLAS_STATUS_ALLOC_FAILED."""
_PAUSE_SECONDS = 60.0
_MOST_EVENTS = 100_000
"""The latest allocations of which a snapshot tells, with their lines."""


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
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(_OF_ALLOCATORS.search(str(error)))


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


@contextmanager
def snapshot_of_lack(path: Path, device: torch.device) -> Iterator[None]:
    """Leave torch's snapshot of a GPU's memory at the path where an allocation fails in the block.

    It is taken before anything is freed: what is allocated, and by which lines; https://pytorch.org/memory_viz shows
    it. Who asks for memory may try again with less, so a failure need not end the run: only one a minute is looked at.
    On a CPU nothing happens.
    """
    if device.type == "cpu":
        yield
        return
    memory: Any = torch.cuda.memory
    attach: Any = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
    is_over, next_time = False, -math.inf

    def leave(*_: object) -> None:
        nonlocal next_time
        if is_over or time.monotonic() < next_time:  # torch has no way to take an observer away
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            memory._dump_snapshot(str(path))
            told = f"what was allocated then is in {path}, for https://pytorch.org/memory_viz"
        except OSError as error:  # else it came out in place of torch's
            told = f"torch's snapshot cannot be written: {error}"
        log.warning("a GPU has lacked memory: %s", told)
        next_time = time.monotonic() + _PAUSE_SECONDS

    memory._record_memory_history(stacks="python", max_entries=_MOST_EVENTS)
    attach(leave)
    try:
        yield
    finally:
        is_over = True
        memory._record_memory_history(enabled=None)


def peak_bytes(device: torch.device) -> int:
    """The most bytes in use since the start or `forget_peak`: on an accelerator by tensors, on a CPU by the process."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    with suppress(OSError, StopIteration):  # Linux; its getrusage counts what the process was forked from, too
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def forget_peak(device: torch.device) -> None:
    """Begin to count `peak_bytes` anew; on a CPU where the system can, which Linux does."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def usable_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """The memory there is: of an accelerator all, of a host what control groups allow and other processes leave."""
    if device.type != "cpu":
        _, total = torch.get_device_module(device).mem_get_info(device)
        return int(total)
    limits, own = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")], 0
    with suppress(OSError, ValueError, StopIteration):  # a system without them
        lines = (root / "proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        own = int((root / "proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        limits.append(available + own)
    for folder in cgroup_folders("memory", root):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(OSError, ValueError):  # none there, or "max"
                limits.append(int((folder / limit).read_text()))
                others = int((folder / usage).read_text()) - own - _cached_bytes(folder)
                limits.append(limits[-1] - max(0, others))
    return min(limits)


def _cached_bytes(folder: Path) -> int:
    """What a control group holds of files, which the system gives up where memory is asked for."""
    lines = (folder / "memory.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
