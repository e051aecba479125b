"""Reads the records of TFRecord files in any order; `tfrecord.read_all` reads them from start to end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.errors import DataError
from lockstep.records.index_cache import Cache, ranges_through
from lockstep.records.open_files import FilePart, OpenFiles, check_unchanged, open_file, read_stored, stored_range
from lockstep.records.record_index import MEMORY_LIMIT_BYTES, index_of, too_large
from lockstep.records.shards import Paths, find_shards
from lockstep.records.tfrecord import (
    HEAD_BYTES,
    TAIL_BYTES,
    InflateError,
    RecordSource,
    inflated_blocks,
    verify_payload,
)
from lockstep.screen import log
from lockstep.storage.remote_path import AnyPath, RemotePath
from lockstep.tracing import reading_listener

UInt8s = npt.NDArray[np.uint8]

_THREADS = 16
"""Files whose indices are made at once: of a store with the answers 50 ms late, so many fill a link of 1 Gb/s."""


class RecordFile:
    """The records of one file, in any order. It may be forked and pickled, and read by several threads.

    A plain file is read record by record. A compressed one is decompressed into memory when it is first read.

    Args:
        memory_limit_bytes: refuse a compressed file that takes more, before memory is taken.
        open_files: shared by many files, so that few are open at a time.
        cache: the folder where its index is kept; by default in the user's cache.
    """

    def __init__(
        self,
        path: AnyPath,
        *,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
        open_files: OpenFiles | None = None,
        cache: Cache = None,
    ) -> None:
        self.path = path
        self.index = index_of(path, memory_limit_bytes, cache)
        self._source = RecordSource(path, self.index.compression)
        self._open_files = open_files or OpenFiles(ranges=ranges_through(cache))
        self._memory: mmap | None = None
        self.is_stored = isinstance(self.path, RemotePath) and not self.index.compression
        """Whether records are read from an object store."""

    def __len__(self) -> int:
        return len(self.index.lengths)

    @property
    def summary(self) -> str:
        """The file's number of records, its size and the checksum of all records."""
        return f"{len(self)} records, {self.index.version.size_bytes} bytes, crc32c {self.index.checksum:08x}"

    def read(self, record: int, verify: bool = True) -> bytes:
        """Read the payload of a record, and verify its checksum unless `verify` is false."""
        return self.checked(record, self.framed(record), verify)[:-TAIL_BYTES]

    def read_named(self, record: int, verify: bool = True) -> tuple[bytes, str]:
        """Read the payload of a record as `read` does; also return what `describe` says of it."""
        return self.read(record, verify), self.describe(record)

    def framed(self, record: int) -> bytes:
        """Read the payload of a record with the checksum that follows it, and compare nothing."""
        if self.index.compression:
            _, _, size, offset = self.place(record)
            return self.memory[offset : offset + size]
        return self._open_files.read(*self.place(record))

    def place(self, record: int) -> FilePart:
        """Return where the payload of a record with its checksum is, in the file or in what it is decompressed to."""
        index = self.index
        size = int(index.lengths[record]) + TAIL_BYTES
        return FilePart(self.path, index.version, size, int(index.offsets[record]))

    def checked(self, record: int, data: bytes, verify: bool) -> bytes:
        """Return what was read at the record's place, once the checksum is compared, unless `verify` is false."""
        if verify:
            try:
                verify_payload(data, self._source, record, self._start(record))
            except DataError:
                if not self.is_stored:
                    raise
                # It may have been damaged on its way here, and been kept so.
                self._open_files.ranges.forget(stored_range(self.place(record)))
                data = self.framed(record)
                verify_payload(data, self._source, record, self._start(record))
        return data

    def describe(self, record: int) -> str:
        """Name a record by its number, file and byte: the subject of a sentence, for errors."""
        return self._source.describe(record, self._start(record))

    def _start(self, record: int) -> int:
        """Return where the frame of a record starts."""
        return int(self.index.offsets[record]) - HEAD_BYTES

    def contents(self) -> UInt8s:
        """All bytes of the file, read-only: a plain one mapped, a compressed one decompressed."""
        index = self.index
        if index.compression:
            return np.frombuffer(self.memory, dtype=np.uint8, count=index.size_bytes)
        with open_file(self.path) as file:
            check_unchanged(file, self.path, index.version)
        # Python's mmap would hold a descriptor for each file.
        contents = torch.from_file(str(self.path), shared=False, size=index.size_bytes, dtype=torch.uint8)
        return np.asarray(contents)

    @property
    def memory(self) -> mmap:
        """The content of a compressed file, decompressed on first use; processes forked later share it."""
        if self._memory is None:  # no cached_property: in Python 3.11 all files share its lock, in forked processes too
            self._memory = self._decompressed()
        return self._memory

    def _decompressed(self) -> mmap:
        index = self.index
        try:
            memory = mmap(-1, max(1, index.size_bytes))
        except OSError as error:
            raise too_large(str(self.path), f"{index.size_bytes} bytes", f"no more than is free: {error}") from error
        with open_file(self.path) as file:
            check_unchanged(file, self.path, index.version)
            try:
                for block in inflated_blocks(file):
                    memory.write(block)
            except InflateError as error:
                ends = index.offsets + index.lengths + TAIL_BYTES
                whole = int(np.searchsorted(ends, memory.tell(), side="right"))
                raise error.of(self._source, whole, int(ends[whole - 1]) if whole else 0) from None
        return memory

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": None}


