"""`lockstep inspect`: reports on weights and on files of records, all of which are read and verified.

Weights are listed tensor by tensor, with the checkpoints of their run, or compared with others. Of records their number
and sizes are listed, the features of the first, and what is damaged.
"""

from __future__ import annotations

import argparse
import glob
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.checkpoints.manifest import Manifest
from lockstep.checkpoints.store import Store
from lockstep.cli.shared import check_no_flag_of_weights, damage_lines, format_error, write_found
from lockstep.errors import CheckpointError, DataError
from lockstep.listing import format_size
from lockstep.readers.split_folders import find_split
from lockstep.records.example import Values, parse_sequence_example
from lockstep.records.open_files import open_file
from lockstep.records.shards import data_path, find_shards
from lockstep.records.tfrecord import HEAD_BYTES, RecordSource, compression_of, is_head, read_all
from lockstep.screen import write_json, write_lines
from lockstep.storage.remote_path import AnyPath
from lockstep.tensors import norms_of
from lockstep.terminal import in_columns
from lockstep.training.run_weights import RunWeights, open_weights, store_of_run
from lockstep.weights.source import MissingFileError, TensorInfo, WeightSource

if TYPE_CHECKING:
    from torch import Tensor

_GLOBAL_STEP = re.compile(r"(^|/)global_step$")
_STEPS = ("step", "global_step", "iteration")
_EDGE_VALUES, _MAX_VALUES = 3, 1000


@dataclass(frozen=True)
class _InspectedTensor:
    name: str
    info: TensorInfo
    norm: float | None
    """The 2-norm of the values, if it was asked for and they are numbers."""
    problem: str
    """Why the tensor cannot be read, or ""."""
    is_missing: bool = False
    """The file that it should be in does not exist."""


@dataclass(frozen=True)
class _InspectedCheckpoint:
    """A checkpoint of a run. The names of the fields are those of the JSON."""

    step: int
    num_bytes: int
    problems: tuple[str, ...]


def inspect_weights(arguments: argparse.Namespace, source: WeightSource) -> int:
    """Write the report on all tensors, and the checkpoints of their run; returns 1 if something is damaged, else 0."""
    tensors = [_inspect_tensor(source, name, norm=arguments.norms) for name in source.tensors]
    store = store_of_run(Path(arguments.path))
    if store is None and isinstance(source, RunWeights):
        store = store_of_run(source.path.parent)
    checkpoints = [_inspect_checkpoint(store, step) for step in store.steps()] if store else []
    # A damaged file of ours is known by its hash; each of its tensors would say so again.
    known = [problem for checkpoint in checkpoints for problem in checkpoint.problems]
    problems = known or list(dict.fromkeys(tensor.problem for tensor in tensors if tensor.problem))
    results = source, tensors, checkpoints, problems
    write_found(arguments, _to_json(_as_json(*results)), _as_text(*results))
    return 1 if problems else 0


def show_values(arguments: argparse.Namespace, source: WeightSource) -> int:
    """Write the values of one tensor: of a large one those at its edges, and their range."""
    tensor, info = source.read(arguments.values), source.tensors[arguments.values]
    if arguments.json:  # a large tensor has a long list
        write_json(_to_json({"name": arguments.values, **asdict(info), "values": tensor.tolist()}))
    else:
        write_lines([f"{arguments.values}: {info.shape} {info.dtype}", *_format_values(tensor)])
    return 0


def _inspect_tensor(source: WeightSource, name: str, *, norm: bool) -> _InspectedTensor:
    info = source.tensors[name]
    if not _is_numeric(info):
        return _InspectedTensor(name, info, None, "")
    try:
        tensor = source.read(name)
    except CheckpointError as error:
        return _InspectedTensor(name, info, None, format_error(error), isinstance(error, MissingFileError))
    return _InspectedTensor(name, info, norms_of([_as_float64(tensor)])[0] if norm else None, "")


def _is_numeric(info: TensorInfo) -> bool:
    return isinstance(getattr(torch, info.dtype, None), torch.dtype)


