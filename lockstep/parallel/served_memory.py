"""The memory of a chief that serves: what it publishes and what comes back, mapped by the workers on its host.

No block is written while another process may read it, so nobody has to find out whether he was overtaken: the chief
publishes a version in a block that nobody reads, and names with each lease the block for its gradient.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.parallel.transports import FlatLayout, check_memory, create_memory
from lockstep.workers.rank import Worker

_PAGE_BYTES = 4096


class Block(NamedTuple):
    """A part of the memory: as bytes (uint8, one-dimensional), and as the tensors that lie there."""

    bytes: Tensor
    tensors: list[Tensor]

    @classmethod
    def alone(cls, layout: FlatLayout) -> Block:
        """A block of this process alone."""
        block = torch.empty(layout.num_bytes, dtype=torch.uint8)
        return cls(block, layout.views(block))


@dataclass(frozen=True)
class MemoryPlan:
    """How the memory is divided: a head, blocks to publish in, blocks for gradients; each begins at a page."""

    published: FlatLayout
    gradients: FlatLayout
    num_published: int
    num_gradients: int

    @property
    def num_bytes(self) -> int:
        """The size of the memory; its pages take room once they are written."""
        return sum(self._sizes())

    def create(self) -> int:
        """A descriptor of new memory, which vanishes with the last process that has it."""
        return create_memory(self.num_bytes)

    def map(self, descriptor: int) -> ServedMemory:
        """Map the memory; the descriptor may be closed then.

        Raises:
            WorkerError: it is not of this plan.
        """
        check_memory(descriptor, self.num_bytes)
        memory = torch.frombuffer(mmap.mmap(descriptor, self.num_bytes), dtype=torch.uint8)
        head, *parts = torch.split(memory, self._sizes())
        layouts = [self.published] * self.num_published + [self.gradients] * self.num_gradients
        blocks = [
            Block(part[: layout.num_bytes], layout.views(part)) for layout, part in zip(layouts, parts, strict=True)
        ]
        return ServedMemory(head[:8].view(torch.int64), blocks[: self.num_published], blocks[self.num_published :])

    def _sizes(self) -> list[int]:
        sizes = [self.published.num_bytes] * self.num_published + [self.gradients.num_bytes] * self.num_gradients
        return [_PAGE_BYTES, *(max(1, -(-size // _PAGE_BYTES)) * _PAGE_BYTES for size in sizes)]


class ServedMemory(NamedTuple):
    """The memory, as one process has mapped it."""

    oldest: Tensor
    """The oldest version for which a gradient is still of use: one number (int64), which the chief writes."""
    published: list[Block]
    gradients: list[Block]


class BlockUse:
    """Which blocks of a kind are in use, and by how many; the first free one is taken, so the last stay untouched."""

    def __init__(self, num_blocks: int) -> None:
        self._users = [0] * num_blocks

    def take(self) -> int:
        """Use a free block; there are enough."""
        index = self._users.index(0)
        self._users[index] = 1
        return index

    def share(self, index: int) -> int:
        """Use a block that is in use, too."""
        self._users[index] += 1
        return index

    def release(self, index: int) -> None:
        """End a use."""
        self._users[index] -= 1


def agreed_layouts(
    worker: Worker, gradients: Sequence[Tensor], published: Sequence[Tensor]
) -> tuple[FlatLayout, FlatLayout]:
    """The layouts of what is published and of gradients, on which all workers agree; they call it together.

    Tensors that are parts of others, or expanded, lie dense in it.
    """
    layouts = [
        FlatLayout([torch.empty_like(tensor, device="meta") for tensor in tensors])
        for tensors in (published, gradients)
    ]
    worker.group.agree("the tensors to exchange", [layout.describe() for layout in layouts])
    return layouts[0], layouts[1]
