"""The reader of small examples in TFRecord files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.readers import Cost
from lockstep.data.template import Field, Template, UInt8s, read_each
from lockstep.data.tfrecord import HEAD_BYTES, TAIL_BYTES, Int64s, RecordFile


class Records:
    """Small examples, all of the same fields, in files of `tf.train.Example` records.

    The files are mapped into memory: they may be replaced by others while they are read, but not cut short.
    Every record's checksum is verified when it is first read.

    Args:
        paths: the files, whose records follow one another.
        fields: which feature becomes which field of a batch.

    Raises:
        DataError: a file cannot be opened, is cut short, or holds something else than records.
    """

    cost: Cost = "memory"

    def __init__(self, paths: Sequence[Path], fields: Mapping[str, Field]) -> None:
        self._files = [_File(path, fields) for path in paths]
        self._starts = np.cumsum([0, *map(len, self._files)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """The fields of these examples.

        Raises:
            DataError: a record is damaged, is no example, or has not got the fields.
        """
        files = np.searchsorted(self._starts, indices, side="right") - 1
        places = [np.flatnonzero(files == file) for file in np.unique(files)]
        parts = [self._part(int(files[rows[0]]), indices[rows]) for rows in places]
        if len(parts) == 1:
            return parts[0]
        back = torch.from_numpy(np.argsort(np.concatenate(places)))
        return {name: torch.cat([part[name] for part in parts])[back] for name in parts[0]}

    def example_id(self, index: int) -> str:
        """Its file, and its number in there."""
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        return f"{self._files[file].path.name}:{index - self._starts[file]}"

    def _part(self, file: int, indices: Int64s) -> dict[str, Any]:
        return self._files[file].read(indices - self._starts[file])


class _File:
    """One of the files, and what has been found out about it."""

    def __init__(self, path: Path, fields: Mapping[str, Field]) -> None:
        self.path = path
        self._records = RecordFile(path)
        self._fields = fields
        self._verified = np.zeros(len(self._records), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: Int64s) -> dict[str, Tensor]:
        """The fields of these records of the file, by template if they follow it."""
        self._verify(indices)
        fields = None
        if self._rows is not None:
            fields = self._template.read(self._rows[indices])
        if fields is None:
            fields = read_each(((self._records.read(i, verify=False), self._name(i)) for i in indices), self._fields)
        return fields

    def _verify(self, indices: Int64s) -> None:
        """Check the checksums of those that are read for the first time."""
        for index in indices[~self._verified[indices]]:
            self._records.read(index)
            self._verified[index] = True

    @cached_property
    def _template(self) -> Template:
        return Template(self._records.read(0), self._fields, self._name(0))

    @cached_property
    def _rows(self) -> UInt8s | None:
        """The payloads as an array of shape (records, length); None where their lengths differ."""
        length = int(self._records.lengths[0])
        if (self._records.lengths != length).any():
            return None
        shape = len(self), HEAD_BYTES + length + TAIL_BYTES
        with self.path.open("rb") as file:
            data = np.frombuffer(mmap(file.fileno(), shape[0] * shape[1], access=ACCESS_READ), dtype=np.uint8)
        return data.reshape(shape)[:, HEAD_BYTES:-TAIL_BYTES]

    def _name(self, record: int) -> str:
        return f"Record {record} of {self.path}"
