"""TensorFlow checkpoints of both versions.

Version 2 has PREFIX.index, a table of tensors, and PREFIX.data-?????-of-?????, their bytes. Version 1 has tables of
slices of tensors, with a list of them under the empty key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.records.protobuf import MalformedError
from lockstep.records.tfrecord import masked_crc32c
from lockstep.weights.source import (
    TensorInfo,
    check_present,
    damaged_file,
    damaged_tensor,
    entry_of,
    not_numbers,
    readable,
)
from lockstep.weights.tf_table import INDEX, Table
from lockstep.weights.tf_tensors import (
    BundleEntry,
    BundleHeader,
    Message,
    NotWholeError,
    SavedTensor,
    Slice,
    check_reader_version,
    data_type,
    from_bytes,
    join_slices,
    least_version,
    proto_values,
    slice_key,
    slice_ranges,
    text_of,
)

_HEADER_KEY = b""
# The keys of slices begin so; no tensor's name does.
_SLICE_KEY = b"\0"


class TensorBundle:
    """A checkpoint of version 2. Opening it reads its index; a tensor is read, and its checksum verified, on demand.

    A partitioned variable is one tensor, joined from its slices. Names are those of variables ("conv1/weights") or of
    an object graph ("model/kernel/.ATTRIBUTES/VARIABLE_VALUE"). Tensors of strings, such as the description of that
    graph, are listed and cannot be read. Only the files of the tensors that are read must be there.

    As in TensorFlow's `core/util/tensor_bundle`. `prefix` is the path of the files without their endings.
    """

    kind = "TensorFlow checkpoint (V2)"

    def __init__(self, prefix: Path) -> None:
        self.path = prefix
        self._index = prefix.with_name(prefix.name + INDEX)
        values = dict(Table(self._index).items())
        try:
            self._header = self._read_header(values.pop(_HEADER_KEY, None))
            self._entries = {key: BundleEntry.of(Message(value)) for key, value in values.items()}
        except MalformedError as fault:
            raise damaged_file(
                self._index, "is damaged", given=fault.what, expected="the description of a tensor in each entry"
            ) from None
        self._names = self._by_text([key for key in self._entries if not key.startswith(_SLICE_KEY)])
        found = {name: self._entries[key] for name, key in self._names.items()}
        self.tensors: Mapping[str, TensorInfo] = {
            name: data_type(entry.dtype).info(entry.shape, entry.size) for name, entry in found.items()
        }

    def read(self, name: str) -> Tensor:
        """Read a tensor, whole and contiguous, and verify its checksums.

        Raises:
            CheckpointError: there is no such tensor, it is damaged or not whole, its file is not there
                (MissingFileError), or torch has no such kind.
        """
        entry = self._entries[entry_of(name, self._names, self._index)]
        kind = data_type(entry.dtype)
        if kind.dtype is None:
            raise not_numbers(name, self._index, kind.name)
        if entry.slices:
            return self._joined(name, entry, kind.dtype)
        return self._values(name, entry, kind.dtype).reshape(entry.shape)

    def _read_header(self, value: memoryview | None) -> BundleHeader:
        """Read the header, and refuse that of a later version."""
        header = BundleHeader.of(Message(value or b""))
        if header.num_shards < 1:
            raise damaged_file(
                self._index,
                "is no index of a checkpoint of version 2",
                given="a table without a header",
                expected="the number of files in an entry with an empty key",
            )
        check_reader_version(header.least_version, self._index)
        return header

    def _by_text(self, keys: Sequence[bytes]) -> dict[str, bytes]:
        """The keys by name; two of one name are refused, as escapes can make them."""
        names: dict[str, bytes] = {}
        for key in keys:
            other = names.setdefault(text_of(key), key)
            if other != key:
                raise damaged_file(
                    self._index,
                    "has two tensors of one name",
                    given=f"{other!r} and {key!r}, both {text_of(key)!r} as text",
                    expected="names that are UTF-8, as TensorFlow writes them",
                )
        return names

    def _joined(self, name: str, whole: BundleEntry, dtype: torch.dtype) -> Tensor:
        """Join the slices of a partitioned tensor."""
        try:
            places = slice_ranges(whole.slices, whole.shape)
        except NotWholeError as fault:
            raise damaged_tensor(name, self._index, given=str(fault), expected="slices that make it whole") from None
        pieces = [
            self._slice(name, slice_key(name, extents), whole, tuple(part.stop - part.start for part in place))
            for extents, place in zip(whole.slices, places, strict=True)
        ]
        self._check_room(name, pieces, math.prod(whole.shape) * dtype.itemsize)
        return join_slices(whole.shape, dtype, places, (self._values(name, piece, dtype) for piece in pieces))

    def _slice(self, name: str, key: bytes, whole: BundleEntry, shape: tuple[int, ...]) -> BundleEntry:
        entry = self._entries.get(key)
        if entry is None or (entry.dtype, entry.shape, entry.slices) != (whole.dtype, shape, ()):
            found = f"of {data_type(entry.dtype).name} and the shape {entry.shape}" if entry else "absent"
            raise damaged_tensor(
                name,
                self._index,
                given=f"a slice that is {found}",
                expected=f"one of {data_type(whole.dtype).name} and the shape {shape}",
            )
        return entry

    def _check_room(self, name: str, pieces: Sequence[BundleEntry], claimed: int) -> None:
        """Refuse a tensor of more bytes than its files have: several slices may claim the same ones."""
        there = sum(_size_of(path) for path in {self._data_file(name, piece) for piece in pieces})
        if claimed > there:
            raise damaged_tensor(
                name, self._index, given=f"{claimed} bytes in slices", expected=f"at most the {there} of its files"
            )

    def _values(self, name: str, entry: BundleEntry, dtype: torch.dtype) -> Tensor:
        """Read the values of an entry, in one dimension."""
        num_bytes = math.prod(entry.shape) * dtype.itemsize
        if entry.size != num_bytes:
            raise damaged_tensor(
                name,
                self._index,
                given=f"{entry.size} bytes",
                expected=f"{num_bytes} for {dtype} of the shape {entry.shape}",
            )
        path = self._data_file(name, entry)
        data = _read(path, name, entry)
        if (found := masked_crc32c(data)) != entry.crc:
            raise damaged_tensor(
                name,
                path,
                given=f"{len(data)} bytes at byte {entry.offset} with the checksum {found:#010x}",
                expected=f"{entry.size} bytes with the checksum {entry.crc:#010x}, which the index has for them",
            )
        return from_bytes(data, dtype, big_endian=self._header.is_big_endian)

    def _data_file(self, name: str, entry: BundleEntry) -> Path:
        count = self._header.num_shards
        if entry.shard >= count:
            raise damaged_tensor(
                name, self._index, given=f"file {entry.shard}", expected=f"one of {count} files, counted from 0"
            )
        path = self.path.with_name(f"{self.path.name}.data-{entry.shard:05}-of-{count:05}")
        check_present(self.path, [path], count)
        return path


def _read(path: Path, name: str, entry: BundleEntry) -> bytes:
    """Read the bytes of an entry; their place is compared with the file's size before memory is taken."""
    size, end = _size_of(path), entry.offset + entry.size
    if end > size:
        raise damaged_tensor(name, path, given=f"a file of {size} bytes", expected=f"at least {end} bytes")
    with readable(path), path.open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.size)


