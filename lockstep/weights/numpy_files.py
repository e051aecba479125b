"""NumPy's files: one array (.npy), or an archive of several by name (.npz). Arrays of Python objects are refused."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from lockstep.errors import CheckpointError
from lockstep.weights.source import (
    MOST_EXPANSION,
    ZIP_FAULTS,
    TensorInfo,
    check_zip_count,
    damaged_file,
    damaged_tensor,
    entry_of,
    not_numbers,
    readable,
    tensor_of,
    torch_name,
)

if TYPE_CHECKING:
    from torch import Tensor

ENDING = ".npy"

_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_MOST_DIMENSIONS = 64
_COMPRESSIONS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}


class _Header(NamedTuple):
    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def info(self) -> TensorInfo:
        kind = torch_name(self.dtype)
        return TensorInfo(self.shape, kind or f"NumPy's {self.dtype}", self.num_bytes)


class NumpyFile:
    """One array, whose name is that of the file without its ending. It has no checksum."""

    kind = "NumPy array"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = path.name.removesuffix(ENDING)
        with _faults(path), path.open("rb") as file:
            self.tensors: Mapping[str, TensorInfo] = {self._name: self._header(file).info}

    def read(self, name: str) -> Tensor:
        """Read the array, contiguous."""
        entry_of(name, self.tensors, self.path)
        with _faults(self.path), self.path.open("rb") as file:
            return _values(file, self._header(file), name, self.path)

    def _header(self, file: IO[bytes]) -> _Header:
        size = file.seek(0, 2)
        file.seek(0)
        return _header(file, size, self._name, self.path)


class NumpyArchive:
    """An archive of arrays by name; the checksum of each is verified when it is read."""

    kind = "NumPy archive"

    def __init__(self, path: Path) -> None:
        self.path = path
        with _faults(path), zipfile.ZipFile(path) as archive:
            check_zip_count(archive, path)
            size = path.stat().st_size
            self._entries = {entry.filename.removesuffix(ENDING): entry for entry in archive.infolist()}
            for name, entry in self._entries.items():
                _check_entry(entry, size, name, path)
            self.tensors: Mapping[str, TensorInfo] = {name: self._header(archive, name) for name in self._entries}

    def read(self, name: str) -> Tensor:
        """Read an array, contiguous, and verify its checksum."""
        entry = entry_of(name, self._entries, self.path)
        with _faults(self.path, name), zipfile.ZipFile(self.path) as archive, archive.open(entry) as file:
            header = _header(file, entry.file_size, name, self.path)
            return _values(file, header, name, self.path)

    def _header(self, archive: zipfile.ZipFile, name: str) -> TensorInfo:
        entry = self._entries[name]
        with _faults(self.path, name), archive.open(entry) as file:
            return _header(file, entry.file_size, name, self.path).info


def _check_entry(entry: zipfile.ZipInfo, archive_bytes: int, name: str, path: Path) -> None:
    """Refuse sizes that cannot be, before anything is read."""
    if entry.compress_type not in _COMPRESSIONS:
        raise damaged_tensor(
            name, path, given=f"compression {entry.compress_type}", expected="none (0) or deflate (8), as NumPy has it"
        )
    most = entry.compress_size * (MOST_EXPANSION if entry.compress_type == zipfile.ZIP_DEFLATED else 1)
    if entry.compress_size > archive_bytes or entry.file_size > most:
        raise damaged_tensor(
            name,
            path,
            given=f"{entry.file_size} bytes in {entry.compress_size} of an archive of {archive_bytes}",
            expected=f"at most {min(most, archive_bytes * MOST_EXPANSION)} bytes",
        )


def _header(file: IO[bytes], size: int, name: str, path: Path) -> _Header:
    """Read the header of an array; both together take `size` bytes."""
    header = _read_header(file, name, path)
    if header.dtype.hasobject:
        raise CheckpointError(
            f"The array {name!r} of {path} holds Python objects, which may run code when they are loaded.",
            given="an array of objects, pickled",
            expected="arrays of numbers",
            hint="where you trust the file, save its arrays by name: "
            "np.savez('weights.npz', **np.load(FILE, allow_pickle=True).item())",
        )
    left = size - file.tell()
    if len(header.shape) > _MOST_DIMENSIONS or min(header.shape, default=0) < 0 or header.num_bytes != left:
        raise damaged_tensor(
            name,
            path,
            given=f"{left} bytes after the header",
            expected=f"{header.num_bytes} for {header.dtype} of the shape {header.shape[:_MOST_DIMENSIONS]}",
        )
    return header


def _read_header(file: IO[bytes], name: str, path: Path) -> _Header:
    version: tuple[int, ...] = ()
    try:
        version = npy.read_magic(file)
        return _Header(*_READERS[version](file))
    except OSError:
        raise
    except Exception as error:  # the library has no one kind of error for what is damaged
        what = f"version {version} of the format" if version and version not in _READERS else str(error)
        raise damaged_tensor(
            name, path, given=what, expected="a header of version 1.0 or 2.0, as NumPy writes it for numbers"
        ) from error


def _values(file: IO[bytes], header: _Header, name: str, path: Path) -> Tensor:
    if torch_name(header.dtype) is None:
        raise not_numbers(name, path, f"NumPy's {header.dtype}")
    data = file.read(header.num_bytes)
    if len(data) < header.num_bytes:
        raise damaged_tensor(name, path, given=f"{len(data)} bytes", expected=f"{header.num_bytes} bytes")
    array = np.frombuffer(data, header.dtype)
    return tensor_of(array.reshape(header.shape, order="F" if header.is_fortran else "C"))


@contextmanager
def _faults(path: Path, name: str | None = None) -> Iterator[None]:
    """Turn what `zipfile` and the system raise into errors that name the file, or an array in it."""
    try:
        with readable(path):
            yield
    except ZIP_FAULTS as error:
        if name is not None:
            raise damaged_tensor(name, path, given=str(error), expected="an array as NumPy writes it") from error
        raise damaged_file(
            path, "is no file of NumPy's, or is damaged or cut short", given=str(error), expected="a whole file"
        ) from error
