"""Where each tensor of a list lies in one block of bytes: the same on every worker, and the same after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.parallel.tree import PartialSum

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Segment:
    """The tensors of one dtype, one after the other."""

    dtype: torch.dtype
    offset_bytes: int
    num_elements: int

    def of(self, block: Tensor) -> Tensor:
        """The segment's elements in a block of bytes (uint8, one-dimensional)."""
        return block[self.offset_bytes : self.offset_bytes + self.num_elements * self.dtype.itemsize].view(self.dtype)


class Layout:
    """The places of a list of tensors, by dtype in order of first appearance, then in the order of the list.

    A tensor keeps its strides: what lies in the block is its memory as it is.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [(t.shape, t.stride(), t.dtype) for t in tensors]
        dtypes = list(dict.fromkeys(t.dtype for t in tensors))
        sizes = {dtype: sum(t.numel() for t in tensors if t.dtype == dtype) for dtype in dtypes}
        self.segments: list[Segment] = []
        end = 0
        for dtype in dtypes:
            self.segments.append(Segment(dtype, end, sizes[dtype]))
            end += -(-sizes[dtype] * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.num_bytes = end

    def describe(self) -> list[str]:
        """One line a tensor, equal on two workers exactly where their layouts are."""
        return [f"{tuple(shape)} {tuple(stride)} {dtype}" for shape, stride, dtype in self._shapes]

    def views(self, block: Tensor) -> list[Tensor]:
        """The tensors in a block of `num_bytes` bytes, in the order of the list."""
        rest = {segment.dtype: segment.of(block) for segment in self.segments}
        views = []
        for shape, stride, dtype in self._shapes:
            num_elements = shape.numel()
            views.append(rest[dtype][:num_elements].as_strided(shape, stride))
            rest[dtype] = rest[dtype][num_elements:]
        return views


def packed(partial: PartialSum, device: torch.device | str = "cpu") -> list[Tensor]:
    """The tensors of an operand, and last its numbers as one more (float64)."""
    return [*partial.tensors, torch.tensor(partial.numbers, dtype=torch.float64, device=device)]


def unpacked(tensors: Sequence[Tensor], *, owned: bool) -> PartialSum:
    """The operand that was packed; `owned` if no other worker reads it."""
    return PartialSum(list(tensors[:-1]), tensors[-1].tolist(), owned=owned)
