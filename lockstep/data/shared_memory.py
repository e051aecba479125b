"""Shared memory in which a loader process passes batches to its trainer, reused once a batch is freed.

A memory is a memfd that both processes map: nothing is left behind when either dies. Reuse pays because the first touch
of a page costs seven times as much as the copy into it.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.ragged import Ragged

_ALIGNMENT = 64
# Batches of different sizes find room in the same memory.
_STEP_BYTES = 1 << 20


class Parcel(NamedTuple):
    """A batch whose tensors lie in a memory."""

    tree: Any
    """The batch, with each tensor replaced by a `StoredTensor`, and each `Ragged` by a `StoredRagged`."""
    memory: int
    size: int
    """Size in bytes of a memory new to the trainer, whose descriptor follows; 0 for one that it knows."""
    given_up: Sequence[int]
    """Memories that are no longer used."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place of a tensor in a memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def within(self, memory: Tensor) -> Tensor:
        """Return the tensor, a view of the memory."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return memory[self.offset : self.offset + num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class StoredRagged:
    """Places of both tensors of a `Ragged` in a memory."""

    values: StoredTensor
    lengths: StoredTensor

    def within(self, memory: Tensor) -> Ragged:
        """Return the ragged values, views of the memory."""
        return Ragged(self.values.within(memory), self.lengths.within(memory))


class SentMemories:
    """The memories of a loader process, which writes batches into them."""

    def __init__(self) -> None:
        self._memories: dict[int, Tensor] = {}
        self._free: set[int] = set()
        self._count = 0

    def use_again(self, memories: Sequence[int]) -> None:
        """Mark memories as free: the trainer has freed their batches."""
        self._free.update(memories)

    def packed(self, result: Any) -> tuple[Parcel, int | None]:
        """Copy the tensors of a result to a memory; returns also the descriptor of a memory new to the trainer."""
        tensors: list[tuple[StoredTensor, Tensor]] = []
        size = 0

        def placed(value: Tensor | Ragged) -> StoredTensor | StoredRagged:
            if isinstance(value, Ragged):
                return StoredRagged(placed_tensor(value.values), placed_tensor(value.lengths))
            return placed_tensor(value)

        def placed_tensor(tensor: Tensor) -> StoredTensor:
            nonlocal size
            stored = StoredTensor(size, tuple(tensor.shape), tensor.dtype)
            tensors.append((stored, tensor))
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            return stored

        tree = map_leaves(result, (Tensor, Ragged), placed)
        number = next((each for each in self._free if len(self._memories[each]) >= size), None)
        given_up: list[int] = []
        descriptor, new_size = None, 0
        if number is None:
            given_up = list(self._free)  # All of them are too small.
            new_size = (size // _STEP_BYTES + 1) * _STEP_BYTES
            number, descriptor = self._made(new_size)
        for each in given_up:
            del self._memories[each]
        self._free.difference_update([number, *given_up])
        for stored, tensor in tensors:
            stored.within(self._memories[number]).copy_(tensor)
        return Parcel(tree, number, new_size, given_up), descriptor

    def _made(self, size: int) -> tuple[int, int]:
        descriptor = os.memfd_create("lockstep-batch")
        try:
            os.ftruncate(descriptor, size)
            memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        except BaseException:
            os.close(descriptor)
            raise
        self._count += 1
        self._memories[self._count] = memory
        return self._count, descriptor


class ReceivedMemories:
    """The memories of a loader process in its trainer, which reads batches from them."""

    def __init__(self) -> None:
        self._memories: dict[int, mmap.mmap] = {}
        self._unused: list[int] = []

    def unused(self) -> list[int]:
        """Return the memories whose last tensor was freed since the last call; tensors are freed on any thread."""
        return [self._unused.pop() for _ in range(len(self._unused))]

    def unpacked(self, parcel: Parcel, descriptor: Callable[[], int]) -> Any:
        """Return the result, its tensors views of the memory; `descriptor` is called, and closed, for a new memory."""
        for each in parcel.given_up:
            del self._memories[each]
        if parcel.size:
            new = descriptor()
            try:
                self._memories[parcel.memory] = mmap.mmap(new, parcel.size)
            finally:
                os.close(new)
        # Tensors keep this array alive, not the mapping itself, which is kept here.
        array = np.frombuffer(self._memories[parcel.memory], dtype=np.uint8)
        weakref.finalize(array, self._unused.append, parcel.memory)
        memory = torch.frombuffer(array, dtype=torch.uint8)
        return map_leaves(parcel.tree, (StoredTensor, StoredRagged), lambda stored: stored.within(memory))


def map_leaves(tree: Any, kinds: tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """Apply a function to every value of these kinds in a tree of dicts, lists and tuples."""
    if isinstance(tree, kinds):
        return function(tree)
    if isinstance(tree, dict):
        return {name: map_leaves(value, kinds, function) for name, value in tree.items()}
    if hasattr(tree, "_fields") and isinstance(tree, tuple):  # a NamedTuple
        return type(tree)(*(map_leaves(value, kinds, function) for value in tree))
    if type(tree) in (list, tuple):
        return type(tree)(map_leaves(value, kinds, function) for value in tree)
    return tree
