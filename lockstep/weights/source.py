"""Sources of named tensors: the interface, tensors in memory, and the errors and checks that readers of files share."""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from lockstep.checks import check_type, wrong_type
from lockstep.errors import CheckpointError, InputError, NotFoundError
from lockstep.listing import shorten
from lockstep.storage.remote_path import AnyPath

if TYPE_CHECKING:
    from torch import Tensor

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: str
    """As torch calls it ("float32"); of a kind that torch has not, as the file calls it."""
    num_bytes: int
    """Size of its content, in memory."""

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype) -> TensorInfo:
        """What is known of a tensor of this shape and dtype."""
        return cls(tuple(shape), str(dtype).removeprefix("torch."), math.prod(shape) * dtype.itemsize)


@runtime_checkable
class WeightSource(Protocol):
    """A file, or several that belong together, with named tensors. Opening it reads no tensor."""

    @property
    def path(self) -> Path:
        """The file, or what the files have in common."""
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


Values: TypeAlias = "Mapping[str, Tensor | npt.NDArray[Any]]"

_HINT = 'give a dict such as {"conv1.weight": tensor}'


class MemorySource:
    """Dense tensors and NumPy arrays by name; they are not copied until they are read, but the mapping is."""

    kind = "values in memory"

    def __init__(self, values: Values, name: str = "memory") -> None:
        check_type("values", values, Mapping, expected="tensors or arrays by name", hint=_HINT)
        self.path = Path(name)
        self._values = dict(values)
        self.tensors: Mapping[str, TensorInfo] = {name: _info(name, value) for name, value in values.items()}

    def read(self, name: str) -> Tensor:
        """A tensor of its own, contiguous, on the CPU."""
        if name not in self._values:
            raise CheckpointError(
                f"There is no tensor {name!r} in {self.path}.",
                given=repr(name),
                expected=f"one of {', '.join(map(repr, self._values)) or 'none at all'}",
                hint="ask for a name that is listed",
            )
        value = self._values[name]
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return tensor_of(value)


def _info(name: str, value: object) -> TensorInfo:
    """What is known of a value, without a copy of it."""
    check_type("A name of values", name, str, expected="text", hint=_HINT)
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise _unusable(name, f"{value.layout}, on {value.device}, {value.dtype}")
        return TensorInfo.of(value.shape, value.dtype)
    if not isinstance(value, np.ndarray):
        raise wrong_type(f"values[{name!r}]", value, expected="a tensor or a NumPy array", hint=_HINT)
    if (dtype := torch_name(value.dtype)) is None:
        raise _unusable(name, f"dtype {value.dtype}")
    return TensorInfo(value.shape, dtype, value.nbytes)


def torch_name(dtype: np.dtype[Any]) -> str | None:
    """The name that torch has for a dtype of NumPy, in either byte order; None where it has none."""
    try:
        same = torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        return None
    return str(same).removeprefix("torch.")


def tensor_of(array: npt.NDArray[Any]) -> Tensor:
    """Copy an array into a tensor, contiguous and in the byte order of this machine."""
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _unusable(name: str, given: str) -> InputError:
    return InputError(
        f"values[{name!r}] cannot be loaded.",
        given=given,
        expected="numbers, all there, in memory",
        hint="give a dense tensor or an array of numbers",
    )


class MissingFileError(CheckpointError):
    """One of the files of a checkpoint is not there."""


def damaged_file(path: Path, what: str, *, given: str, expected: str) -> CheckpointError:
    """The error for a file of which `what` is true: "is cut short"."""
    return CheckpointError(f"{path} {what}.", given=given, expected=expected, hint="copy the checkpoint again")


def damaged_tensor(name: str, path: Path, *, given: str, expected: str) -> CheckpointError:
    """The error for a tensor that is not what was written."""
    return CheckpointError(
        f"The tensor {name!r} of {path} is damaged.",
        given=given,
        expected=expected,
        hint="copy the checkpoint again, or leave this tensor out",
    )


@contextmanager
def readable(path: AnyPath) -> Iterator[None]:
    """Name the file where it cannot be opened or read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read.",
            given=f"{type(error).__name__}: {error.strerror or error}",
            expected="a file of the checkpoint",
            hint="copy all files of the checkpoint, and see that they may be read",
        ) from error


def check_present(checkpoint: Path, files: Sequence[Path], count: int) -> None:
    """Refuse a checkpoint of `count` files of which some of these are not there.

    Raises:
        MissingFileError: naming them.
    """
    if missing := [file.name for file in files if not file.exists()]:
        raise MissingFileError(
            f"The checkpoint {checkpoint} is not whole.",
            given=f"no file {shorten(missing)}",
            expected=f"all of its {count} files of values" if count > 1 else "its file of values",
            hint="copy what is missing from where the checkpoint was written",
        )


def entry_of(name: str, entries: Mapping[str, Entry], path: Path) -> Entry:
    """What a checkpoint lists under the name of a tensor; refuses a name that is not there."""
    if name not in entries:
        raise NotFoundError(
            f"{path} has no tensor {name!r}.",
            given=repr(name),
            expected=f"the name of one of its {len(entries)} tensors",
            hint="list its tensors, and name one of these",
        )
    return entries[name]


def not_numbers(name: str, path: Path, kind: str) -> CheckpointError:
    """The error for a tensor whose dtype torch does not have."""
    return CheckpointError(
        f"The tensor {name!r} of {path} holds what torch has no kind for.",
        given=f"values of type {kind}",
        expected="floating-point numbers, integers, complex numbers or booleans",
        hint="leave this tensor out",
    )


ZIP_MAGIC, EMPTY_ZIP = b"PK\x03\x04", b"PK\x05\x06"

MOST_EXPANSION = 1032
"""The most bytes that deflate makes of one (zlib's technical details)."""

ZIP_FAULTS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError)
"""What `zipfile` raises for a damaged archive, beside OSError."""

# The record at the end of an archive (APPNOTE.TXT, 4.3.16), which a comment may follow.
_END, _MOST_COMMENT_BYTES = struct.Struct("<4s4H2LH"), (1 << 16) - 1
_UNCOUNTED = 0xFFFF
"""The count that the record has for so many files or more."""


def check_zip_count(archive: zipfile.ZipFile, path: Path) -> None:
    """Compare the number of files that are listed with the number that the end of the archive has.

    The library does not: an entry of the list whose length is damaged hides those that follow it.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _END.size - _MOST_COMMENT_BYTES))
        tail = file.read()
    count, found = _END.unpack_from(tail, tail.rindex(EMPTY_ZIP))[4], len(archive.infolist())
    if count not in (found, _UNCOUNTED):
        raise zipfile.BadZipFile(f"its end says that it has {count} files, and {found} are found")
