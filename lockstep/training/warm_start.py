"""Starting a run from weights that something else has trained."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.checks import check_one_of, check_type, wrong_type
from lockstep.detection.detector import DetectionModel
from lockstep.errors import CheckpointError, InputError
from lockstep.listing import shorten
from lockstep.screen import log
from lockstep.training.run_weights import RunWeights, open_weights
from lockstep.training.state import TrainState
from lockstep.weights.architectures import check_architecture, seems_to_be
from lockstep.weights.assignment import assign_tensors, select_variables
from lockstep.weights.name_maps import SHIPPED
from lockstep.weights.names import NameMap, NameTable, Rename, find_prefixes, swap_prefix
from lockstep.weights.source import MemorySource, WeightSource
from lockstep.weights.warm_start import Flattening, Role, Takes, Target, WarmStart, WarmStartReport
from lockstep.workers.rank import join

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_WITH_KERNEL = (*_CONVOLUTIONS, nn.Linear)
_WITH_TABLE = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_OF_CHANNELS = (*_NORMS, nn.GroupNorm, nn.PReLU)
_POOLINGS = (
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
_KEEP_ORDER = frozenset(
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "dropout", "instancenorm", "normalization", "pooling")
)
_MOST_SKIPPED = 5
_AS_THEY_ARE = WarmStart()
_IN_WORDS: Mapping[Takes, str] = {
    "classifier": "a classifier, for the backbone",
    "features": "a detector, for the backbone",
    "detector": "a detector",
}


def warm_start(
    state: TrainState,
    source: str | Path | WeightSource | Mapping[str, Any],
    mapping: WarmStart = _AS_THEY_ARE,
    takes: Takes | None = None,
) -> WarmStartReport:
    """Give a state that has made no step the weights of a file; steps and slots are never loaded.

    Everything is read and checked before anything changes, so that after an error nothing has. Moving averages of the
    state start from the loaded weights. All workers call it, each reads the file; the chief logs the report.

    Args:
        state: before its first step.
        source: a file, checkpoint or run (`RUN@STEP` for one of its checkpoints) of any kind that `open_weights` knows;
            a source that is open; or tensors and arrays by name. Of a run that goes on, all workers take the checkpoint
            that is the newest to the chief. A tied parameter may come under any of its names.
        mapping: how its tensors find their places.
        takes: what a detector takes of the weights: a classifier as its backbone, the backbone of another detector
            ("features"), or all of a "detector". What the file lacks, or has in another shape (as the heads of another
            number of classes), stays fresh; where `mapping` has no names, the name map and prefix are found.

    Returns:
        What became of every tensor of the file and of every parameter of the model.

    Raises:
        InputError: the state has made a step, a pattern matches nothing, or an argument is of another type; or a model
            that is no `DetectionModel` is to take a part of the weights.
        CheckpointError: the file cannot be read, does not fit, less than what is required would be loaded, or what
            would be loaded has values that cannot be trained: parameters that are not finite, buffers with NaN.
    """
    _check(state, mapping)
    opened = _opened(source)
    targets = targets_of(state.model)
    is_any = mapping.require_loaded is not None  # the user says how much has to fit
    if takes is not None:
        check_one_of("takes", takes, [*_IN_WORDS])
        mapping = _fitted(state.model, opened, targets, mapping, takes)
    try:
        planned = assign_tensors(opened, targets, mapping)
    except CheckpointError as error:
        if takes is None:
            raise
        raise CheckpointError(
            error.what,
            given=f"{error.given}; they seem to be of {seems_to_be(opened.tensors)}",
            expected=error.expected,
            hint=error.hint,
        ) from error
    if isinstance(state.model, DetectionModel) and takes is not None and not is_any:
        prefixes, numbered = state.model.backbone_prefixes, isinstance(mapping.resolved_map, NameTable)
        check_architecture(opened, targets, planned.report, prefixes, is_numbered=numbered)
    loaded = dict(planned.tensors(opened))
    report = planned.report.after(loaded)
    _check_finite(report, planned.targets)
    own = {**dict(state.model.named_parameters()), **dict(state.model.named_buffers())}
    averages = [(average, loaded.get(name, own[name])) for name, average in state.averages().items()]
    state.adopt([*((own[name], tensor) for name, tensor in loaded.items()), *averages])
    if join().is_chief:
        for line in str(report).splitlines():
            log.info("%s", line)
        for each in report.loaded:
            if each.doubt:
                log.warning("%r is loaded as it is, but %s", each.target, each.doubt)
        if takes is not None and report.mismatched:
            fresh = shorten([f"{each.target} ({each.reason})" for each in report.mismatched])
            log.warning(
                "%d tensors stay fresh: the file has others, as for other classes: %s", len(report.mismatched), fresh
            )
    return report


def _fitted(
    model: nn.Module, source: WeightSource, targets: Mapping[str, Target], mapping: WarmStart, takes: Takes
) -> WarmStart:
    """Find the names by which a detector takes what it can, and log them."""
    if not isinstance(model, DetectionModel):
        raise InputError(
            "Only a detector takes a part of the weights.",
            given=f"takes={takes!r}, and a {type(model).__name__}",
            expected="a DetectionModel; or weights of the model itself",
            hint="leave takes out (--set warm_start.takes=none), and say in the mapping what is loaded",
        )
    found = fitted(source, targets, takes, mapping, prefixes=model.backbone_prefixes, name_maps=model.name_maps)
    if join().is_chief:
        log.info("taken as %s: %s", _IN_WORDS[takes], names_in_words(found) or "names as they are")
    return found


def _check_finite(report: WarmStartReport, targets: Mapping[str, Target]) -> None:
    """Refuse values that `lockstep.training.preflight` would refuse to train, while the file they are from is known."""
    at_fault = [each for each in report.nonfinite or () if each.num_nan or targets[each.target].kind == "parameter"]
    if at_fault:
        names = [each.target for each in at_fault]
        raise CheckpointError(
            f"Weights in {report.origin} are not finite.",
            given=shorten([str(each) for each in at_fault]),
            expected="finite values for each parameter, and for each buffer no NaN",
            hint="take an earlier checkpoint of that training, or leave out what is not finite: "
            f"skip={names if len(names) <= _MOST_SKIPPED else '[...]'}",
        )


def _check(state: TrainState, mapping: WarmStart) -> None:
    check_type(
        "state", state, TrainState, expected="an ls.TrainState", hint="wrap the model: ls.TrainState(model, ...)"
    )
    check_type("mapping", mapping, WarmStart, expected="an ls.weights.WarmStart", hint='write WarmStart(skip="^head")')
    if state.step:
        raise InputError(
            "A state that is under training cannot be started from other weights.",
            given=f"a state after {state.step} steps",
            expected="one that has made no step",
            hint="warm-start before the first step; to go on with a run call ls.resume",
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
    """What linear layers take, by their weights, where they follow a flattening of a convolution's features, or may.

    The sizes of the modules and the order in which they are registered are all there is to go by.
    """
    found: dict[Tensor, Flattening] = {}
    runs = _runs(model)
    pools = False
    for (previous, earlier), (conv, modules) in pairwise(runs):
        pools = pools or any(map(_is_global_pooling, earlier))
        is_chain = not pools and (previous is None or previous.out_channels == conv.in_channels)
        linears, between, num_channels = _behind(conv, modules)
        for linear in linears:
            before = modules[: modules.index(linear)]
            follows_another = linear.in_features in [
                each.out_features for each in before if isinstance(each, nn.Linear)
            ]
            flattening = _flattening(conv, num_channels, linear)
            is_certain = (
                not follows_another
                and all(map(_keeps_order, between))
                and (_in_sequence(model, conv, between, linears[0]) or (is_chain and flattening.is_square))
            )
            found[linear.weight] = flattening._replace(is_certain=is_certain)
    last = runs[-1][0]
    for each in runs[0][1] if last and not pools else ():  # registered before all convolutions
        if isinstance(each, nn.Linear) and _is_multiple(each.in_features, last.out_channels):
            flattening = _flattening(last, last.out_channels, each)
            if flattening.is_square:
                found[each.weight] = flattening
    return found


def _runs(model: nn.Module) -> list[tuple[Any, list[nn.Module]]]:
    """Each convolution with the modules that follow it up to the next one; first None, with those before them all."""
    runs: list[tuple[Any, list[nn.Module]]] = [(None, [])]
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS):
            runs.append((module, []))
        else:
            runs[-1][1].append(module)
    return runs


def _behind(conv: Any, modules: Sequence[nn.Module]) -> tuple[list[nn.Linear], Sequence[nn.Module], int]:
    """The linear layers that may take the features of a convolution flattened; the modules between; the channels.

    The first linear layer has several inputs for each channel; the others, the heads beside it, have as many.
    """
    num_channels = conv.out_channels
    for index, module in enumerate(modules):
        if isinstance(module, nn.Linear):
            size = module.in_features if _is_multiple(module.in_features, num_channels) else None
            heads = [each for each in modules[index:] if isinstance(each, nn.Linear) and each.in_features == size]
            return heads, modules[:index], num_channels
        if _is_multiple(_size_of_norm(module), num_channels):
            continue  # a norm of the flattened features
        if isinstance(module, _NORMS):
            num_channels = module.num_features
        elif _is_global_pooling(module) or _has_other_parameters(module):
            break
    return [], [], num_channels


def _in_sequence(model: nn.Module, conv: nn.Module, between: Sequence[nn.Module], linear: nn.Linear) -> bool:
    """Whether a convolution, an `nn.Flatten` and a linear layer are in one `nn.Sequential`."""
    return any(
        {conv, linear}.issubset(each)
        and any(isinstance(module, nn.Flatten) and module in [*each] for module in between)
        for each in model.modules()
        if isinstance(each, nn.Sequential)
    )


def _flattening(conv: Any, num_channels: int, linear: nn.Linear) -> Flattening:
    return Flattening(num_channels, linear.in_features // num_channels, len(conv.kernel_size))


def _is_multiple(size: int, num_channels: int) -> bool:
    """Whether so many features are several for each channel."""
    return size > num_channels > 1 and size % num_channels == 0


def _size_of_norm(module: nn.Module) -> int:
    """The number of features of a norm that can be one of flattened features; else 0."""
    if isinstance(module, nn.LayerNorm):
        return math.prod(module.normalized_shape)
    return module.num_features if isinstance(module, nn.BatchNorm1d) else 0


def _keeps_order(module: nn.Module) -> bool:
    """Whether it is a module of torch that leaves features in their order, or only holds others one after another."""
    return isinstance(module, nn.Sequential | nn.Flatten | nn.Identity) or type(module).__module__ in _KEEP_ORDER


def _is_global_pooling(module: nn.Module) -> bool:
    if not isinstance(module, _POOLINGS):
        return False
    sizes = module.output_size if isinstance(module.output_size, tuple) else (module.output_size,)
    return all(size == 1 for size in sizes)


def _has_other_parameters(module: nn.Module) -> bool:
    """Whether it has parameters that are not one for each channel, so that what comes before it tells nothing."""
    return not isinstance(module, _OF_CHANNELS) and next(module.parameters(recurse=False), None) is not None


def _opened(source: str | Path | WeightSource | Mapping[str, Any]) -> WeightSource:
    if isinstance(source, str | Path):
        # Of a run that may go on meanwhile, all workers open the checkpoint that is the newest to the chief.
        worker = join()
        found = open_weights(source) if worker.is_chief else None
        step = worker.group.broadcast(found.step if isinstance(found, RunWeights) else None)
        return found or open_weights(source, newest=step)
    if isinstance(source, Mapping):
        return MemorySource(source)
    if not isinstance(source, WeightSource):
        raise wrong_type(
            "source",
            source,
            expected="a path, tensors by name, or an open source of weights",
            hint="give the path of a file, or model.state_dict()",
        )
    return source


LEAST_SHARE = 0.1
"""The share of a detector's parameters that a start from trained weights has to load; less is next to nothing."""


