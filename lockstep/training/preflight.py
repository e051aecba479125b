"""Checks before step 1: on this worker, between all workers, and against the run that is resumed; and the log of it."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoints.encoding import check_saveable
from lockstep.checkpoints.store import Checkpoint
from lockstep.checks import check_type
from lockstep.data.loader import Loader
from lockstep.description import Change, changes, described, paths
from lockstep.errors import InputError
from lockstep.exchange.exchange import Exchange, is_exact
from lockstep.readers.fingerprint import lines_of
from lockstep.screen import log
from lockstep.served.exchanges import num_computing
from lockstep.towers.backends import backends_of_steps
from lockstep.towers.tower_outputs import sparse_parameters
from lockstep.towers.towers import Towers
from lockstep.training.replicas import digest
from lockstep.training.saved_state import EXTRA, extra_state
from lockstep.training.state import Resumed, TrainState
from lockstep.version import __version__
from lockstep.workers.devices import describe_accelerator, describe_cpu, unusable_gpu, unused_kind
from lockstep.workers.environment import chosen_waits, short_waits_here
from lockstep.workers.rank import Worker, join

_OF_STEP = ("towers", "exchange", "threads", "accelerator")
"""Known with the first step alone."""
_HINTS = {
    "threads": "lockstep run --threads {0}, or torch.set_num_threads({0}) before the first step",
    "towers.count": "ls.Towers({}); without it there is a tower for each worker",
}


def prepare_steps(
    state: TrainState, towers: Towers, exchange: Exchange, worker: Worker, *, was_made: bool = False
) -> None:
    """Check the parts of a step before the first one is made, tell how updates are made, and lay the state out so.

    Workers that go on without others compare nothing anew where each of them has made this step before (`was_made`):
    what they go on from has been compared, and they are to stand still no longer than they must.
    """
    has_regrouped = worker.pulse.generations is not None and worker.pulse.generations.joined > 0
    if not (has_regrouped and all(worker.group.gather(was_made))):
        check_start(state, worker)
        check_fit(state, towers, exchange)
    check_exact(exchange, worker)
    state.train_with(**describe_step(towers, exchange, worker))
    if worker.is_chief:
        tell_start(state, towers, exchange, worker)
    tell_idle_threads()
    if towers.channels_last:
        state.to_channels_last()


def check_state_and_towers(state: object, towers: object) -> None:
    """Refuse arguments of a step that are of another type."""
    check_type("state", state, TrainState, expected="a TrainState", hint="write ls.TrainState(model, optimizer)")
    check_type("towers", towers, (Towers, NoneType), expected="ls.Towers", hint="write ls.Towers(4) for four towers")


def check_start(state: TrainState, worker: Worker) -> None:
    """Refuse parameters without values, and any that differ between workers; all of them tell which worker has them."""
    tensors: dict[str, Tensor] = {**dict(state.model.named_parameters()), **dict(state.model.named_buffers())}
    if worker.num_workers > 1:
        worker.group.agree("versions", _versions(worker))
    _check_values(tensors, state.parameters, worker)
    check_saveable({**state.sections(), EXTRA: extra_state(state.model).tensors})
    if worker.num_workers == 1:
        return
    shapes = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
    worker.group.agree("the parameters of the model", shapes)
    worker.group.agree("the values of the model", {name: digest(tensor) for name, tensor in tensors.items()})


def _versions(worker: Worker) -> dict[str, str]:
    """The versions of what this worker runs; where hosts may have copies of their own, digests of the files, too."""
    packages = {"torch": torch.__version__, "numpy": np.__version__, "lockstep": __version__}
    versions = {"python": platform.python_version(), **packages}
    if worker.num_local_workers < worker.num_workers:
        versions["the files of lockstep"] = _digest_of(sorted(Path(__file__).parents[1].rglob("*.py")))
        if sys.argv[0].endswith(".py"):
            versions[f"the file {Path(sys.argv[0]).name}"] = _digest_of([Path(sys.argv[0])])
    return versions


def _digest_of(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:16]


def check_data(loader: Loader, worker: Worker) -> None:
    """Refuse workers that read different data: each may have a copy of its own."""
    worker.group.agree("the training data", lines_of(loader.fingerprint))


def check_fit(state: TrainState, towers: Towers, exchange: Exchange) -> None:
    """Refuse parts that contradict each other."""
    _check_embeddings(state)
    if towers.joined and state.tower_transforms:
        raise InputError(
            "Towers that run as one batch have no gradients of their own.",
            given=f"batch_norm={towers.batch_norm!r}, and tower_gradient_transforms",
            expected="tower_gradient_transforms with towers that run one by one",
            hint="use gradient_transforms, or another batch_norm",
        )
    with_rows = sparse_parameters(state.model)
    state.check_rows(with_rows)
    sparse = set(with_rows) & set(state.penalised)
    if sparse:
        raise InputError(
            "A penalty cannot be on a parameter that has sparse gradients.",
            given=f"regularization of {', '.join(sorted(sparse))}",
            expected="penalties on parameters with dense gradients",
            hint="give the penalty a pattern that leaves it out, or build the embedding with sparse=False",
        )
    if towers.joined and is_exact(exchange):
        raise InputError(
            "Synchronised batch norm cannot be exact: its sums are rounded by the number of workers.",
            given=f"batch_norm={towers.batch_norm!r}, {exchange}",
            expected='batch_norm="mean", "first", "last", "none" or "frozen" with an exact exchange',
            hint="set exact=False, or choose another batch_norm",
        )


def check_exact(exchange: Exchange, worker: Worker) -> None:
    """Where the exchange is exact, compare what its bits depend on between the workers, and tell their threads."""
    if is_exact(exchange):
        machine = {"cpu": describe_cpu(), **describe_accelerator(worker.device)}
        worker.group.agree("the machine, on which exact bits depend", machine)
    if threads_matter(exchange, worker):
        take_one_thread(worker)
        num_threads = torch.get_num_threads()
        worker.group.agree("the number of threads", num_threads)
        if num_threads > 1 and worker.is_chief:
            log.warning(
                "exact: the bits depend on the %d threads of each worker, and a resume with others is refused; "
                "`lockstep run` without --threads trains with one",
                num_threads,
            )


@cache  # without arguments: a worker that was kept here would keep the connections of its group open
def tell_idle_threads() -> None:
    """Tell, once, how idle threads of the CPU wait; advise a script that was started without a word about it."""
    worker = join()
    if not worker.is_chief or worker.device.type != "cpu" or torch.get_num_threads() == 1:
        return
    chosen = chosen_waits(os.environ)
    if worker.pulse.launched:
        log.info("idle threads wait by %s", _assignments(chosen) or "the default of OpenMP")
    elif not chosen and (short := short_waits_here()):
        log.info(
            "idle threads spin, and beside another busy process a step takes many times as long: start with "
            "%s python %s, or with lockstep run, which sets it",
            _assignments(short),
            sys.argv[0] if sys.argv[0].endswith(".py") else "script.py",
        )


def _assignments(variables: Mapping[str, str]) -> str:
    """Variables as a shell takes them."""
    return " ".join(f"{name}={value}" for name, value in variables.items())


def _check_embeddings(state: TrainState) -> None:
    renormed = [name for name, module in state.model.named_modules() if getattr(module, "max_norm", None) is not None]
    if renormed:
        raise InputError(
            "An embedding with max_norm changes its weight in the forward pass, which only the update may do.",
            given=", ".join(renormed),
            expected="embeddings without max_norm",
            hint="leave max_norm out, or normalise the rows that are looked up",
        )


def _check_values(tensors: Mapping[str, Tensor], trained: Collection[str], worker: Worker) -> None:
    """Refuse tensors without values to train with; all workers name the first of them that any worker has."""
    found = ((name, _fault(tensor, worker, is_trained=name in trained)) for name, tensor in tensors.items())
    of_all: list[Any] = worker.group.gather(next(([name, *fault] for name, fault in found if fault), None))
    first = next(filter(None, of_all), None)
    if first is not None:
        name, given, hint = first
        alike = [worker.group.names[rank] for rank, each in enumerate(of_all) if each == first]
        raise InputError(
            f"{name!r} cannot be trained.",
            given=given if len(alike) == len(of_all) else f"{given}, on {', '.join(alike)}",
            expected=f"{'finite values' if name in trained else 'values other than NaN'} on {worker.device}",
            hint=hint,
        )


def _fault(tensor: Tensor, worker: Worker, *, is_trained: bool) -> tuple[str, str] | None:
    """What is wrong with the values of a tensor, and a hint."""
    if tensor.is_meta:
        return "on the meta device", "build the model on a real device, or load its weights"
    if tensor.device != worker.device:
        return f"on {tensor.device}", "move the model with .to(ls.join().device) before TrainState"
    if tensor.is_floating_point() and not _is_good(tensor if tensor.itemsize > 1 else tensor.float(), is_trained):
        return "not finite", "look at its initialiser, or at the weights it was loaded from"
    return None


def _is_good(tensor: Tensor, is_trained: bool) -> bool:
    """What is not trained, such as a mask, may hold infinities; what is not dense, `check_saveable` refuses."""
    if tensor.layout is not torch.strided:
        return True
    return bool((tensor.isfinite() if is_trained else ~tensor.isnan()).all())


def check_parameters(state: TrainState) -> None:
    """Refuse parameters that were replaced, frozen, unfrozen, added or laid out anew since their state was made."""
    parameters = dict(state.model.named_parameters())
    _refuse_names(
        [name for name, parameter in state.parameters.items() if parameters.get(name) is not parameter],
        "Parameters were replaced in the model after the state was made, and the new ones would not be trained.",
        "the parameters that TrainState took, with new values only",
        "make a new TrainState after the change, or write into what is there: parameter.data.copy_(values)",
    )
    _refuse_names(
        [name for name, parameter in parameters.items() if parameter.requires_grad != (name in state.parameters)],
        "Parameters were frozen, unfrozen or added after the state was made.",
        "the parameters that TrainState took, with requires_grad as it was",
        "make a new TrainState after the change; where several share parameters, no other may freeze them",
    )
    pairs = zip(state.parameters, state.parameter_layouts(), state.layouts, strict=True)
    _refuse_names(
        [name for name, now, before in pairs if now != before],
        "Parameters have another memory format or dtype than when their state was made.",
        "parameters as they were: slots and gradients are laid out like them",
        "change the model before TrainState, or use Towers(channels_last=True)",
    )


def check_buffers(state: TrainState) -> None:
    """Refuse to train a model in which a buffer has been replaced since its state was made."""
    buffers = dict(state.model.named_buffers())
    _refuse_names(
        [name for name, buffer in state.buffers.items() if buffers.get(name) is not buffer],
        "Buffers were replaced in the model after the state was made.",
        "the buffers that TrainState took, with new values only",
        "make a new TrainState after the change, or write into what is there: buffer.copy_(values)",
    )


def check_training_mode(state: TrainState) -> None:
    """Refuse a step of a model that is in evaluation mode; its submodules may be."""
    if not state.model.training:
        raise InputError(
            "The model is in evaluation mode: it would train without dropout, and without new batch-norm statistics.",
            given=f"{type(state.model).__name__} after model.eval()",
            expected="a model in training mode, as TrainState has set it",
            hint="call model.train() after an evaluation of your own (ls.evaluate leaves the model alone); to train so "
            "on purpose, put its submodules alone in evaluation mode, or use Towers(batch_norm='frozen')",
        )


def _refuse_names(names: Sequence[str], what: str, expected: str, hint: str) -> None:
    if names:
        raise InputError(what, given=", ".join(names), expected=expected, hint=hint)


def tell_start(state: TrainState, towers: Towers, exchange: Exchange, worker: Worker) -> None:
    """Log how updates are made, for the first of all states, and what the patterns of a new one have matched."""
    if state.is_first_to_train():
        threads = f", {_count(torch.get_num_threads(), 'thread')} each" if worker.device.type == "cpu" else ""
        computing = num_computing(exchange, worker.num_workers)
        served = ", which worker 0 serves" if computing < worker.num_workers else ""
        counts = _count(towers.num_towers, "tower"), _count(computing, "worker")
        log.info("%s on %s (%s%s, %s)%s", *counts, worker.device.type, threads, towers.precision, served)
        if kind := unused_kind():
            log.info("no worker uses the accelerator here (%s): not every part of a step runs on it", kind)
        if reason := unusable_gpu():
            log.info("torch does not see the GPU of this machine: %s", reason)
    for line in () if state.steps else state.matches:
        log.info("%s", line)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


# What a run was trained with: compared when it is resumed -------------------------------------------------------------


def describe_step(towers: Towers, exchange: Exchange, worker: Worker) -> dict[str, Any]:
    """What the steps of a state are made with, in this process, as JSON; of the accelerator only where there is one."""
    step = {"towers": described(towers), "exchange": described(exchange), "threads": torch.get_num_threads()}
    accelerator = backends_of_steps(towers, worker.device, exact=is_exact(exchange)).described()
    return step | ({"accelerator": described(accelerator)} if accelerator else {})


def compare_trained_with(
    checkpoint: Checkpoint, states: Mapping[str, TrainState], loader: Loader, changed: Sequence[str]
) -> list[str]:
    """Compare what a checkpoint was trained with; nothing where an older version wrote it.

    Towers, exchange and threads are known with the first step of a state, and compared then. The paths in `changed` may
    differ: "optimizer.lr"; "optimizer" for all of it; with several states "generator.optimizer.lr". Returns a line for
    each such difference.
    """
    saved_with = checkpoint.values.get("trained_with", {"states": {}, "loader": {}})
    saved, given = _by_path("loader", saved_with["loader"]), _by_path("loader", loader.made_with)
    for name, state in states.items():
        before = saved_with["states"].get(name, {})
        now = {part: value for part, value in state.trained_with.items() if part not in _OF_STEP}
        saved |= _by_path(name, before)
        given |= _by_path(name, now)
        then = now | {part: before[part] for part in _OF_STEP if part in before}
        state.resume_as(then, Resumed(str(checkpoint.path), name, changed))
    found = _differences(saved, given)
    if changed:
        known = {"loader", *filter(None, states)}
        known |= {path for name in states for path in _by_path(name, dict.fromkeys(_OF_STEP))}
        known |= {inner for each in (saved, given) for path, value in each.items() for inner in paths(path, value)}
        _check_known(changed, known, found)
    return _check_allowed(str(checkpoint.path), found, changed)


def compare_first_step(state: TrainState, towers: Towers, exchange: Exchange, worker: Worker) -> None:
    """Compare what the first step after a resume is made with.

    Threads and accelerator are refused where the exchange is exact, and else logged.
    """
    assert state.resumed, "it is asked for after a resume"
    checkpoint, name, changed = state.resumed
    if threads_matter(exchange, worker):
        take_one_thread(worker)
    step = describe_step(towers, exchange, worker)
    found = _differences(_by_path(name, state.trained_with), _by_path(name, step))
    matters = {"threads": threads_matter(exchange, worker), "accelerator": is_exact(exchange)}
    changed = [*changed, *_by_path(name, {part: None for part in matters if not matters[part]})]
    for line in _check_allowed(checkpoint, found, changed, _by_path(name, _HINTS)):
        if worker.is_chief:
            log.info("changed since the checkpoint: %s", line)
    state.resume_as(state.trained_with | step, None)


def threads_matter(exchange: Exchange, worker: Worker) -> bool:
    """Whether exact bits are promised, and the number of CPU threads decides them."""
    return is_exact(exchange) and worker.device.type == "cpu"


def take_one_thread(worker: Worker) -> None:
    """Have an exact run compute with one thread where nobody has named a number, and the worker has a share of cores.

    The share is another with another number of workers, and the bits are to be the same.
    """
    share = worker.pulse.shared_threads
    if share in (None, 1) or share != torch.get_num_threads() or worker.pulse.named_threads:
        return
    torch.set_num_threads(1)
    if worker.is_chief:
        log.info("exact: one thread a worker, whose share is %d cores; --threads names more", share)


def _by_path(name: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of the loader or of a state by their paths; of a single state, whose name is empty, by their names."""
    return {f"{name}.{part}" if name else part: value for part, value in parts.items()}


