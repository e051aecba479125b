"""Starting a run from weights that something else has trained."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checks import check_type, wrong_type
from lockstep.errors import CheckpointError, InputError
from lockstep.listing import few
from lockstep.training.run_weights import RunWeights, open_weights
from lockstep.training.state import TrainState
from lockstep.weights.memory import MemorySource
from lockstep.weights.plan import plan
from lockstep.weights.report import Report
from lockstep.weights.source import WeightSource
from lockstep.weights.warm_start import Flattening, Role, Target, WarmStart
from lockstep.workers.rank import join

log = logging.getLogger("lockstep")

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_WITH_KERNEL = (*_CONVOLUTIONS, nn.Linear)
_WITH_TABLE = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_OF_CHANNELS = (*_NORMS, nn.GroupNorm, nn.PReLU)
_POOLINGS = (
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
_MOST_SKIPPED = 5
_AS_THEY_ARE = WarmStart()


def warm_start(
    state: TrainState,
    source: str | Path | WeightSource | Mapping[str, Any],
    mapping: WarmStart = _AS_THEY_ARE,
) -> Report:
    """Give a state that has made no step the weights of a file; steps and slots are never loaded.

    Everything is read and checked before anything changes, so that after an error nothing has. Moving averages of the
    state start from the loaded weights. All workers call it, each reads the file; the chief logs the report.

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
        CheckpointError: the file cannot be read, does not fit, less than what is required would be loaded, or what
            would be loaded has values that cannot be trained: parameters that are not finite, buffers with NaN.
    """
    _check(state, mapping)
    opened = _opened(source)
    planned = plan(opened, targets_of(state.model), mapping)
    loaded = dict(planned.tensors(opened))
    report = planned.report.after(loaded)
    _check_finite(report, planned.targets)
    own = {**dict(state.model.named_parameters()), **dict(state.model.named_buffers())}
    with torch.no_grad():
        for name, tensor in loaded.items():
            own[name].copy_(tensor)
        for name, average in state.averages().items():
            average.copy_(own[name])
    if join().is_chief:
        for line in str(report).splitlines():
            log.info("%s", line)
    return report


def _check_finite(report: Report, targets: Mapping[str, Target]) -> None:
    """Refuse values that `lockstep.training.preflight` would refuse to train, while the file they are from is known.

    Raises:
        CheckpointError: naming the parameters and buffers at fault.
    """
    at_fault = [each for each in report.nonfinite or () if each.num_nan or targets[each.target].kind == "parameter"]
    if at_fault:
        names = [each.target for each in at_fault]
        raise CheckpointError(
            f"Weights in {report.origin} are not finite.",
            given=few([str(each) for each in at_fault]),
            expected="finite values for each parameter, and for each buffer no NaN",
            mend="take an earlier checkpoint of that training, or leave out what is not finite: "
            f"skip={names if len(names) <= _MOST_SKIPPED else '[...]'}",
        )


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
    saved, roles, flattenings = model.state_dict(), _roles(model), _flattenings(model)
    parameters = _by_tensor(model.named_parameters(remove_duplicate=False))
    buffers = _by_tensor(each for each in model.named_buffers(remove_duplicate=False) if each[0] in saved)
    return {
        names[0]: Target(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            "parameter" if tensor in parameters else "buffer",
            roles.get(tensor, "other"),
            tuple(names[1:]),
            flattenings.get(tensor),
        )
        for tensor, names in (parameters | buffers).items()
    }


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


def _flattenings(model: nn.Module) -> dict[Tensor, Flattening]:
    """What linear layers take, by their weights, where they seem to follow a convolution whose features are flattened.

    As far as the order of the modules tells: the last one with parameters before the layer is a convolution, or a norm
    after one; the layer has several inputs for each of its channels; and no pooling to one place stands between.
    """
    found: dict[Tensor, Flattening] = {}
    num_channels = num_dimensions = 0
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS):
            num_channels, num_dimensions = module.out_channels, len(module.kernel_size)
        elif isinstance(module, nn.Linear):
            if num_channels > 1 and module.in_features % num_channels == 0 and module.in_features > num_channels:
                num_places = module.in_features // num_channels
                found[module.weight] = Flattening(num_channels, num_places, num_dimensions)
            num_channels = 0
        elif isinstance(module, _NORMS) and num_channels:
            num_channels = module.num_features
        elif _forgets_places(module):
            num_channels = 0
    return found


def _forgets_places(module: nn.Module) -> bool:
    """Whether what comes before a module says nothing of what comes after it: a global pooling, or other parameters."""
    if isinstance(module, _POOLINGS):
        sizes = module.output_size if isinstance(module.output_size, tuple) else (module.output_size,)
        return all(size == 1 for size in sizes)
    return not isinstance(module, _OF_CHANNELS) and next(module.parameters(recurse=False), None) is not None


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
