"""Checks before step 1, on this worker and between all workers, and what the log says of it."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

import lockstep
from lockstep.checkpoints.encoding import check_saveable
from lockstep.checks import check_type
from lockstep.data.loader import Loader
from lockstep.errors import InputError
from lockstep.parallel.exchange import Exchange, is_exact
from lockstep.parallel.served import num_computing
from lockstep.parallel.tower_outputs import sparse_parameters
from lockstep.parallel.towers import Towers
from lockstep.readers.fingerprint import lines_of
from lockstep.screen import log
from lockstep.training.replicas import digest
from lockstep.training.saved_state import EXTRA, extra_state
from lockstep.training.state import TrainState
from lockstep.training.trained_with import describe_step, take_one_thread, threads_matter
from lockstep.version import __version__
from lockstep.workers.devices import describe_accelerator, describe_cpu, unusable_gpu, unused_kind
from lockstep.workers.environment import chosen_waits, short_waits_here
from lockstep.workers.rank import Worker, join

_prepared: WeakSet[TrainState] = WeakSet()
"""The states whose steps have been prepared."""


def prepare_steps(state: TrainState, towers: Towers, exchange: Exchange, worker: Worker) -> None:
    """Check the parts of a step before the first one is made, tell how updates are made, and lay the state out so."""
    check_start(state, worker)
    check_fit(state, towers, exchange)
    check_exact(exchange, worker)
    state.trained_with |= describe_step(towers, exchange, worker)
    if worker.is_chief:
        tell_start(state, towers, exchange, worker, is_first=not _prepared, is_new=state not in _prepared)
    tell_idle_threads()
    _prepared.add(state)
    if towers.channels_last:
        state.to_channels_last()


def check_state_and_towers(state: object, towers: object) -> None:
    """Refuse arguments of a step that are of another type."""
    check_type("state", state, TrainState, expected="a TrainState", hint="write ls.TrainState(model, optimizer)")
    check_type("towers", towers, (Towers, NoneType), expected="ls.Towers", hint="write ls.Towers(4) for four towers")


def check_start(state: TrainState, worker: Worker) -> None:
    """Refuse parameters without values, and any that differ between workers; all of them tell which worker has them."""
    parameters: dict[str, Tensor] = dict(state.model.named_parameters())
    buffers = dict(state.model.named_buffers())
    tensors = {**parameters, **buffers}
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
        versions["the files of lockstep"] = _digest_of(sorted(Path(lockstep.__file__).parent.rglob("*.py")))
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
    """Refuse tensors without values to train with; the others are told of the first one of each worker."""
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


def tell_start(
    state: TrainState, towers: Towers, exchange: Exchange, worker: Worker, *, is_first: bool, is_new: bool
) -> None:
    """Log how updates are made, for the first of all states, and what the patterns of a new one have matched."""
    if is_first:
        threads = f", {_count(torch.get_num_threads(), 'thread')} each" if worker.device.type == "cpu" else ""
        computing = num_computing(exchange, worker.num_workers)
        served = ", which worker 0 serves" if computing < worker.num_workers else ""
        counts = _count(towers.count, "tower"), _count(computing, "worker")
        log.info("%s on %s (%s%s, %s)%s", *counts, worker.device.type, threads, towers.precision, served)
        if kind := unused_kind():
            log.info("no worker uses the accelerator here (%s): not every part of a step runs on it", kind)
        if reason := unusable_gpu():
            log.info("torch does not see the GPU of this machine: %s", reason)
    for line in state.matches if is_new else ():
        log.info("%s", line)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"
