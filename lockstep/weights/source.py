"""What every file of weights is to the rest: names, shapes, and tensors that are read when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: str
    """As torch calls it ("float32"); of a kind that torch has not, as the file calls it."""
    num_bytes: int
    """Of its content, in memory."""


@runtime_checkable
class WeightSource(Protocol):
    """A file, or several that belong together, with named tensors. Opening it reads no tensor."""

    @property
    def path(self) -> Path:
        """Where it lies."""
        ...

    @property
    def kind(self) -> str:
        """What it is, in words: "TensorFlow checkpoint (V2)"."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Its tensors by name, in the order of the file."""
        ...

    def read(self, name: str) -> Tensor:
        """A tensor, whole and contiguous, on the CPU.

        Raises:
            CheckpointError: there is no such tensor, it is damaged, or torch has no such kind.
        """
        ...
