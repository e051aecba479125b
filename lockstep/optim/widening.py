"""16-bit parameters are updated in 32 bits, from slots of 32 bits.

In 16 bits an epsilon of 1e-8 is 0, the square of a small gradient is 0 too and that of a large one infinite, and a mean
that decays by a thousandth at a time stands still.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lockstep.optim.rules import Chunk


def slot(parameter: Tensor, value: float = 0.0) -> Tensor:
    """A slot of the parameter's shape and memory format, float32 or wider, filled with a value."""
    return torch.full_like(parameter, value, dtype=torch.promote_types(parameter.dtype, torch.float32))


@contextmanager
def in_float32(chunk: Chunk) -> Iterator[Chunk]:
    """The chunk with float32 copies of 16-bit parameters and gradients; the parameters are rounded back at the end."""
    if all(p.dtype.itemsize >= 4 for p in chunk.parameters):
        yield chunk
        return
    wide = _widened(chunk.parameters)
    yield chunk._replace(parameters=wide, gradients=_widened(chunk.gradients))
    torch._foreach_copy_(chunk.parameters, wide)


def _widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.float() if t.dtype.itemsize < 4 else t for t in tensors]
