"""Files of safetensors: https://github.com/huggingface/safetensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from lockstep.errors import CheckpointError
from lockstep.weights.source import TensorInfo, damaged_file, entry_of, readable

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""The name of a dtype in torch, by its kind in a file."""


class SafetensorsFile:
    """A file of safetensors. It has no checksums; opening it verifies the places and sizes of all tensors."""

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._faults():
            opened: Any = safe_open(path, framework="pt")  # the library has types for some of what it does
            self._file = opened
            slices = {name: self._file.get_slice(name) for name in self._file.offset_keys()}
            self.tensors: Mapping[str, TensorInfo] = {name: _info(each) for name, each in slices.items()}
            self.metadata: Mapping[str, str] = self._file.metadata() or {}

    def read(self, name: str) -> Tensor:
        """Read a tensor, whole and contiguous."""
        entry_of(name, self.tensors, self.path)
        with self._faults():
            # A copy: the file is mapped into memory, and somebody may write to it.
            tensor: Tensor = self._file.get_tensor(name).clone()
        return tensor

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            with readable(self.path):
                yield
        except CheckpointError:
            raise
        except Exception as error:  # the library has an error of its own, and for some headers others
            raise damaged_file(
                self.path,
                "is no file of safetensors, or is damaged or cut short",
                given=str(error),
                expected="a header that describes all bytes of the file",
            ) from error


def _info(part: Any) -> TensorInfo:
    shape, kind = tuple(part.get_shape()), part.get_dtype()
    return TensorInfo.of(shape, getattr(torch, _DTYPES[kind])) if kind in _DTYPES else TensorInfo(shape, kind, 0)
