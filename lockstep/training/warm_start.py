"""Starting a run from weights that something else has trained."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.durable import replacing
from lockstep.errors import InputError, WorkdirError
from lockstep.training.run_weights import open_weights
from lockstep.training.state import TrainState
from lockstep.weights.memory import MemorySource
from lockstep.weights.plan import plan
from lockstep.weights.report import Report
from lockstep.weights.source import WeightSource
from lockstep.weights.warm_start import Target, WarmStart
from lockstep.workers.rank import join

log = logging.getLogger("lockstep")

REPORT = "warm_start.json"

_AS_THEY_ARE = WarmStart()


def warm_start(
    state: TrainState,
    source: str | Path | WeightSource | Mapping[str, Any],
    mapping: WarmStart = _AS_THEY_ARE,
) -> Report:
    """Give a state that has made no step the weights of a file; steps and slots are never loaded.

    Everything is read and checked before anything changes. Moving averages of the state start from the loaded weights.
    All workers call it, each reads the file; the chief logs the report.

    Args:
        state: before its first step.
        source: a file, checkpoint or run (`RUN@STEP` for one of its checkpoints) of any kind that `open_weights` knows;
            a source that is open; or tensors and arrays by name.
        mapping: how its tensors find their places.

    Returns:
        What became of every tensor of the file and of every parameter of the model.

    Raises:
        InputError: the state has made a step, or a pattern matches nothing.
        CheckpointError: the file cannot be read, does not fit, or less than what is required would be loaded; nothing
            has changed.
    """
    if state.step:
        raise InputError(
            "A state that is under training cannot be started from other weights.",
            given=f"a state after {state.step} steps",
            expected="one that has made no step",
            mend="warm-start before the first step; to go on with a run call ls.resume",
        )
    opened = _opened(source)
    planned = plan(opened, targets_of(state.model), mapping)
    loaded = dict(planned.tensors(opened))
    own = {**dict(state.model.named_parameters()), **dict(state.model.named_buffers())}
    with torch.no_grad():
        for name, tensor in loaded.items():
            own[name].copy_(tensor)
        for name, average in state.averages().items():
            average.copy_(own[name])
    if join().is_chief:
        for line in str(planned.report).splitlines():
            log.info("%s", line)
    return planned.report


def targets_of(model: nn.Module) -> dict[str, Target]:
    """What a model has to be given, by name: its parameters, and the buffers that it saves."""
    saved = model.state_dict()
    targets = {name: _target(parameter, "parameter") for name, parameter in model.named_parameters()}
    return targets | {name: _target(buffer, "buffer") for name, buffer in model.named_buffers() if name in saved}


def _target(tensor: Tensor, kind: Literal["parameter", "buffer"]) -> Target:
    return Target(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), kind)


def write_report(report: Report, workdir: Path) -> None:
    """Keep what became of every tensor in the workdir, as `warm_start.json`.

    Raises:
        WorkdirError: it cannot be written.
    """
    path = workdir / REPORT
    try:
        with replacing(path) as file:
            file.write((json.dumps(report.as_json(), indent=1) + "\n").encode())
    except OSError as error:
        raise WorkdirError(
            f"{path} cannot be written: {error.strerror}.",
            given=f"{path} ({error.strerror})",
            expected="a workdir that can be written, on a disk with space left",
            mend="make space, or name another --workdir",
        ) from error


def _opened(source: str | Path | WeightSource | Mapping[str, Any]) -> WeightSource:
    if isinstance(source, str | Path):
        return open_weights(source)
    return MemorySource(source) if isinstance(source, Mapping) else source
