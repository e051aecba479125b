"""`lockstep inspect`: what is in a checkpoint, a run or a file of records, and what is damaged."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.cli import inspect_diff, inspect_records
from lockstep.cli.converting import size
from lockstep.cli.inspect_weights import (
    Inspected,
    Saved,
    as_json,
    beside,
    inspected,
    saved,
    step_of,
    table,
    totals,
    values_in_words,
)
from lockstep.errors import InputError
from lockstep.records.shards import check_local
from lockstep.screen import write_json, write_lines
from lockstep.training.run_weights import RunWeights, open_weights, store_of_run
from lockstep.weights.source import WeightSource

_FOUND_FAULTS = 1


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Write the report; 1 if something is damaged, or with --diff different."""
    check_local(arguments.path)
    if files := inspect_records.record_files(arguments.path):
        return _records(arguments, files)
    source = open_weights(arguments.path, slots=True)
    if arguments.diff is not None:
        return _diff(arguments, source)
    if arguments.values is not None:
        return _values(arguments, source)
    return _weights(arguments, source)


def _records(arguments: argparse.Namespace, files: Sequence[Path]) -> int:
    for flag in ("diff", "values"):
        if getattr(arguments, flag) is not None:
            raise InputError(
                f"--{flag} is for weights.",
                given=f"{arguments.path}, which has records",
                expected="a checkpoint, or a run",
                hint=f"leave --{flag} out; lockstep show shows the examples of records",
            )
    found = [inspect_records.scanned(file) for file in files]
    counted = [file for file, _ in found]
    first = next((payload for _, payload in found if payload is not None), None)
    of_first = inspect_records.features(first) if first is not None else {}
    problems = [file.problem for file in counted if file.problem]
    if arguments.json:
        listed = [asdict(file) for file in counted]
        write_json(as_json({"kind": "records", "files": listed, "features": of_first, "problems": problems}))
    else:
        write_lines([f"{arguments.path}: records", *inspect_records.in_words(counted, of_first), *_problems(problems)])
    return _FOUND_FAULTS if problems else 0


def _weights(arguments: argparse.Namespace, source: WeightSource) -> int:
    tensors = inspected(source, norms=arguments.norms)
    store = store_of_run(Path(arguments.path))
    if store is None and isinstance(source, RunWeights):
        store = store_of_run(source.path.parent)
    checkpoints = saved(store) if store else []
    # What is wrong with a file of ours is known from its hash; its tensors would say so again, one by one.
    known = [problem for checkpoint in checkpoints for problem in checkpoint.problems]
    problems = known or list(dict.fromkeys(tensor.problem for tensor in tensors if tensor.problem))
    if arguments.json:
        write_json(as_json(_as_json(source, tensors, checkpoints, problems)))
    else:
        write_lines(_in_words(source, tensors, checkpoints, problems))
    return _FOUND_FAULTS if problems else 0


def _in_words(
    source: WeightSource, tensors: list[Inspected], checkpoints: Sequence[Saved], problems: Sequence[str]
) -> list[str]:
    step = step_of(source)
    lines = [f"{source.path}: {source.kind}" + ("" if step is None else f", step {step}")]
    lines += [f"  {name}: {value}" for name, value in beside(source).items()]
    lines += [*table(tensors), totals(tensors)]
    for checkpoint in checkpoints:
        state = "damaged" if checkpoint.problems else "intact"
        lines.append(f"checkpoint of step {checkpoint.step}: {size(checkpoint.num_bytes)}, {state}")
    missing = dict.fromkeys(tensor.problem for tensor in tensors if tensor.is_missing)
    return [*lines, *missing, *_problems([problem for problem in problems if problem not in missing])]


def _as_json(
    source: WeightSource, tensors: list[Inspected], checkpoints: Sequence[Saved], problems: Sequence[str]
) -> dict[str, Any]:
    listed = [
        {"name": tensor.name, **asdict(tensor.info), "norm": tensor.norm, "problem": tensor.problem}
        for tensor in tensors
    ]
    return {
        "path": str(source.path),
        "kind": source.kind,
        "step": step_of(source),
        "beside": beside(source),
        "tensors": listed,
        "checkpoints": [asdict(checkpoint) for checkpoint in checkpoints],
        "problems": problems,
    }


def _diff(arguments: argparse.Namespace, source: WeightSource) -> int:
    check_local(arguments.diff)
    found = inspect_diff.difference(source, open_weights(arguments.diff, slots=True))
    if arguments.json:
        write_json(as_json(asdict(found)))
    else:
        write_lines(inspect_diff.in_words(found, arguments.path, arguments.diff))
    return 0 if found.is_none else _FOUND_FAULTS


def _values(arguments: argparse.Namespace, source: WeightSource) -> int:
    tensor, info = source.read(arguments.values), source.tensors[arguments.values]
    if arguments.json:
        write_json(as_json({"name": arguments.values, **asdict(info), "values": tensor.tolist()}))
    else:
        write_lines([f"{arguments.values}: {info.shape} {info.dtype}", *values_in_words(tensor)])
    return 0


def _problems(problems: Sequence[str]) -> list[str]:
    return ["damaged:", *(f"  {problem}" for problem in problems)] if problems else []
