"""Tensors to safetensors and back, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from safetensors.torch import load, save
from torch import Tensor

from lockstep.errors import CheckpointError

Tensors = Mapping[str, Mapping[str, Tensor]]
"""Section ("parameters", "buffers", "slots", "average", "generator.parameters") -> name -> tensor."""

_SECTION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_RESERVED = "__metadata__"
_DTYPES = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}


def check(tensors: Tensors) -> None:
    """See whether all of it can be saved.

    Raises:
        CheckpointError: the name of a section or tensor, or a kind of tensor, that the files cannot hold.
    """
    for section, members in tensors.items():
        if not _SECTION.fullmatch(section):
            raise CheckpointError(
                f"{section!r} cannot be a section of a checkpoint.",
                given=repr(section),
                expected="1 to 100 letters, digits, '_', '-' and '.', the first no '.' or '-': it names a file",
                mend="rename the section (or the state that it belongs to)",
            )
        for name, tensor in members.items():
            _check_name(section, name)
            _check_kind(section, name, tensor)


def size_bytes(tensors: Tensors) -> int:
    """What the tensors take on the disk, without the headers of the files."""
    return sum(tensor.numel() * tensor.element_size() for members in tensors.values() for tensor in members.values())


def encode(members: Mapping[str, Tensor]) -> bytes:
    """The bytes of a safetensors file; tensors that share memory are written one by one, each in full."""
    dense: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in members.items():
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage().data_ptr()
        dense[name] = own.clone() if storage in storages else own
        storages.add(storage)
    return save(dense)


def decode(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, contiguous, on the CPU, none sharing memory with another.

    Raises:
        ValueError: the bytes are no safetensors file.
    """
    try:
        return load(data)
    except Exception as error:  # safetensors has an error of its own, and for some headers others
        raise ValueError(str(error)) from error


def _check_name(section: str, name: str) -> None:
    if name == _RESERVED or not _is_utf8(name):
        raise CheckpointError(
            f"The tensor {name!r} of {section!r} cannot be saved under this name.",
            given=repr(name),
            expected=f"any text that UTF-8 can encode, other than {_RESERVED!r}",
            mend="rename the parameter or buffer",
        )


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_kind(section: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
        raise CheckpointError(
            f"The tensor {name!r} of {section!r} is of a kind that cannot be saved.",
            given=f"{tensor.dtype}, {tensor.layout}, on {tensor.device}",
            expected="a dense tensor with data, of "
            + ", ".join(sorted(str(d).removeprefix("torch.") for d in _DTYPES)),
            mend="convert it (`to_dense()`, `view_as_real`, `view(torch.int64)`), or register it with persistent=False",
        )
