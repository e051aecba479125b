"""TensorFlow's data types, by their numbers in `core/framework/types.proto`, and those of torch's that are the same."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

STRING = 7


class Kind(NamedTuple):
    """What the values of a tensor are."""

    name: str
    """Torch's ("float32"); TensorFlow's ("DT_STRING") where torch has none."""
    dtype: torch.dtype | None
    """None where torch has none."""

    def num_bytes(self, count: int) -> int:
        """Of so many values in memory; 0 where torch has no such kind."""
        return count * self.dtype.itemsize if self.dtype else 0


# Quantised integers mean nothing without the range that they stand for, which TensorFlow keeps elsewhere.
_WITHOUT_TORCH = {
    0: "DT_INVALID",
    STRING: "DT_STRING",
    11: "DT_QINT8",
    12: "DT_QUINT8",
    13: "DT_QINT32",
    15: "DT_QINT16",
    16: "DT_QUINT16",
    20: "DT_RESOURCE",
    21: "DT_VARIANT",
    27: "DT_FLOAT8_E4M3B11FNUZ",
    29: "DT_INT4",
    30: "DT_UINT4",
    31: "DT_INT2",
    32: "DT_UINT2",
    33: "DT_FLOAT4_E2M1FN",
}
_WITH_TORCH = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    8: torch.complex64,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    17: torch.uint16,
    18: torch.complex128,
    19: torch.float16,
    22: torch.uint32,
    23: torch.uint64,
    24: torch.float8_e5m2,
    25: torch.float8_e4m3fn,
    26: torch.float8_e4m3fnuz,
    28: torch.float8_e5m2fnuz,
}
_KINDS = {number: Kind(name, None) for number, name in _WITHOUT_TORCH.items()} | {
    number: Kind(str(dtype).removeprefix("torch."), dtype) for number, dtype in _WITH_TORCH.items()
}


def kind_of(number: int) -> Kind:
    """The kind of a data type, by its number."""
    return _KINDS.get(number) or Kind(f"DataType({number})", None)


def from_bytes(data: bytes, dtype: torch.dtype, *, big_endian: bool = False) -> Tensor:
    """Values in one dimension, from the bytes of all of them in turn; of a complex number each part is swapped."""
    if not data:
        return torch.empty(0, dtype=dtype)
    unit = dtype.itemsize // (2 if dtype.is_complex else 1)
    stored = np.dtype(f"{'>' if big_endian else '<'}u{unit}")
    values = torch.from_numpy(np.frombuffer(data, stored).astype(stored.newbyteorder("=")))
    # A byte that is neither 0 nor 1 is no boolean of torch's.
    return values.ne(0) if dtype == torch.bool else values.view(dtype)