def _size_of(path: Path) -> int:
    with readable(path):
        return path.stat().st_size


_CONTENTS_KEY = b""


class _Stored(NamedTuple):
    """A tensor, and the tables of its slices."""

    dtype: int
    shape: tuple[int, ...]
    slices: list[tuple[Slice, Table]]


class TensorTables:
    """A checkpoint of version 1, in one file or in several. Opening it reads its contents; a tensor is read on demand.

    The checksum of every block that is read is verified. A partitioned variable is one tensor, joined from its slices.
    Tensors of strings are listed and cannot be read. `path` is that of the file, or the pattern of all `files`.

    As in TensorFlow's `core/util/tensor_slice_reader.cc`.
    """

    kind = "TensorFlow checkpoint (V1)"

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self.path = path
        self._stored: dict[str, _Stored] = {}
        for file in files:
            table = Table(file)
            for tensor in _contents(table):
                self._add(tensor, table)
        self.tensors: Mapping[str, TensorInfo] = {
            name: data_type(stored.dtype).info(stored.shape) for name, stored in self._stored.items()
        }

    def read(self, name: str) -> Tensor:
        """Read a tensor, whole and contiguous, and verify the checksums of its blocks."""
        stored = entry_of(name, self._stored, self.path)
        kind = data_type(stored.dtype)
        if kind.dtype is None:
            raise not_numbers(name, self.path, kind.name)
        try:
            places = slice_ranges([extents for extents, _ in stored.slices], stored.shape)
        except NotWholeError as fault:
            raise self._damaged(name, self.path, str(fault)) from None
        # All are read before the whole is allocated: a shape may lie, the values are there.
        pieces = [
            self._values(name, kind.dtype, extents, table, math.prod(part.stop - part.start for part in place))
            for (extents, table), place in zip(stored.slices, places, strict=True)
        ]
        return join_slices(stored.shape, kind.dtype, places, pieces)

    def _add(self, tensor: SavedTensor, table: Table) -> None:
        stored = self._stored.setdefault(tensor.name, _Stored(tensor.dtype, tensor.shape, []))
        if (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
            raise damaged_tensor(
                tensor.name,
                table.path,
                given=f"{data_type(tensor.dtype).name} of the shape {tensor.shape}",
                expected=f"{data_type(stored.dtype).name} of the shape {stored.shape}, as the files before have it",
            )
        stored.slices.extend((extents, table) for extents in tensor.slices)

    def _values(self, name: str, dtype: torch.dtype, extents: Slice, table: Table, count: int) -> Tensor:
        """Read the values of a slice, in one dimension."""
        try:
            value = table.get(slice_key(name, extents))
        except CheckpointError as error:
            raise self._damaged(name, table.path, str(error.given)) from error
        if value is None:
            raise self._damaged(name, table.path, f"no slice with starts and lengths {extents}")
        try:
            saved = Message(value).message(2)
            if saved.text(1) != name:
                raise self._damaged(name, table.path, f"a slice of {saved.text(1)!r} in its place")
            values = proto_values(saved.message(3), dtype)
        except MalformedError as fault:
            raise self._damaged(name, table.path, f"{fault.what} at byte {fault.place} of a slice") from None
        if len(values) != count:
            raise self._damaged(name, table.path, f"{len(values)} values in a slice of {count}")
        return values

    def _damaged(self, name: str, path: Path, given: str) -> CheckpointError:
        return damaged_tensor(name, path, given=given, expected="slices that make it whole, each with its values")


def _contents(table: Table) -> list[SavedTensor]:
    try:
        found = Message(table.get(_CONTENTS_KEY) or b"").messages(1)
        versions = [least_version(contents.message(2)) for contents in found]
        tensors = [SavedTensor.of(message) for contents in found for message in contents.messages(1)]
    except MalformedError as fault:
        raise damaged_file(
            table.path, "is damaged", given=fault.what, expected="the contents of the file in its first entry"
        ) from None
    if not found:
        raise damaged_file(
            table.path,
            "is no checkpoint of version 1",
            given="a table without contents",
            expected="these in an entry with an empty key",
        )
    check_reader_version(max(versions), table.path)
    return tensors
