"""Parquet and Arrow IPC files (Feather's, too): tables of which any row can be read by itself, by pyarrow.

A file is groups of rows: Parquet's row groups, which its footer lists, or Arrow's record batches. Small columns, such
as labels, are read whole. Of a large one, such as that of images, no more is read for a row than is needed: of Parquet
on this machine the page that the row is in (`parquet_pages`), of other files the column's part of the group. What was
decoded last is kept, up to a number of bytes. Arrow files are mapped: of one without compression nothing is copied.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from lockstep.errors import DataError, LockstepError
from lockstep.records.arrow_batches import BatchHead, StoredBatch, batches_of_file, decoded_bytes, head_of
from lockstep.records.open_files import FilePart, OpenFiles, Version, open_file, read_stored
from lockstep.records.parquet_pages import (
    ColumnChunk,
    DamagedPageError,
    PageError,
    Pages,
    Values,
    chunk_of,
    index_places,
)
from lockstep.storage.remote_path import AnyPath, RemotePath

KEPT_BYTES = 256 << 20
"""Bytes of decoded pages and groups that a process keeps for the files of a reader."""

Leaf = tuple[str, ...]
"""A column, or a field within a column of structs: ("image", "bytes")."""

_BATCH_BYTES = 1000
"""What a batch takes of which nothing is copied, about."""

_LARGEST_COLUMN_BYTES = 8 << 30
_LARGEST_GROUP_BYTES = 4 << 30
_LARGEST_FOOTER_BYTES = 1 << 30
_LARGEST_INDEX_BYTES = 1 << 24
"""The size of a page index, and of a footer in which it is looked for, at most."""
_END_BYTES = 1 << 16
_AHEAD_BYTES = 1 << 24
"""The bytes of an object that are read at once to find pages, at most."""
_PARQUET, _FEATHER, _ARROW = b"PAR1", b"FEA1", b"ARROW1"


def load_pyarrow() -> Any:
    """Import pyarrow, which reads these files; a DataError says how to install it."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "Parquet and Arrow files cannot be read: a package is missing.",
            given=str(error),
            expected="lockstep-train with the extra [parquet]",
            hint='pip install "lockstep-train[parquet]"',
        ) from error
    return pyarrow


class Kept:
    """What was decoded last, up to a number of bytes. Threads share it; forked, a process has its own; pickled, none.

    The one that was asked for last is kept even if it has more.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self.most_bytes = most_bytes
        self._by_process: dict[int, _KeptHere] = {}

    def get(self, key: Any, make: Callable[[], tuple[Any, int]]) -> Any:
        """Return the value of a key: the one that is kept, or what `make` returns, with its number of bytes.

        Threads that ask for a key while it is being made wait for it, and it is made once.
        """
        here = self._here()
        with here.lock:
            if (kept := here.values.pop(key, None)) is not None:
                here.values[key] = kept
                return kept[0]
            if (made := here.being_made.get(key)) is None:
                here.being_made[key] = Future()
        if made is not None:
            return made.result()
        try:
            value, size = make()
        except BaseException as error:
            with here.lock:
                here.being_made.pop(key).set_exception(error)
            raise
        with here.lock:
            here.values[key] = (value, size)
            here.size_bytes += size
            while here.size_bytes > self.most_bytes and len(here.values) > 1:
                here.size_bytes -= here.values.pop(next(iter(here.values)))[1]
            here.being_made.pop(key).set_result(value)
        return value

    def sizes(self) -> list[tuple[Any, int]]:
        """List the values that are kept, with their numbers of bytes; the one that was asked for last comes last."""
        here = self._here()
        with here.lock:
            return [*here.values.values()]

    def _here(self) -> _KeptHere:
        """What this process keeps: one that was forked begins anew, as a lock may have been held, and a key made."""
        pid = os.getpid()
        if (here := self._by_process.get(pid)) is None:
            here = self._by_process.setdefault(pid, _KeptHere())
            for other in [*self._by_process]:
                if other != pid:
                    self._by_process.pop(other, None)
        return here

    def __reduce__(self) -> tuple[type[Kept], tuple[int]]:
        return Kept, (self.most_bytes,)


class _KeptHere:
    """What one process keeps."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while these are looked at, and not while a value is made."""
        self.values: dict[Any, tuple[Any, int]] = {}
        self.being_made: dict[Any, Future[Any]] = {}
        self.size_bytes = 0


