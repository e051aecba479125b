"""TensorFlow checkpoints of version 1: tables of slices of tensors, with a list of them under the empty key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.records.protobuf import MalformedError
from lockstep.weights.source import TensorInfo, damaged_file, damaged_tensor, no_tensor, not_numbers
from lockstep.weights.tf_messages import Message, SavedTensor, Slice, check_reader_version, least_version
from lockstep.weights.tf_table import Table
from lockstep.weights.tf_tensors import NotWholeError, data_type, join_slices, proto_values, slice_key, slice_ranges

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
        self.tensors: Mapping[str, TensorInfo] = {name: _info(stored) for name, stored in self._stored.items()}

    def read(self, name: str) -> Tensor:
        """Read a tensor, whole and contiguous, and verify the checksums of its blocks."""
        if name not in self._stored:
            raise no_tensor(name, self.path, len(self._stored))
        stored = self._stored[name]
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
    """The tensors that a file lists."""
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


def _info(stored: _Stored) -> TensorInfo:
    kind = data_type(stored.dtype)
    return TensorInfo(stored.shape, kind.name, kind.num_bytes(math.prod(stored.shape)))
