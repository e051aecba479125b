"""Starting a run from weights that something else has trained."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.checks import check_type, wrong_type
from lockstep.errors import InputError
from lockstep.training.run_weights import RunWeights, open_weights
from lockstep.training.state import TrainState
from lockstep.weights.memory import MemorySource
from lockstep.weights.plan import plan
from lockstep.weights.report import Report
from lockstep.weights.source import WeightSource
from lockstep.weights.warm_start import Role, Target, WarmStart
from lockstep.workers.rank import join

log = logging.getLogger("lockstep")

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_WITH_KERNEL = (*_CONVOLUTIONS, nn.Linear)
_WITH_TABLE = (nn.Embedding, nn.EmbeddingBag)
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
            a source that is open; or tensors and arrays by name. Of a run that goes on, all workers take the checkpoint
            that is the newest to the chief. A tied parameter may come under any of its names.
        mapping: how its tensors find their places.

    Returns:
        What became of every tensor of the file and of every parameter of the model.

    Raises:
        InputError: the state has made a step, a pattern matches nothing, or an argument is of another type.
        CheckpointError: the file cannot be read, does not fit, or less than what is required would be loaded; nothing
            has changed.
    """
    _check(state, mapping)
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


def _check(state: TrainState, mapping: WarmStart) -> None:
    check_type(
        "state", state, TrainState, expected="an ls.TrainState", mend="wrap the model: ls.TrainState(model, ...)"
    )
    check_type("mapping", mapping, WarmStart, expected="an ls.weights.WarmStart", mend='write WarmStart(skip="^head")')
    if state.step:
        raise InputError(
            "A state that is under training cannot be started from other weights.",
            given=f"a state after {state.step} steps",
            expected="one that has made no step",
            mend="warm-start before the first step; to go on with a run call ls.resume",
        )


def targets_of(model: nn.Module) -> dict[str, Target]:
    """What a model has to be given, by name: its parameters, and the buffers that it saves."""
    saved, roles = model.state_dict(), _roles(model)
    parameters = _by_tensor(model.named_parameters(remove_duplicate=False))
    buffers = _by_tensor(each for each in model.named_buffers(remove_duplicate=False) if each[0] in saved)
    targets = {names[0]: _target(tensor, names, "parameter", roles) for tensor, names in parameters.items()}
    return targets | {names[0]: _target(tensor, names, "buffer", roles) for tensor, names in buffers.items()}


def _target(
    tensor: Tensor, names: Sequence[str], kind: Literal["parameter", "buffer"], roles: Mapping[Tensor, Role]
) -> Target:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Target(tuple(tensor.shape), dtype, kind, roles.get(tensor, "other"), tuple(names[1:]))


def _by_tensor(named: Iterable[tuple[str, Tensor]]) -> dict[Tensor, list[str]]:
    """The names of each tensor, of which a tied one has several."""
    names: dict[Tensor, list[str]] = {}
    for name, tensor in named:
        names.setdefault(tensor, []).append(name)
    return names


def _roles(model: nn.Module) -> dict[Tensor, Role]:
    """What the weights of convolutions, linear layers and embeddings are; one that is tied to a table is one."""
    kernels: dict[Tensor, Role] = {each.weight: "kernel" for each in model.modules() if isinstance(each, _WITH_KERNEL)}
    tables: dict[Tensor, Role] = {each.weight: "table" for each in model.modules() if isinstance(each, _WITH_TABLE)}
    return kernels | tables


def _opened(source: str | Path | WeightSource | Mapping[str, Any]) -> WeightSource:
    if isinstance(source, str | Path):
        return _opened_alike(source)
    if isinstance(source, Mapping):
        return MemorySource(source)
    if not isinstance(source, WeightSource):
        raise wrong_type(
            "source",
            source,
            expected="a path, tensors by name, or an open source of weights",
            mend="give the path of a file, or model.state_dict()",
        )
    return source


def _opened_alike(path: str | Path) -> WeightSource:
    """The weights at a path; of a run that may go on meanwhile, the same checkpoint on all workers."""
    worker = join()
    found = open_weights(path) if worker.is_chief else None
    step = worker.group.broadcast(found.step if isinstance(found, RunWeights) else None)
    return found or open_weights(path, newest=step)