class TableFile:
    """One file's table, read by parts. It may be forked, pickled, and read by several threads.

    What was decoded is kept, of all files of a reader.
    """

    kind: str
    """What the format is called."""

    def __init__(self, path: AnyPath, kept: Kept, files: OpenFiles) -> None:
        self.path, self.kept, self._files = path, kept, files
        with self._naming():
            status = path.stat()
            self.version = Version(status.st_size, status.st_mtime_ns)
            self.schema, lengths = self._look()
        self.starts: list[int] = [0, *accumulate(lengths)]
        """The first row of each group, and at the end the number of rows."""

    def __len__(self) -> int:
        return self.starts[-1]

    @property
    def summary(self) -> str:
        """The number of rows, the size, and a checksum of what the file says of its groups."""
        return f"{len(self)} rows, {self.version.size_bytes} bytes, crc32c {google_crc32c.value(self._layout()):08x}"

    def column(self, leaf: Leaf) -> Any:
        """Read a column of all rows: a chunked array of pyarrow."""
        with self._naming():
            return self._read(leaf)

    def value(self, leaf: Leaf, row: int) -> bytes | None:
        """Read one byte string of a column, by the number of its row in the file; None where it is null."""
        group = bisect_right(self.starts, row) - 1
        with self._naming(f"row {row}"):
            return self._value(leaf, group, row - self.starts[group])

    def bytes_read_for(self, leaf: Leaf) -> int:
        """The most bytes of a column that are read for one row, about."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Refuse a file that has changed since it was opened, by its size or its time of change."""
        status = self.path.stat()
        if (status.st_size, status.st_mtime_ns) != self.version:
            raise DataError(
                f"{self.path} has changed since it was opened.",
                given=f"{status.st_size} bytes, changed at {status.st_mtime_ns} ns",
                expected=f"{self.version.size_bytes} bytes, changed at {self.version.mtime_ns} ns",
                hint="start again, and leave the files alone while they are read",
            )

    def _look(self) -> tuple[Any, list[int]]:
        """Return the schema, and the number of rows of each group."""
        raise NotImplementedError

    def _layout(self) -> bytes:
        """What tells one file of these rows and this size from another."""
        raise NotImplementedError

    def _check_column(self, leaf: Leaf, size: int) -> None:
        """Refuse a column of which more bytes are to be in memory than fit."""
        if size > _LARGEST_COLUMN_BYTES:
            raise DataError(
                f"The column {'.'.join(leaf)} of {self.path} does not fit into memory.",
                given=f"{size} bytes or more",
                expected=f"labels, objects or paths, of at most {_LARGEST_COLUMN_BYTES} bytes a file",
                hint="name the column that holds them, or write the table to several files",
            )

    def _read(self, leaf: Leaf) -> Any:
        raise NotImplementedError

    def _value(self, leaf: Leaf, group: int, row: int) -> bytes | None:
        raise NotImplementedError

    def _bytes(self, size: int, offset: int) -> bytes:
        """Read a part of the file, of the version that was opened."""
        return self._files.read(self.path, self.version, size, offset)

    def _parts(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read parts of the file, each of a size from an offset on; those of an object all at once."""
        if not isinstance(self.path, RemotePath):
            return [self._bytes(*each) for each in wanted]
        return read_stored(self._files.ranges, [FilePart(self.path, self.version, *each) for each in wanted])

    def _source(self) -> Any:
        """Open the file for pyarrow, without mapping it: one that is cut short then is an error, and no signal."""
        pyarrow = load_pyarrow()
        if isinstance(self.path, RemotePath):
            return pyarrow.PythonFile(open_file(self.path, ranges=self._files.ranges), "r")
        return pyarrow.OSFile(str(self.path))

    def _mapped(self) -> Any:
        """Open the file for pyarrow, mapped if it is on this machine."""
        return self._source() if isinstance(self.path, RemotePath) else load_pyarrow().memory_map(str(self.path))

    @contextmanager
    def _naming(self, part: str = "") -> Iterator[None]:
        try:
            yield
        except (LockstepError, MemoryError):
            raise
        except Exception as error:  # damaged data raises anything
            raise DataError(
                f"{self.path}{part and ': ' + part} cannot be read.",
                given=f"{type(error).__name__}: {error}",
                expected=f"a whole {self.kind} file",
                hint="copy or write the file again",
            ) from error


class ParquetTable(TableFile):
    """A Parquet file."""

    kind = "Parquet"

    def _look(self) -> tuple[Any, list[int]]:
        with self._opened(None) as file:
            self.metadata = file.metadata
            columns = range(self.metadata.num_columns)
            self._places = {self.metadata.schema.column(number).path: number for number in columns}
            groups = range(self.metadata.num_row_groups)
            return file.schema_arrow, [self.metadata.row_group(group).num_rows for group in groups]

    def bytes_read_for(self, leaf: Leaf) -> int:
        """The bytes of the largest row group, unless values are read one by one, as of images by Snappy, too."""
        groups = range(len(self.starts) - 1)
        chunks = [self._chunk(leaf, group) for group in groups]
        if all(chunk and chunk.codec in (None, "snappy") for chunk in chunks):
            return 0
        return max((self._group_bytes(leaf, group) for group in groups), default=0)

    def _layout(self) -> bytes:
        size = self.version.size_bytes
        end = self._bytes(min(_END_BYTES, size), max(0, size - _END_BYTES))
        length = int.from_bytes(end[-8:-4], "little")
        if length + 8 <= len(end):
            return end[len(end) - 8 - length : -8]
        return self._bytes(min(length, _LARGEST_FOOTER_BYTES), max(0, size - 8 - length))

    def _read(self, leaf: Leaf) -> Any:
        size = sum(self._group_bytes(leaf, group) for group in range(len(self.starts) - 1)) + 8 * len(self)
        self._check_column(leaf, size)
        with self._opened(self.metadata) as file:
            return _part(file.read(columns=[".".join(leaf)], use_threads=False), leaf)

    def _value(self, leaf: Leaf, group: int, row: int) -> bytes | None:
        pages: Pages | None = self.kept.get((self.path, leaf, group), lambda: self._pages(leaf, group))
        if pages is not None:
            page, number = pages.find(row)
            values: Values | None = self.kept.get((self.path, leaf, group, page), lambda: _or_none(pages.values, page))
            if values is not None:
                return values[number]
        whole = self.kept.get((self.path, leaf, group, "whole"), lambda: self._group(leaf, group))
        value: bytes | None = whole[row].as_py()
        return value

    def _pages(self, leaf: Leaf, group: int) -> tuple[Any, int]:
        """Find the pages of a column in a row group, and how many bytes that takes; None if it is left to pyarrow."""
        chunk = self._chunk(leaf, group)
        if chunk is None:
            return None, 0
        if not isinstance(self.path, RemotePath):
            return _or_none(Pages, self._bytes, chunk, _decompressed)
        return _or_none(Pages, self._bytes, chunk, _decompressed, self._page_index(leaf, group), _AHEAD_BYTES)

    def _page_index(self, leaf: Leaf, group: int) -> bytes:
        """Read where the pages of a column in a row group are; none if its writer has not written it down."""
        place = self._places[".".join(leaf)]
        if not self.metadata.row_group(group).column(place).has_offset_index:
            return b""
        offset, size = self._index_places[group][place] if group < len(self._index_places) else (0, 0)
        return self._bytes(size, offset) if 0 < size <= _LARGEST_INDEX_BYTES and offset > 0 else b""

    @cached_property
    def _index_places(self) -> list[list[tuple[int, int]]]:
        """Where the page index of each column in each row group is: pyarrow does not tell."""
        with suppress(PageError):
            return index_places(footer) if len(footer := self._layout()) <= _LARGEST_INDEX_BYTES else []
        return []

    def _group(self, leaf: Leaf, group: int) -> tuple[Any, int]:
        """Decode a column in a row group by pyarrow, and tell how many bytes that takes."""
        if (size := self._group_bytes(leaf, group)) > _LARGEST_GROUP_BYTES:
            raise DataError(
                f"A row group of {self.path} does not fit into memory.",
                given=f"{size} bytes of the column {'.'.join(leaf)}, decoded as a whole",
                expected=f"at most {_LARGEST_GROUP_BYTES} bytes a row group",
                hint="write it again with smaller groups: pyarrow.parquet.write_table(table, path, row_group_size=100)",
            )
        self.check_unchanged()
        with self._opened(self.metadata) as file:
            values = _part(file.read_row_group(group, columns=[".".join(leaf)], use_threads=False), leaf)
        if len(values) != (count := self.metadata.row_group(group).num_rows):
            raise DamagedPageError(f"pages with {len(values)} values, in place of {count}")
        return values, values.nbytes

    def _chunk(self, leaf: Leaf, group: int) -> ColumnChunk | None:
        place = self._places[".".join(leaf)]
        return chunk_of(self.metadata.row_group(group).column(place), self.metadata.schema.column(place))

    def _group_bytes(self, leaf: Leaf, group: int) -> int:
        """The bytes of a column's part of a row group: of all leaves of a nested one."""
        name = ".".join(leaf)
        inside = [place for path, place in self._places.items() if path == name or path.startswith(f"{name}.")]
        row_group = self.metadata.row_group(group)
        return sum(row_group.column(place).total_uncompressed_size for place in inside)

    @contextmanager
    def _opened(self, metadata: Any) -> Iterator[Any]:
        pyarrow = load_pyarrow()
        with self._source() as source:
            yield pyarrow.parquet.ParquetFile(
                source, metadata=metadata, pre_buffer=False, page_checksum_verification=True
            )


class ArrowTable(TableFile):
    """A file of Arrow's IPC format, or a stream of it, as Hugging Face's datasets write it."""

    kind = "Arrow"

    def _look(self) -> tuple[Any, list[int]]:
        self._is_stream = self._bytes(len(_ARROW), 0) != _ARROW
        self._map: Any = None
        self._batches: list[Any] | None = None
        if self._is_stream:
            batches = self._stream()
            return self._schema, [batch.num_rows for batch in batches]
        with self._content() as source:
            schema = load_pyarrow().ipc.open_file(source).schema
        dictionaries, self._stored = batches_of_file(self._parts, self.version.size_bytes)
        self._check_fits(dictionaries, "The dictionaries")
        return schema, [batch.head.num_rows for batch in self._stored]

    def bytes_read_for(self, leaf: Leaf) -> int:
        """The bytes of a batch, unless they are mapped as they are."""
        if self._is_stream or len(self.starts) == 1:
            return 0
        size_bytes = self.version.size_bytes // (len(self.starts) - 1)
        return 0 if self._is_mapped else size_bytes

    def _layout(self) -> bytes:
        fields = [(field.name, str(field.type), field.nullable, _sorted(field.metadata)) for field in self.schema]
        return np.array(self.starts, np.int64).tobytes() + repr((fields, _sorted(self.schema.metadata))).encode()

    def _read(self, leaf: Leaf) -> Any:
        pyarrow = load_pyarrow()
        if self._is_stream:
            return _part(pyarrow.Table.from_batches(self._stream(), self._schema), leaf)
        batches, size = [], 0
        with self._opened(leaf) as file:
            for number, stored in enumerate(self._stored):
                self._check_fits([stored], f"The record batch {number}")
                batches.append(file.get_batch(number))
                self._check_column(leaf, size := size + batches[-1].nbytes)
            return _part(pyarrow.Table.from_batches(batches, pyarrow.schema([self.schema.field(leaf[0])])), leaf)

    def _value(self, leaf: Leaf, group: int, row: int) -> bytes | None:
        if isinstance(self.path, Path):
            self.check_unchanged()  # each time: what is mapped and has been cut short ends the process
        values = self.kept.get((self.path, leaf, group), lambda: self._decoded(leaf, group))
        found: bytes | None = values[row].as_py()
        return found

    def _decoded(self, leaf: Leaf, group: int) -> tuple[Any, int]:
        values = self._batch(leaf, group)
        return values, _BATCH_BYTES + self._copied_bytes(values)

    def _batch(self, leaf: Leaf, group: int) -> Any:
        pyarrow = load_pyarrow()
        if self._is_stream:
            return _part(pyarrow.Table.from_batches([self._stream()[group]]), leaf)
        self._check_fits([self._stored[group]], f"The record batch {group}")
        with self._opened(() if self._is_mapped else leaf) as file:  # pyarrow copies a column that it is asked for
            return _part(pyarrow.Table.from_batches([file.get_batch(group)]), leaf)

    @property
    def _is_mapped(self) -> bool:
        """Whether values are parts of the map as they are: of a file on this machine, not compressed."""
        return isinstance(self.path, Path) and not any(stored.head.is_compressed for stored in self._stored)

    def _check_fits(self, batches: Sequence[StoredBatch], what: str) -> None:
        """Refuse batches that are larger in memory than fit, before that is taken; what is mapped takes none."""
        if isinstance(self.path, Path):
            batches = [batch for batch in batches if batch.head.is_compressed]
        if (size := sum(decoded_bytes(self._parts, batch) for batch in batches)) > _LARGEST_GROUP_BYTES:
            raise DataError(
                f"{what} of {self.path} would not fit into memory.",
                given=f"{size} bytes, decoded as a whole",
                expected=f"at most {_LARGEST_GROUP_BYTES} bytes a record batch",
                hint="write it again with smaller batches: pyarrow.feather.write_feather(table, path, chunksize=100); "
                'or, on this machine, with compression="uncompressed"',
            )

    def _copied_bytes(self, values: Any) -> int:
        """The bytes of a column that are in memory by themselves: what is mapped as it is takes none."""
        if self._is_stream:
            return 0  # all of its batches are held
        arrays = [part for chunk in values.chunks for part in (chunk, getattr(chunk, "dictionary", None)) if part]
        buffers = [buffer for array in arrays for buffer in array.buffers() if buffer]
        start, stop = (self._map.address, self._map.address + self._map.size) if self._map else (0, 0)
        return sum(buffer.size for buffer in buffers if not start <= buffer.address < stop)

    @contextmanager
    def _opened(self, leaf: Leaf) -> Iterator[Any]:
        ipc = load_pyarrow().ipc
        with self._content() as source:
            places = [ipc.open_file(source).schema.get_field_index(name) for name in leaf[:1]]
            yield ipc.open_file(source, options=ipc.IpcReadOptions(included_fields=places, use_threads=False))

    def _content(self) -> Any:
        """Open the file for pyarrow; one of this machine is mapped once a process, and its parts are parts of that."""
        if isinstance(self.path, RemotePath):
            return self._source()
        self.check_unchanged()  # what is mapped and has been cut short ends the process
        if self._map is None:
            with self._mapped() as source:
                self._map = source.read_buffer()
        return load_pyarrow().BufferReader(self._map)

    def _stream(self) -> list[Any]:
        """The batches of a stream, which are found by walking it once; they are mapped."""
        if self._batches is None:
            if not isinstance(self.path, Path):
                raise DataError(
                    f"{self.path} is a stream of Arrow's, which is read where it can be mapped.",
                    given="a stream in an object store",
                    expected="a Parquet file, a file of Arrow's IPC format, or a copy on this machine",
                    hint="copy it; or write it again with to_parquet",
                )
            ipc = load_pyarrow().ipc
            with self._mapped() as source:
                heads = (_head(message) for message in ipc.MessageReader.open_stream(source))
                if any(head.is_compressed for head in heads if head):
                    raise DataError(
                        f"{self.path} is a stream of Arrow's that is compressed.",
                        given="record batches that would be decompressed and held in memory, all of them",
                        expected="a stream without compression, which is mapped; or a file of Arrow's IPC format",
                        hint="write it again without compression, as Hugging Face's datasets do, or to_parquet",
                    )
            with self._mapped() as source, ipc.open_stream(source) as stream:
                self._schema = stream.schema
                self._batches = list(stream)
        return self._batches

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None, "_map": None}


