"""`lockstep inspect` on files of records: their number and sizes, the features of the first, and what is damaged."""

from __future__ import annotations

import argparse
import glob
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lockstep.cli.shared import format_error, format_size
from lockstep.errors import DataError, InputError
from lockstep.records.example import Values, parse_sequence_example
from lockstep.records.open_files import open_file
from lockstep.records.shards import find_shards
from lockstep.records.tfrecord import HEAD_BYTES, RecordSource, compression_of, is_head, read_all
from lockstep.screen import write_json, write_lines

_MOST_VALUES, _MOST_CHARACTERS = 4, 40


@dataclass(frozen=True)
class _RecordFile:
    """A file of records, all read and verified. The names of the fields are those of the JSON."""

    path: Path
    compression: str | None
    num_bytes: int
    num_records: int
    """Verified records; those before the first damaged one."""
    payload_bytes: int
    smallest: int
    largest: int
    problem: str
    """The damage of the record after these, or ""."""


def find_record_files(path: str) -> list[Path]:
    """Find the files of records that a path names, as a file, a pattern or a folder; none if it names no records."""
    whole = Path(path)
    if whole.is_dir():
        return [each for each in sorted(whole.iterdir()) if each.is_file() and _has_records(each)]
    if whole.is_file():
        return [whole] if _has_records(whole) else []
    return find_shards(path) if glob.has_magic(path) else []


def inspect_records(arguments: argparse.Namespace, files: Sequence[Path]) -> int:
    """Write the report on these files; returns the exit code, 1 if something is damaged."""
    for flag in ("diff", "values"):
        if getattr(arguments, flag) is not None:
            raise InputError(
                f"--{flag} is for weights.",
                given=f"{arguments.path}, which has records",
                expected="a checkpoint, or a run",
                hint=f"leave --{flag} out; lockstep show shows the examples of records",
            )
    scanned = [_scan(file) for file in files]
    found = [file for file, _ in scanned]
    first = next((payload for _, payload in scanned if payload is not None), None)
    features = _features(first) if first is not None else {}
    problems = [file.problem for file in found if file.problem]
    if arguments.json:
        listed = [{**asdict(file), "path": str(file.path)} for file in found]
        write_json({"kind": "records", "files": listed, "features": features, "problems": problems})
    else:
        damaged = ["damaged:", *(f"  {problem}" for problem in problems)] if problems else []
        write_lines([f"{arguments.path}: records", *_format_files(found, features), *damaged])
    return 1 if problems else 0


def _has_records(path: Path) -> bool:
    """Whether the first bytes are those of a record; of a compressed file, whether it has one."""
    try:
        with open_file(path) as file:
            head = file.read(HEAD_BYTES)
        if is_head(head):
            return True
        return bool(compression_of(head, RecordSource(path))) and next(read_all(path, verify=False), None) is not None
    except DataError:
        return False


def _scan(path: Path) -> tuple[_RecordFile, bytes | None]:
    """Read a file; returns what is known of it, and its first record if there is one."""
    sizes: list[int] = []
    first, problem = None, ""
    try:
        for _, payload in read_all(path):
            first = payload if first is None else first
            sizes.append(len(payload))
    except DataError as error:
        problem = format_error(error)
    with open_file(path) as file:
        compression = compression_of(file.read(HEAD_BYTES), RecordSource(path)) if sizes else None
    extremes = (min(sizes), max(sizes)) if sizes else (0, 0)
    return _RecordFile(path, compression, path.stat().st_size, len(sizes), sum(sizes), *extremes, problem), first


def _features(payload: bytes) -> dict[str, str]:
    """Describe the features of an example by name, with the lists of a sequence example; empty if it is no example."""
    try:
        example = parse_sequence_example(payload)
    except DataError:
        return {}
    lists = {name: _format_list(steps) for name, steps in example.feature_lists.items()}
    return {name: _format_values(values) for name, values in sorted(example.context.items())} | lists


def _format_files(files: Sequence[_RecordFile], first: dict[str, str]) -> Iterator[str]:
    for file in files:
        sizes = f", {format_size(file.smallest)} to {format_size(file.largest)} each" if file.num_records else ""
        how = f", {file.compression}" if file.compression else ""
        yield f"  {file.path}: {file.num_records:,} records{sizes}, {format_size(file.num_bytes)}{how}"
    if first:
        yield "features of the first record:"
        width = max(map(len, first))
        yield from (f"  {name.ljust(width)}  {words}" for name, words in first.items())
    elif any(file.num_records for file in files):
        yield "the first record is no tf.train.Example"
    num_records = sum(file.num_records for file in files)
    payload = format_size(sum(file.payload_bytes for file in files))
    yield f"{len(files):,} {'file' if len(files) == 1 else 'files'}, {num_records:,} records, {payload} in them"


def _format_values(values: Values) -> str:
    if isinstance(values, np.ndarray):
        kind = str(values.dtype)
        shown = [f"{value:.6g}" if values.dtype.kind == "f" else str(value) for value in values[:_MOST_VALUES]]
    else:
        kind, shown = "bytes", [_format_bytes(value) for value in values[:_MOST_VALUES]]
    return f"{kind}[{len(values):,}]: {', '.join(shown)}" + (" ..." if len(values) > _MOST_VALUES else "")


def _format_list(steps: Sequence[Values]) -> str:
    return f"{len(steps):,} steps" + (f", the first of {_format_values(steps[0])}" if steps else "")


def _format_bytes(value: bytes) -> str:
    text = value.decode(errors="replace")
    return repr(text) if len(text) <= _MOST_CHARACTERS and text.isprintable() else format_size(len(value))
