"""Tensors to safetensors and back, bit for bit.

A file begins with the length of its header (uint64, little endian) and the header: JSON with the kind, the shape and
the place of each tensor in what follows. It is written from the tensors' own memory: the library's `save` would copy
all of it first, which takes as much memory again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import torch

from lockstep.errors import CheckpointError
from lockstep.tensors import norms_of

if TYPE_CHECKING:
    from torch import Tensor

FROZEN = "frozen"
"""The key in the values of a checkpoint for the names of the parameters that are not trained, by section."""

Tensors: TypeAlias = "Mapping[str, Mapping[str, Tensor]]"
"""Section ("parameters", "buffers", "slots", "average", "generator.parameters") -> name -> tensor."""

_SECTION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_RESERVED = "__metadata__"
_KINDS = {
    "torch.bool": "BOOL",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.int16": "I16",
    "torch.int32": "I32",
    "torch.int64": "I64",
    "torch.uint16": "U16",
    "torch.uint32": "U32",
    "torch.uint64": "U64",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
    "torch.float64": "F64",
}
"""What the format calls a dtype, by the dtype's name."""
_NAMES_OF_KINDS = {kind: name.removeprefix("torch.") for name, kind in _KINDS.items()}
_MAX_HEADER_BYTES = 100_000_000
"""The library takes no longer ones, either."""
_MOST_ELEMENTS = 2**63 - 1
"""Elements of a shape, whose sides of 0 count as 1, as its strides do."""


def check_saveable(tensors: Tensors) -> None:
    """See whether all of it can be saved."""
    for section, members in tensors.items():
        if not _SECTION.fullmatch(section):
            raise CheckpointError(
                f"{section!r} cannot be a section of a checkpoint.",
                given=repr(section),
                expected="1 to 100 letters, digits, '_', '-' and '.', the first no '.' or '-': it names a file",
                hint="rename the section (or the state that it belongs to)",
            )
        for name, tensor in members.items():
            _check_name(section, name)
            _check_kind(section, name, tensor)


def find_nonfinite(tensors: Tensors, frozen: Mapping[str, Sequence[str]]) -> list[str]:
    """The tensors that nothing can go on from: `'conv.weight' of parameters`. All are given by section and name.

    Trained parameters, their averages and their slots have to be finite. Elsewhere infinities may be meant, as in a
    mask, and in what is `frozen`; NaN is not. One pass over the memory, which takes a fifth of the time of a hash, and
    one read of each device.
    """
    on_device: dict[torch.device, dict[tuple[str, str], Tensor]] = {}
    for section, members in tensors.items():
        for name, tensor in members.items():
            if tensor.is_floating_point():
                # Of 8 bits torch computes nothing.
                wide = tensor.float() if tensor.itemsize == 1 else tensor
                on_device.setdefault(tensor.device, {})[section, name] = wide
    # Norms are fast, and overflow: a tensor whose norm is not finite is looked at closely.
    suspects = {
        place: values[place]
        for values in on_device.values()
        for place, norm in zip(values, norms_of([*values.values()]), strict=True)
        if not math.isfinite(norm)
    }
    still = {section: set(names) for section, names in frozen.items()}

    def must_be_finite(section: str, name: str) -> bool:
        state, dot, kind = section.rpartition(".")
        if kind == "slots":
            return True
        if kind == "parameters":
            return name not in still.get(section, ())
        return kind == "average" and name in tensors.get(f"{state}{dot}parameters", {})

    return [
        f"{name!r} of {section}"
        for (section, name), tensor in suspects.items()
        if not (tensor.isfinite() if must_be_finite(section, name) else ~tensor.isnan()).all()
    ]


def size_bytes(tensors: Tensors) -> int:
    """What the tensors take on the disk, without the headers of the files."""
    return sum(tensor.numel() * tensor.element_size() for members in tensors.values() for tensor in members.values())