def _as_float64(tensor: Tensor) -> Tensor:
    """Convert values to float64; complex numbers to both parts, in a last dimension."""
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def _inspect_checkpoint(store: Store, step: int) -> _InspectedCheckpoint:
    folder, problems, num_bytes = store.path(step), [], 0
    try:
        files = Manifest.read(folder).files
    except CheckpointError as error:
        return _InspectedCheckpoint(step, 0, (format_error(error),))
    for file in files:
        num_bytes += file.size_bytes
        try:
            file.check(folder)
        except CheckpointError as error:
            problems.append(format_error(error))
    return _InspectedCheckpoint(step, num_bytes, tuple(problems))


def _step_of(source: WeightSource) -> int | None:
    if isinstance(source, RunWeights):
        return source.step
    for name, value in _metadata(source).items():
        if name in _STEPS and isinstance(value, int):
            return value
    for name, info in source.tensors.items():
        if _GLOBAL_STEP.search(name) and math.prod(info.shape) == 1 and "int" in info.dtype:
            try:
                return int(source.read(name).item())
            except CheckpointError:
                return None
    return None


def _metadata(source: WeightSource) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(source, "values", None) or getattr(source, "metadata", None) or {}
    return found


def _as_text(
    source: WeightSource,
    tensors: list[_InspectedTensor],
    checkpoints: Sequence[_InspectedCheckpoint],
    problems: Sequence[str],
) -> Iterator[str]:
    step = _step_of(source)
    yield f"{source.path}: {source.kind}" + ("" if step is None else f", step {step}")
    yield from (f"  {name}: {value}" for name, value in _metadata(source).items())
    yield from (f"  {line}" for line in in_columns(list(map(_row, tensors))))
    num_values = sum(math.prod(tensor.info.shape) for tensor in tensors)
    num_bytes = sum(tensor.info.num_bytes for tensor in tensors)
    yield f"{len(tensors):,} tensors, {num_values:,} values, {format_size(num_bytes)}"
    for checkpoint in checkpoints:
        condition = "damaged" if checkpoint.problems else "intact"
        yield f"checkpoint of step {checkpoint.step}: {format_size(checkpoint.num_bytes)}, {condition}"
    missing = dict.fromkeys(tensor.problem for tensor in tensors if tensor.is_missing)
    yield from missing
    yield from damage_lines([problem for problem in problems if problem not in missing])


def _as_json(
    source: WeightSource,
    tensors: list[_InspectedTensor],
    checkpoints: Sequence[_InspectedCheckpoint],
    problems: Sequence[str],
) -> dict[str, Any]:
    return {
        "path": str(source.path),
        "kind": source.kind,
        "step": _step_of(source),
        "beside": _metadata(source),
        "tensors": [
            {"name": tensor.name, **asdict(tensor.info), "norm": tensor.norm, "problem": tensor.problem}
            for tensor in tensors
        ],
        "checkpoints": [asdict(checkpoint) for checkpoint in checkpoints],
        "problems": problems,
    }


def _row(tensor: _InspectedTensor) -> tuple[str, str, str, str, str]:
    condition = "" if tensor.norm is None else f"norm {tensor.norm:.6g}"
    if tensor.problem and not tensor.is_missing:
        condition = "damaged"
    return tensor.name, str(tensor.info.shape), tensor.info.dtype, format_size(tensor.info.num_bytes), condition


def _format_values(tensor: Tensor) -> Iterator[str]:
    if not tensor.is_complex() and tensor.numel():
        wide = _as_float64(tensor)
        yield f"from {wide.min():.6g} to {wide.max():.6g}, mean {wide.mean():.6g}, norm {norms_of([wide])[0]:.6g}"
    array = tensor.float().numpy() if tensor.dtype.itemsize < 4 and tensor.is_floating_point() else tensor.numpy()
    yield from np.array2string(array, threshold=_MAX_VALUES, edgeitems=_EDGE_VALUES).splitlines()


def _to_json(value: Any) -> Any:
    """Convert a value to JSON's: numbers that are not finite become text, complex numbers a list of their parts."""
    if isinstance(value, complex):
        return [_to_json(value.real), _to_json(value.imag)]
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    return value


