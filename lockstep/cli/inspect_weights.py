"""What `lockstep inspect` says of weights: every tensor, read and verified, and the checkpoints of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoints.manifest import Manifest
from lockstep.checkpoints.store import Store
from lockstep.cli.converting import size
from lockstep.errors import CheckpointError
from lockstep.norms import norms_of
from lockstep.training.run_weights import RunWeights
from lockstep.weights.files import MissingFileError
from lockstep.weights.source import TensorInfo, WeightSource

_GLOBAL_STEP = re.compile(r"(^|/)global_step$")
_STEPS = ("step", "global_step", "iteration")
_EDGE_VALUES, _MOST_VALUES = 3, 1000


@dataclass(frozen=True)
class Inspected:
    """One tensor."""

    name: str
    info: TensorInfo
    norm: float | None
    """The 2-norm of its values, where it was asked for and they are numbers."""
    problem: str
    """Why it cannot be read; "" if it can."""
    is_missing: bool = False
    """The file that it should be in is not there."""


@dataclass(frozen=True)
class Saved:
    """One checkpoint of a run."""

    step: int
    num_bytes: int
    problems: tuple[str, ...]


def inspected(source: WeightSource, *, norms: bool) -> list[Inspected]:
    """All tensors, in the order of the file. Each is read alone, which verifies what the format has checksums of."""
    return [_inspected(source, name, norms=norms) for name in source.tensors]


def _inspected(source: WeightSource, name: str, *, norms: bool) -> Inspected:
    info = source.tensors[name]
    if not isinstance(getattr(torch, info.dtype, None), torch.dtype):
        return Inspected(name, info, None, "")
    try:
        tensor = source.read(name)
    except CheckpointError as error:
        return Inspected(name, info, None, in_words(error), is_missing=isinstance(error, MissingFileError))
    return Inspected(name, info, norms_of([plain(tensor)])[0] if norms else None, "")


def plain(tensor: Tensor) -> Tensor:
    """The values as float64, of complex numbers both parts."""
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def saved(store: Store) -> list[Saved]:
    """The checkpoints of a run, every file of theirs verified."""
    return [_saved(store, step) for step in store.steps()]


def _saved(store: Store, step: int) -> Saved:
    folder, problems, num_bytes = store.path(step), [], 0
    try:
        files = Manifest.read(folder).files
    except CheckpointError as error:
        return Saved(step, 0, (in_words(error),))
    for file in files:
        num_bytes += file.size_bytes
        try:
            file.check_size(folder)
            file.read(folder)
        except CheckpointError as error:
            problems.append(in_words(error))
    return Saved(step, num_bytes, tuple(problems))


def step_of(source: WeightSource) -> int | None:
    """The step at which the weights were saved, where the file tells."""
    if isinstance(source, RunWeights):
        return source.step
    for name, value in beside(source).items():
        if name in _STEPS and isinstance(value, int):
            return value
    for name, info in source.tensors.items():
        if _GLOBAL_STEP.search(name) and math.prod(info.shape) == 1 and "int" in info.dtype:
            try:
                return int(source.read(name).item())
            except CheckpointError:
                return None
    return None


def beside(source: WeightSource) -> Mapping[str, Any]:
    """What a file says beside its tensors: values of a torch file, metadata of safetensors."""
    found: Mapping[str, Any] = getattr(source, "values", None) or getattr(source, "metadata", None) or {}
    return found


def in_words(error: CheckpointError) -> str:
    """An error in one line."""
    return f"{error.what} Given: {error.given}; expected: {error.expected}."


def table(tensors: list[Inspected]) -> Iterator[str]:
    """A line for each tensor: name, shape, kind, size, norm."""
    rows = [_row(tensor) for tensor in tensors]
    widths = [max(len(row[column]) for row in rows) for column in range(4)] if rows else []
    for row in rows:
        *cells, rest = row
        yield "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), rest]).rstrip()


def _row(tensor: Inspected) -> tuple[str, str, str, str, str]:
    state = "" if tensor.norm is None else f"norm {tensor.norm:.6g}"
    if tensor.problem and not tensor.is_missing:
        state = "damaged"
    return tensor.name, str(tensor.info.shape), tensor.info.dtype, size(tensor.info.num_bytes), state


def totals(tensors: list[Inspected]) -> str:
    """How many tensors, values and bytes there are."""
    num_values = sum(math.prod(tensor.info.shape) for tensor in tensors)
    num_bytes = sum(tensor.info.num_bytes for tensor in tensors)
    return f"{len(tensors):,} tensors, {num_values:,} values, {size(num_bytes)}"


def values_in_words(tensor: Tensor) -> Iterator[str]:
    """The values of a tensor, of a large one those at its edges, and their range."""
    if not tensor.is_complex() and tensor.numel():
        wide = plain(tensor)
        yield f"from {wide.min():.6g} to {wide.max():.6g}, mean {wide.mean():.6g}, norm {norms_of([wide])[0]:.6g}"
    array = tensor.float().numpy() if tensor.dtype.itemsize < 4 and tensor.is_floating_point() else tensor.numpy()
    yield from np.array2string(array, threshold=_MOST_VALUES, edgeitems=_EDGE_VALUES).splitlines()


def as_json(value: Any) -> Any:
    """A value that JSON has: a path and what is not finite become text, a complex number its two parts."""
    if isinstance(value, complex):
        return [as_json(value.real), as_json(value.imag)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return value
