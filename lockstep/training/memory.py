"""Whether there is memory for the largest batch of a run, found out before its first step."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lockstep.errors import InputError
from lockstep.exchange.exchange import Exchange
from lockstep.ragged import Ragged
from lockstep.towers.towers import Towers
from lockstep.training.loop import bind_loop
from lockstep.training.state import TrainState
from lockstep.types import Batch
from lockstep.workers.rank import join

if TYPE_CHECKING:
    from lockstep.types import CountFunction, LossFunction

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
_OF_CPU_ALLOCATOR = "can't allocate memory"


def probe_memory(
    state: TrainState,
    losses: LossFunction,
    batch: Batch,
    towers: Towers | None = None,
    exchange: Exchange | None = None,
    *,
    counts: CountFunction | None = None,
    hint: str = "lower the batch size, split the batch over more towers, or make the images smaller",
) -> int:
    """Compute the losses and gradients of a batch, and forget them: a run that lacks memory ends before its first step.

    Nothing of the state changes, nor do random streams and the position of a loader. All workers call it together.

    Args:
        state: what is to be trained.
        losses: as for `train_step`.
        batch: this worker's part of the largest batch that there will be; what is on the images does not matter.
        towers: as for `train_step`.
        exchange: as for `train_step`.
        counts: as for `train_step`.
        hint: what to do where the memory is not enough, for the error.

    Returns:
        The most bytes in use: on an accelerator during this call, on a CPU since the process began.

    Raises:
        InputError: the memory is not enough.
    """
    step, device = bind_loop(state, towers, exchange), join().device
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    with lack_of_memory_told(describe_batch(batch, step.towers), hint):
        step.rehearse(losses, batch, counts)
    return _peak_bytes(device)


@contextmanager
def lack_of_memory_told(batch: str, hint: str) -> Iterator[None]:
    """Turn an allocator's error into one that says for which batch the memory is not enough, and what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # an OutOfMemoryError of torch is a RuntimeError, too
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and _OF_CPU_ALLOCATOR not in str(error):
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


def _peak_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