def encode_tensors(members: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """A safetensors file in parts: its header, then each tensor; those that share memory are written each in full."""
    names = names_in_file(members)
    header: dict[str, Any] = {_RESERVED: dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor, start = members[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _KINDS[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        yield _memory_of(members[name])


def names_in_file(members: Mapping[str, Tensor]) -> list[str]:
    """The order of the tensors in a file: wide kinds first, as the library has them; then each tensor is aligned."""
    return sorted(members, key=lambda name: (-members[name].element_size(), name))


def can_encode(tensor: Tensor) -> bool:
    """Whether the format has a place for such a tensor: a dense one with data, of a dtype that it knows."""
    return str(tensor.dtype) in _KINDS and tensor.layout is torch.strided and not tensor.is_meta


def _memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; its own memory where it lies so on the CPU."""
    dense = tensor.detach().cpu().resolve_neg().contiguous().reshape(-1)
    memory: memoryview = dense.view(torch.uint8).numpy().data
    return memory


def decode_tensors(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, contiguous, on the CPU, none sharing memory with another.

    Raises:
        ValueError: the bytes are no safetensors file.
    """
    return read_tensors(BytesIO(data), len(data))[0]


def read_tensors(file: BinaryIO, size_bytes: int) -> tuple[dict[str, Tensor], list[bytes | memoryview]]:
    """The tensors of a safetensors file of this size, read to where they lie: the library's `load` would copy them.

    Returns:
        The tensors by name, and all bytes of the file, in parts.

    Raises:
        ValueError: it is no safetensors file.
    """
    length = file.read(8)
    if not 8 + (header_bytes := int.from_bytes(length, "little")) <= min(size_bytes, _MAX_HEADER_BYTES):
        raise ValueError(f"a header of {header_bytes:,} bytes")
    text = file.read(header_bytes)
    tensors: dict[str, Tensor] = {}
    parts: list[bytes | memoryview] = [length, text]
    for name, dtype, shape, num_bytes in _layout(text, size_bytes - 8 - header_bytes):
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        parts.append(memory.numpy().data)
        if num_bytes and file.readinto(parts[-1]) != num_bytes:  # type: ignore[attr-defined]
            raise ValueError(f"it ends within the tensor {name!r}")
        tensors[name] = memory.view(dtype).reshape(shape)
    return tensors, parts


def _layout(header: bytes, size_bytes: int) -> list[tuple[str, torch.dtype, torch.Size, int]]:
    """Name, dtype, shape and bytes of the tensors by a header, in the order in which they fill so many bytes."""
    found: list[tuple[int, int, str, torch.dtype, torch.Size]] = []
    try:
        for name, entry in json.loads(header).items():
            if name == _RESERVED:
                continue
            dtype: torch.dtype = getattr(torch, _NAMES_OF_KINDS[entry["dtype"]])
            shape, (start, end) = torch.Size(entry["shape"]), entry["data_offsets"]
            is_shape = isinstance(entry["shape"], list) and min(shape, default=0) >= 0
            is_shape = is_shape and math.prod(max(side, 1) for side in shape) <= _MOST_ELEMENTS
            if not is_shape or not type(start) is type(end) is int:
                raise TypeError(f"{shape} from {start!r} to {end!r}")
            if end - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"the tensor {name!r} of shape {[*shape]} from byte {start} to {end}")
            found.append((start, end, name, dtype, shape))
    except (AttributeError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"a header that is none ({error!r})") from error
    found.sort(key=lambda each: each[:2])
    place = 0
    for start, end, name, *_ in found:
        if start != place:
            raise ValueError(f"the tensor {name!r} from byte {start}, where byte {place} follows")
        place = end
    if place != size_bytes:
        raise ValueError(f"tensors of {place:,} bytes in {size_bytes:,}")
    return [(name, dtype, shape, end - start) for start, end, name, dtype, shape in found]


def _check_name(section: str, name: str) -> None:
    if name == _RESERVED or not _is_utf8(name):
        raise CheckpointError(
            f"The tensor {name!r} of {section!r} cannot be saved under this name.",
            given=repr(name),
            expected=f"any text that UTF-8 can encode, other than {_RESERVED!r}",
            hint="rename the parameter or buffer",
        )


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_kind(section: str, name: str, tensor: Tensor) -> None:
    if not can_encode(tensor):
        raise CheckpointError(
            f"The tensor {name!r} of {section!r} is of a kind that cannot be saved.",
            given=f"{tensor.dtype}, {tensor.layout}, on {tensor.device}",
            expected="a dense tensor with data, of "
            + ", ".join(sorted(name.removeprefix("torch.") for name in _KINDS)),
            hint="convert it (`to_dense()`, `view_as_real`, `view(torch.int64)`), or keep it in a plain attribute",
        )


JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


def encode_values(values: Mapping[str, JSON]) -> bytes:
    """The bytes of `values.json`.

    Raises:
        CheckpointError: a value that JSON does not give back as it was; it is named.
    """
    for name, value in values.items():
        if not is_json(value):
            raise CheckpointError(
                f"The value {name!r} cannot be saved as JSON.",
                given=repr(value)[:200],
                expected="None, bool, int, finite float, str, and lists and dicts (with str as keys) of these",
                hint="save tuples and arrays as lists, and leave out what is not a number",
            )
    return (json.dumps(dict(values), indent=1) + "\n").encode()


def decode_values(data: bytes) -> dict[str, Any]:
    """What was in `values.json`.

    Raises:
        ValueError: the bytes are no JSON object.
    """
    values = json.loads(data)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


def is_json(value: JSON) -> bool:
    """Whether JSON gives a value back as it was."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False
