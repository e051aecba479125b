"""Reads small examples in TFRecord files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.readers.combine import read_by_source
from lockstep.readers.fingerprint import Fingerprint, named_parts, tells_options
from lockstep.readers.reader import Cost
from lockstep.records.index_cache import Cache, local_copy
from lockstep.records.record_files import RecordFile, RecordFiles
from lockstep.records.record_index import Int64s
from lockstep.records.shards import Paths, find_shards
from lockstep.records.template import Field, Template, UInt8s, read_each
from lockstep.records.tfrecord import FRAME_BYTES, HEAD_BYTES, TAIL_BYTES


class OfRecordFiles:
    """Base of the readers of records, which are named and told apart by their files."""

    _records: RecordFiles

    def __len__(self) -> int:
        return len(self._records)

    def example_id(self, index: int) -> str:
        """Return the name of its file, and its number in that file."""
        return self._records.example_id(index)

    def fingerprint(self) -> Fingerprint:
        """Return the number of records, size and checksum of all records, for each file."""
        return named_parts((file.path.name, file.summary) for file in self._records.files)


@tells_options
class Records(OfRecordFiles):
    """Small examples, all of the same fields, in files of `tf.train.Example` records.

    The files are mapped into memory: they may be replaced by others while they are read, but not cut short. Those of an
    object store are copied into the cache for it, once. Compressed ones are decompressed into memory. Every record's
    checksum is verified when it is first read.

    Args:
        paths: the files, whose records follow one another: a path, a pattern such as "train-*", or several of these.
        fields: which feature becomes which field of a batch.
        verify: whether checksums of payloads are compared.
        cache: the folder where the files' indices are kept; by default in the user's cache.
    """

    cost: Cost = "memory"

    def __init__(self, paths: Paths, fields: Mapping[str, Field], *, verify: bool = True, cache: Cache = None) -> None:
        self._records = RecordFiles([local_copy(path, cache) for path in find_shards(paths)], cache=cache)
        self._files = [_File(file, fields, verify) for file in self._records.files]
        self._names = [str(file.path) for file in self._records.files]
        self._starts = np.array(self._records.starts)

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the fields of these examples."""
        return read_by_source(self._starts, indices, self._names, lambda i, own: self._files[i].read(own))


class _File:
    """One file, with its template and the records whose checksums were verified."""

    def __init__(self, records: RecordFile, fields: Mapping[str, Field], verify: bool) -> None:
        self._records = records
        self._fields = fields
        self._verified = np.full(len(records), not verify)

    def read(self, indices: Int64s) -> dict[str, Tensor]:
        """Return the fields of these records of the file, by the template if they follow it."""
        for index in indices[~self._verified[indices]]:  # each checksum is verified when its record is first read
            self._records.read(index)
            self._verified[index] = True
        fields = None
        if self._rows is not None:
            fields = self._template.read(self._rows[indices])
        if fields is None:
            fields = read_each((self._records.read_named(i, verify=False) for i in indices), self._fields)
        return fields

    @cached_property
    def _template(self) -> Template:
        first, name = self._records.read_named(0, verify=not self._verified[0])
        return Template(first, self._fields, name)

    @cached_property
    def _rows(self) -> UInt8s | None:
        """The payloads as an array of shape (records, length); None if their lengths differ."""
        lengths = self._records.index.lengths
        if (lengths != lengths[0]).any():
            return None
        rows = self._records.contents().reshape(len(lengths), FRAME_BYTES + int(lengths[0]))
        return rows[:, HEAD_BYTES:-TAIL_BYTES]