@dataclass(frozen=True)
class _ChangedTensor:
    """A tensor with other values in the second file. The names of the fields are those of the JSON."""

    name: str
    largest_absolute: float
    """Largest difference; infinite where one of two values is not finite."""
    largest_relative: float
    """Largest difference as a share of the larger of two values."""
    num_different: int
    num_values: int


@dataclass(frozen=True)
class _WeightsDiff:
    """The differences of two sets of weights. The names of the fields are those of the JSON."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    other_kind: tuple[tuple[str, TensorInfo, TensorInfo], ...]
    """Tensors of another shape or dtype."""
    changes: tuple[_ChangedTensor, ...]
    unreadable: tuple[str, ...]
    """Tensors of both that are no numbers, and were not compared."""
    num_equal: int


def diff_weights(arguments: argparse.Namespace, source: WeightSource) -> int:
    """Write the differences of two sets of weights; returns 1 if anything, else 0."""
    found = _compare(source, open_weights(arguments.diff, slots=True))
    write_found(arguments, _to_json(asdict(found)), _format_diff(found, arguments.path, arguments.diff))
    return 1 if found.only_first or found.only_second or found.other_kind or found.changes else 0


def _compare(first: WeightSource, second: WeightSource) -> _WeightsDiff:
    """Compare two sets of weights, tensor by tensor. NaN equals NaN."""
    both = [name for name in first.tensors if name in second.tensors]
    infos = {name: (first.tensors[name], second.tensors[name]) for name in both}
    alike = [name for name, (one, other) in infos.items() if (one.shape, one.dtype) == (other.shape, other.dtype)]
    numbers = [name for name in alike if _is_numeric(first.tensors[name])]
    changes = [_compare_tensors(name, first.read(name), second.read(name)) for name in numbers]
    return _WeightsDiff(
        tuple(name for name in first.tensors if name not in infos),
        tuple(name for name in second.tensors if name not in infos),
        tuple((name, *infos[name]) for name in both if name not in alike),
        tuple(change for change in changes if change.num_different),
        tuple(name for name in alike if name not in numbers),
        sum(not change.num_different for change in changes),
    )


def _compare_tensors(name: str, first: Tensor, second: Tensor) -> _ChangedTensor:
    if torch.equal(first, second):
        return _ChangedTensor(name, 0.0, 0.0, 0, first.numel())
    one, other = _as_float64(first), _as_float64(second)
    same = (one == other) | (one.isnan() & other.isnan())
    # Different integers above 2**53 may be equal as float64.
    if not (first.is_floating_point() or first.is_complex()):
        same = first == second
    apart = (one - other).abs().nan_to_num(torch.inf, torch.inf)
    apart[same] = 0.0
    largest = torch.maximum(one.abs(), other.abs()).nan_to_num(torch.inf, torch.inf)
    relative = torch.where(apart.isfinite(), apart / largest, apart)
    relative[same] = 0.0
    num_different = int((~same).any(-1).sum() if first.is_complex() else (~same).sum())
    return _ChangedTensor(name, apart.max().item(), relative.max().item(), num_different, first.numel())


def _format_diff(found: _WeightsDiff, first: str, second: str) -> Iterator[str]:
    for path, names in ((first, found.only_first), (second, found.only_second)):
        if names:
            yield f"only in {path}:"
            yield from (f"  {name}" for name in names)
    if found.other_kind:
        yield "of another shape or dtype:"
        for name, one, other in found.other_kind:
            yield f"  {name}: {one.shape} {one.dtype}, {other.shape} {other.dtype}"
    if found.changes:
        yield "with other values (largest difference, absolute and relative):"
        rows = []
        for change in found.changes:
            count = f"{change.num_different:,} of {change.num_values:,} values"
            rows.append((change.name, f"{change.largest_absolute:.3g}  {change.largest_relative:.3g}  {count}"))
        yield from (f"  {line}" for line in in_columns(rows))
    if found.unreadable:
        yield "not compared, for they are no numbers:"
        yield from (f"  {name}" for name in found.unreadable)
    yield f"{found.num_equal:,} tensors are equal, {len(found.changes):,} have other values"


_MOST_VALUES, _MOST_CHARACTERS = 4, 40


@dataclass(frozen=True)
class _RecordFile:
    """A file of records, all read and verified. The names of the fields are those of the JSON."""

    path: AnyPath
    compression: str | None
    num_bytes: int
    num_records: int
    """Verified records; those before the first damaged one."""
    payload_bytes: int
    smallest: int
    largest: int
    problem: str
    """The damage of the record after these, or ""."""


def find_record_files(path: str) -> Sequence[AnyPath]:
    """Find the files of records that a path names, as a file, a pattern or a folder; none if it names no records."""
    if split := find_split(path):
        return [*split.files]
    whole = data_path(path)
    if whole.is_dir():
        entries: list[AnyPath] = sorted(whole.iterdir())
        return [each for each in entries if each.is_file() and _has_records(each)]
    if whole.is_file():
        return [whole] if _has_records(whole) else []
    return find_shards(path) if glob.has_magic(path) else []


def inspect_records(arguments: argparse.Namespace, files: Sequence[AnyPath]) -> int:
    """Write the report on these files; returns the exit code, 1 if something is damaged."""
    check_no_flag_of_weights(arguments, "which has records", "records")
    scanned = [_scan(file) for file in files]
    found = [file for file, _ in scanned]
    first = next((payload for _, payload in scanned if payload is not None), None)
    features = _features(first) if first is not None else {}
    problems = [file.problem for file in found if file.problem]
    listed = [{**asdict(file), "path": str(file.path)} for file in found]
    facts = {"kind": "records", "files": listed, "features": features, "problems": problems}
    write_found(
        arguments, facts, [f"{arguments.path}: records", *_format_files(found, features), *damage_lines(problems)]
    )
    return 1 if problems else 0


def _has_records(path: AnyPath) -> bool:
    try:
        with open_file(path) as file:
            head = file.read(HEAD_BYTES)
        if is_head(head):
            return True
        return bool(compression_of(head, RecordSource(path))) and next(read_all(path, verify=False), None) is not None
    except DataError:
        return False


def _scan(path: AnyPath) -> tuple[_RecordFile, bytes | None]:
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
    try:
        example = parse_sequence_example(payload)
    except DataError:
        return {}
    lists = {name: _format_list(steps) for name, steps in example.feature_lists.items()}
    return {name: _format_feature(values) for name, values in sorted(example.context.items())} | lists


def _format_files(files: Sequence[_RecordFile], first: dict[str, str]) -> Iterator[str]:
    for file in files:
        sizes = f", {format_size(file.smallest)} to {format_size(file.largest)} each" if file.num_records else ""
        how = f", {file.compression}" if file.compression else ""
        yield f"  {file.path}: {file.num_records:,} records{sizes}, {format_size(file.num_bytes)}{how}"
    if first:
        yield "features of the first record:"
        yield from (f"  {line}" for line in in_columns([*first.items()]))
    elif any(file.num_records for file in files):
        yield "the first record is no tf.train.Example"
    num_records = sum(file.num_records for file in files)
    payload = format_size(sum(file.payload_bytes for file in files))
    yield f"{len(files):,} {'file' if len(files) == 1 else 'files'}, {num_records:,} records, {payload} in them"


def _format_feature(values: Values) -> str:
    if isinstance(values, np.ndarray):
        kind = str(values.dtype)
        shown = [f"{value:.6g}" if values.dtype.kind == "f" else str(value) for value in values[:_MOST_VALUES]]
    else:
        kind, shown = "bytes", [_format_bytes(value) for value in values[:_MOST_VALUES]]
    return f"{kind}[{len(values):,}]: {', '.join(shown)}" + (" ..." if len(values) > _MOST_VALUES else "")


def _format_list(steps: Sequence[Values]) -> str:
    return f"{len(steps):,} steps" + (f", the first of {_format_feature(steps[0])}" if steps else "")


def _format_bytes(value: bytes) -> str:
    text = value.decode(errors="replace")
    return repr(text) if len(text) <= _MOST_CHARACTERS and text.isprintable() else format_size(len(value))
