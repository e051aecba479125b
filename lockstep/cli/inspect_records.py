"""What `lockstep inspect` says of record files: how many records, how large, what the first holds, what is damaged."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.cli.converting import size
from lockstep.errors import DataError
from lockstep.records.example import Values, parse_sequence_example
from lockstep.records.open_files import open_file
from lockstep.records.shards import find_shards
from lockstep.records.tfrecord import HEAD_BYTES, RecordSource, compression_of, is_head, read_all

_MOST_VALUES, _MOST_CHARACTERS = 4, 40


@dataclass(frozen=True)
class RecordsInFile:
    """The records of one file, all read and verified."""

    path: Path
    compression: str | None
    num_bytes: int
    """Of the file."""
    num_records: int
    """That are whole and verified; where one is damaged, those before it."""
    payload_bytes: int
    smallest: int
    largest: int
    problem: str
    """What is wrong with the record after these; "" if there is nothing."""


def record_files(path: str) -> list[Path]:
    """The files of records that a path names: a file, a pattern, or the folder of them; none if it names no records.

    Raises:
        DataError: a pattern matches nothing, or shards are missing.
    """
    whole = Path(path)
    if whole.is_dir():
        return [each for each in sorted(whole.iterdir()) if each.is_file() and _has_records(each)]
    if whole.is_file():
        return [whole] if _has_records(whole) else []
    return find_shards(path) if glob.has_magic(path) else []


def _has_records(path: Path) -> bool:
    """By its first bytes; of a compressed file, by its first record."""
    try:
        with open_file(path) as file:
            head = file.read(HEAD_BYTES)
        if is_head(head):
            return True
        return bool(compression_of(head, RecordSource(path))) and next(read_all(path, verify=False), None) is not None
    except DataError:
        return False


def scanned(path: Path) -> tuple[RecordsInFile, bytes | None]:
    """What a file holds, and its first record if there is one."""
    sizes: list[int] = []
    first, problem = None, ""
    try:
        for _, payload in read_all(path):
            first = payload if first is None else first
            sizes.append(len(payload))
    except DataError as error:
        problem = f"{error.what} Given: {error.given}; expected: {error.expected}."
    with open_file(path) as file:
        compression = compression_of(file.read(HEAD_BYTES), RecordSource(path)) if sizes else None
    found = RecordsInFile(
        path,
        compression,
        path.stat().st_size,
        len(sizes),
        sum(sizes),
        min(sizes, default=0),
        max(sizes, default=0),
        problem,
    )
    return found, first


def features(payload: bytes) -> dict[str, str]:
    """Each feature of an example in words, by name; of a sequence example also its lists. Empty if it is no example."""
    try:
        example = parse_sequence_example(payload)
    except DataError:
        return {}
    lists = {name: _list_in_words(steps) for name, steps in example.feature_lists.items()}
    return {name: _in_words(values) for name, values in sorted(example.context.items())} | lists


def in_words(files: Sequence[RecordsInFile], first: dict[str, str]) -> Iterator[str]:
    """The lines of the report."""
    for file in files:
        sizes = f", {size(file.smallest)} to {size(file.largest)} each" if file.num_records else ""
        how = f", {file.compression}" if file.compression else ""
        yield f"  {file.path}: {file.num_records:,} records{sizes}, {size(file.num_bytes)}{how}"
    if first:
        yield "features of the first record:"
        width = max(map(len, first))
        yield from (f"  {name.ljust(width)}  {words}" for name, words in first.items())
    elif any(file.num_records for file in files):
        yield "the first record is no tf.train.Example"
    num_records = sum(file.num_records for file in files)
    payload = sum(file.payload_bytes for file in files)
    yield f"{len(files):,} {'file' if len(files) == 1 else 'files'}, {num_records:,} records, {size(payload)} in them"


def _in_words(values: Values) -> str:
    if isinstance(values, np.ndarray):
        shown = ", ".join(f"{value:.6g}" if values.dtype.kind == "f" else str(value) for value in values[:_MOST_VALUES])
        return f"{values.dtype}[{len(values):,}]: {shown}" + (" ..." if len(values) > _MOST_VALUES else "")
    shown = ", ".join(map(_bytes_in_words, values[:_MOST_VALUES]))
    return f"bytes[{len(values):,}]: {shown}" + (" ..." if len(values) > _MOST_VALUES else "")


def _list_in_words(steps: Sequence[Values]) -> str:
    return f"{len(steps):,} steps" + (f", the first of {_in_words(steps[0])}" if steps else "")


def _bytes_in_words(value: bytes) -> str:
    text = value.decode(errors="replace")
    return repr(text) if len(text) <= _MOST_CHARACTERS and text.isprintable() else size(len(value))
