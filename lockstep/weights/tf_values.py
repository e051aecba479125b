"""The values of a TensorProto, as checkpoints of version 1 store them: each kind in a field of its own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.records import example
from lockstep.records.protobuf import FOUR_BYTES, VARINT, WITH_LENGTH, MalformedError
from lockstep.weights.tf_dtypes import from_bytes
from lockstep.weights.tf_messages import Message

_EIGHT_BYTES = 1
# Numbers of the fields with packed values, by data type: float_val, double_val, scomplex_val, dcomplex_val ...
_FIXED = {
    torch.float32: (5, FOUR_BYTES),
    torch.float64: (6, _EIGHT_BYTES),
    torch.complex64: (9, FOUR_BYTES),
    torch.complex128: (12, _EIGHT_BYTES),
}
# ... and int_val, int64_val, bool_val, half_val (the bits of a half), with what an integer there is cast to.
_VARINTS: dict[torch.dtype, tuple[int, npt.DTypeLike]] = {
    torch.int32: (7, np.int32),
    torch.uint8: (7, np.uint8),
    torch.int16: (7, np.int16),
    torch.int8: (7, np.int8),
    torch.uint16: (7, np.uint16),
    torch.int64: (10, np.int64),
    torch.bool: (11, np.bool_),
    torch.float16: (13, np.uint16),
}


def values_of(message: Message, dtype: torch.dtype) -> Tensor:
    """The values in one dimension.

    Raises:
        MalformedError: they are no such numbers; or version 1 has no field for their kind.
    """
    if dtype in _FIXED:
        return _fixed(message, dtype, *_FIXED[dtype])
    if dtype not in _VARINTS:
        raise MalformedError(f"{dtype}, which version 1 does not have,", 0)
    number, stored = _VARINTS[dtype]
    spans = message.spans(number) + message.spans(number, VARINT)
    values = example.feature_values(message.data, example.Feature(example.INT64S, spans))
    return torch.from_numpy(np.asarray(values).astype(stored)).view(dtype)


def _fixed(message: Message, dtype: torch.dtype, number: int, wire_type: int) -> Tensor:
    spans = message.spans(number, WITH_LENGTH) + message.spans(number, wire_type)
    data = b"".join(message.data[start:stop] for start, stop in spans)
    if len(data) % dtype.itemsize:
        raise MalformedError(f"{len(data)} bytes of {dtype.itemsize} each", spans[0][0])
    return from_bytes(data, dtype)