class RecordFiles:
    """The records of many files, one after the other, in any order. It may be forked and pickled, and read by threads.

    At most 128 files are open at a time. Compressed files are decompressed into memory at once, so that loader
    processes share it; each worker has its own.

    Args:
        paths: a path, a pattern such as "train-*" or "train-?????-of-00128", or several of these.
        verify: compare the checksums of payloads when they are read; those of lengths always are.
        memory_limit_bytes: refuse compressed files that together take more, before memory is taken.
        cache: the folder where indices are kept; by default in the user's cache.
    """

    def __init__(
        self, paths: Paths, *, verify: bool = True, memory_limit_bytes: int = MEMORY_LIMIT_BYTES, cache: Cache = None
    ) -> None:
        self.verify = verify
        self._ranges = ranges_through(cache)
        open_files = OpenFiles(ranges=self._ranges)
        open_file = partial(RecordFile, memory_limit_bytes=memory_limit_bytes, open_files=open_files, cache=cache)
        with ThreadPoolExecutor(_THREADS) as pool:
            self.files = list(pool.map(open_file, find_shards(paths)))
            compressed = [file for file in self.files if file.index.compression]
            _check_memory(compressed, memory_limit_bytes)
            for _ in pool.map(lambda file: file.memory, compressed):
                pass
        self._ranges.expect(sum(file.index.version.size_bytes for file in self.files if file.is_stored))
        self.starts = [0, *accumulate(map(len, self.files))]
        """Index of the first record of each file, and at the end the number of all records."""

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, index: int) -> bytes:
        """Read the payload of a record."""
        file, record = self.locate(index)
        return file.read(record, self.verify)

    def read_each(self, indices: Iterable[int]) -> Iterator[tuple[bytes, str]]:
        """Yield each record's payload, followed by its checksum of `TAIL_BYTES`, and its description.

        The record that is being read is reported to `tracing`. Those in an object store are all read with the first.
        """
        report = reading_listener()
        located = [self.locate(index) for index in indices]
        places = [file.place(record) for file, record in located if file.is_stored]
        if report and places:  # what is waited for here is told as the first one
            report(f"{located[0][0].path.name}:{located[0][1]}")
        stored = iter(read_stored(self._ranges, places))
        for file, record in located:
            if report:
                report(f"{file.path.name}:{record}")
            data = next(stored) if file.is_stored else file.framed(record)
            yield file.checked(record, data, self.verify), file.describe(record)

    def locate(self, index: int) -> tuple[RecordFile, int]:
        """Return the file that holds a record, and the record's number in it."""
        if not 0 <= index < self.starts[-1]:
            raise IndexError(f"there is no record {index} in {len(self)} records")
        file = bisect_right(self.starts, index) - 1
        return self.files[file], index - self.starts[file]

    def describe(self, index: int) -> str:
        """Name a record by its number in its file, the file and the byte: the subject of a sentence, for errors."""
        file, record = self.locate(index)
        return file.describe(record)

    def example_id(self, index: int) -> str:
        """Return the name of a record's file, and the record's number in it: "train-00000-of-00002:17"."""
        file, record = self.locate(index)
        return f"{file.path.name}:{record}"


def _check_memory(files: Sequence[RecordFile], limit_bytes: int) -> None:
    """Refuse compressed files that together take too much."""
    total = sum(file.index.size_bytes for file in files)
    if files:
        log.info("%d compressed files take %.1f MB of memory", len(files), total / 1e6)
    if total > limit_bytes:
        others = f" (and {len(files) - 1} other files)" if len(files) > 1 else ""
        raise too_large(f"{files[0].path}{others}", f"{total} bytes", f"at most {limit_bytes} bytes")