def fitted(
    source: WeightSource,
    names: Collection[str],
    takes: Takes,
    mapping: WarmStart,
    *,
    prefixes: Sequence[str],
    name_maps: Iterable[NameMap] = (),
) -> WarmStart:
    """Say how a detector takes what it can of weights: what the file lacks, or has in another shape, stays fresh.

    It takes all of a detector, or the parameters of the backbone alone, whose names begin with the prefixes. Where the
    user's mapping has no names (a map, renames, prefixes), those are taken of the name map, shipped or the detector's,
    and the prefixes by which most tensors are found.
    """
    of_backbone = [f"^{re.escape(prefix)}" for prefix in prefixes]
    include = () if takes == "detector" else of_backbone
    wanted = [name for name in names if not include or any(re.search(pattern, name) for pattern in include)]
    says_names = mapping.name_map or mapping.rename or mapping.strip_prefix or mapping.add_prefix
    return replace(
        mapping if says_names else _with_names(source, wanted, mapping, [*SHIPPED, *name_maps]),
        include=mapping.include or tuple(include),
        ignore_missing=True,
        mismatch="skip",
        require_loaded=LEAST_SHARE if mapping.require_loaded is None else mapping.require_loaded,
    )


def _with_names(
    source: WeightSource, wanted: Collection[str], mapping: WarmStart, name_maps: Iterable[str | NameMap]
) -> WarmStart:
    """Return the mapping with the name map and the prefixes by which most names are found; of equals, the first."""
    variables, _ = select_variables(source, prefer_average=mapping.prefer_average)
    best, most = mapping, -1
    for name_map in (None, *name_maps):
        candidate = replace(mapping, name_map=name_map)
        mapped, unmatched = candidate.resolved_map.apply(variables)
        if name_map is not None and len(unmatched) == len(candidate.resolved_map.renames):
            continue
        named = {place.name for each in mapped.values() for place in each}
        strip, add = find_prefixes(named, wanted)
        found = len({swap_prefix(name, strip, add) for name in named}.intersection(wanted))
        if found > most:
            rename = (Rename(f"^{re.escape(strip)}", ""),) if strip else ()
            best, most = replace(candidate, rename=rename, add_prefix=add), found
    return best


def names_in_words(mapping: WarmStart) -> str:
    """Return the name map and the prefixes of a mapping, for the log; "" where names are taken as they are."""
    name_map = mapping.name_map if isinstance(mapping.name_map, str) else "of the detector" if mapping.name_map else ""
    said = {
        "name map": name_map,
        "rename": ", ".join(f"{each.pattern!r} to {each.to!r}" for each in mapping.rename),
        "strip_prefix": mapping.strip_prefix,
        "add_prefix": mapping.add_prefix,
    }
    return ", ".join(f"{what} {how}" for what, how in said.items() if how)
