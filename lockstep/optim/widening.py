"""Updates of 16-bit parameters, calculated in 32 bits as torch's fused kernels do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lockstep.optim.rules import Chunk


@contextmanager
def in_float32(chunk: Chunk) -> Iterator[Chunk]:
    """The chunk with float32 copies of its 16-bit tensors; what they have become is rounded back at the end.

    In 16 bits an epsilon of 1e-8 is 0, a mean that decays by a thousandth stands still, and squares overflow.
    """
    if all(p.dtype.itemsize >= 4 for p in chunk.parameters):
        yield chunk
        return
    wide = chunk._replace(
        parameters=_widened(chunk.parameters),
        gradients=_widened(chunk.gradients),
        slots={slot: _widened(tensors) for slot, tensors in chunk.slots.items()},
    )
    yield wide
    torch._foreach_copy_(chunk.parameters, wide.parameters)
    for slot, tensors in chunk.slots.items():
        torch._foreach_copy_(tensors, wide.slots[slot])


def _widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.float() if t.dtype.itemsize < 4 else t for t in tensors]
