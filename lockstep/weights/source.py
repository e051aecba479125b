"""What every file of weights is to the rest: names, shapes, and tensors that are read when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.checks import check_type, wrong_type
from lockstep.errors import CheckpointError, InputError


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


Values = Mapping[str, Tensor | npt.NDArray[Any]]

_HINT = 'give a dict such as {"conv1.weight": tensor}'


class MemorySource:
    """Tensors and NumPy arrays by name; they are not copied until they are read.

    Args:
        values: dense ones; the mapping is copied, the values are not.
        name: what messages call them.

    Raises:
        InputError: a value is neither, or of a kind that torch has not.
    """

    kind = "values in memory"

    def __init__(self, values: Values, name: str = "memory") -> None:
        check_type("values", values, Mapping, expected="tensors or arrays by name", hint=_HINT)
        self.path = Path(name)
        self._values = dict(values)
        self.tensors: Mapping[str, TensorInfo] = {name: _info(name, value) for name, value in values.items()}

    def read(self, name: str) -> Tensor:
        """A tensor of its own, contiguous, on the CPU.

        Raises:
            CheckpointError: there is no such value.
        """
        if name not in self._values:
            raise CheckpointError(
                f"There is no tensor {name!r} in {self.path}.",
                given=repr(name),
                expected=f"one of {', '.join(map(repr, self._values)) or 'none at all'}",
                hint="ask for a name that is listed",
            )
        value = self._values[name]
        if isinstance(value, Tensor):
            return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return torch.from_numpy(_native(value))


def _info(name: str, value: object) -> TensorInfo:
    """What is known of a value, without a copy of it."""
    check_type("A name of values", name, str, expected="text", hint=_HINT)
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise _unusable(name, f"{value.layout}, on {value.device}, {value.dtype}")
        return TensorInfo(tuple(value.shape), str(value.dtype).removeprefix("torch."), value.nbytes)
    if not isinstance(value, np.ndarray):
        raise wrong_type(f"values[{name!r}]", value, expected="a tensor or a NumPy array", hint=_HINT)
    try:
        dtype = torch.from_numpy(_native(value[:0] if value.ndim else value)).dtype
    except TypeError as error:
        raise _unusable(name, f"dtype {value.dtype}") from error
    return TensorInfo(value.shape, str(dtype).removeprefix("torch."), value.nbytes)


def _native(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy that is contiguous and in the byte order of this machine."""
    return np.array(value, dtype=value.dtype.newbyteorder("="), order="C")


def _unusable(name: str, given: str) -> InputError:
    return InputError(
        f"values[{name!r}] cannot be loaded.",
        given=given,
        expected="numbers, all there, in memory",
        hint="give a dense tensor or an array of numbers",
    )