def _differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[Change]:
    """The changes of what both have: what only one has is not known yet, or of another version."""
    return [change for path in given if path in saved for change in changes(path, saved[path], given[path])]


def _check_known(changed: Sequence[str], known: Collection[str], found: Sequence[Change]) -> None:
    """Refuse a path of nothing: it would allow nothing, and hide a slip of the pen until a resume is refused."""
    unknown = [path for path in changed if path not in known]
    if unknown:
        tops = [path for path in known if not re.search(r"[\[.]", path)]
        differing = ", ".join(f'"{change.path}"' for change in found)
        raise InputError(
            "changed names what the run is not trained with.",
            given=", ".join(f'"{path}"' for path in unknown),
            expected=f"paths that begin with one of: {', '.join(sorted(tops))}",
            hint=f"name what differs: {differing}" if found else "leave it out: nothing differs that is known yet",
        )


def _check_allowed(
    checkpoint: str, found: Sequence[Change], changed: Sequence[str], hints: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Refuse changes outside of the paths `changed`; those within are returned, a line each."""
    grave = [change for change in found if not change.is_allowed(changed)]
    if grave:
        how = [hints[change.path].format(change.saved) for change in grave if change.path in hints]
        differing = "".join(f'"{change.path}", ' for change in grave)
        raise InputError(
            f"{checkpoint} was trained with something else.",
            given="; ".join(map(str, grave)),
            expected="what the run was trained with",
            hint=f"take the changes back{''.join(f' ({hint})' for hint in how)}, "
            f"or go on with them: ls.resume(..., changed=({differing.rstrip()}))",
        )
    return [str(change) for change in found]
