"""TensorFlow checkpoints of version 2: PREFIX.index, a table of tensors; PREFIX.data-?????-of-?????, their bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lockstep.records.protobuf import MalformedError
from lockstep.records.tfrecord import masked_crc32c
from lockstep.weights.source import (
    TensorInfo,
    check_present,
    damaged_file,
    damaged_tensor,
    no_tensor,
    not_numbers,
    unreadable_file,
)
from lockstep.weights.tf_messages import BundleEntry, BundleHeader, Message, check_reader_version, text_of
from lockstep.weights.tf_table import INDEX, Table
from lockstep.weights.tf_tensors import NotWholeError, data_type, from_bytes, join_slices, slice_key, slice_ranges

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
        self.tensors: Mapping[str, TensorInfo] = {name: _info(self._entries[key]) for name, key in self._names.items()}

    def read(self, name: str) -> Tensor:
        """Read a tensor, whole and contiguous, and verify its checksums.

        Raises:
            CheckpointError: there is no such tensor, it is damaged or not whole, its file is not there
                (MissingFileError), or torch has no such kind.
        """
        if name not in self._names:
            raise no_tensor(name, self._index, len(self._names))
        entry = self._entries[self._names[name]]
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
    try:
        with path.open("rb") as file:
            file.seek(entry.offset)
            return file.read(entry.size)
    except OSError as error:
        raise unreadable_file(path, error) from error


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable_file(path, error) from error


def _info(entry: BundleEntry) -> TensorInfo:
    kind = data_type(entry.dtype)
    num_bytes = kind.num_bytes(math.prod(entry.shape)) if kind.dtype else entry.size
    return TensorInfo(entry.shape, kind.name, num_bytes)