def open_table(path: AnyPath, kept: Kept, files: OpenFiles | None = None) -> TableFile:
    """Open a file by what it begins with. `files` reads its parts, through a cache if it is in an object store.

    Raises:
        DataError: it is neither a Parquet nor an Arrow file, or cut short.
    """
    files = files or OpenFiles()
    with open_file(path, ranges=files.ranges) as file:
        start = file.read(len(_ARROW))
    if start.startswith(_FEATHER):
        raise DataError(
            f"{path} is of the first version of Feather.",
            given="a file that begins with FEA1",
            expected="Parquet, Arrow IPC, or the second version of Feather",
            hint="write it again: pyarrow.feather.write_feather(table, path, compression='uncompressed')",
        )
    return (ParquetTable if start.startswith(_PARQUET) else ArrowTable)(path, kept, files)


def _or_none(make: Callable[..., Any], *given: Any) -> tuple[Any, int]:
    """Make what is kept, and its number of bytes; None if pages are not as we know them, which pyarrow may know."""
    try:
        values = make(*given)
    except DamagedPageError:
        raise
    except PageError:
        return None, 0
    return values, values.size_bytes


def _part(table: Any, leaf: Leaf) -> Any:
    """Return a column of a table, or a field of a column of structs."""
    column = table.column(leaf[0])
    for name in leaf[1:]:
        column = load_pyarrow().compute.struct_field(column, name)
    return column


def _decompressed(data: bytes, size: int, codec: str) -> bytes:
    found: bytes = load_pyarrow().decompress(data, decompressed_size=size, codec=codec, asbytes=True)
    return found


def _sorted(metadata: dict[bytes, bytes] | None) -> list[tuple[bytes, bytes]]:
    return sorted((metadata or {}).items())


def _head(message: Any) -> BatchHead | None:
    """Return what a message of a stream says of a batch; None for one that is none."""
    return head_of(message.metadata.to_pybytes()) if message.type in ("record batch", "dictionary") else None
