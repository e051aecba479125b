"""Saving a run and taking it up again, exactly: the next batch is the one that was due."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoints.background import settle
from lockstep.checkpoints.encoding import FROZEN
from lockstep.checkpoints.store import Checkpoint, Store
from lockstep.data.loader import Loader
from lockstep.errors import CheckpointError
from lockstep.screen import log
from lockstep.training.extra_state import SECTION, ExtraState, check_extra_state, extra_state, set_extra_state
from lockstep.training.preflight import check_data
from lockstep.training.state import TrainState
from lockstep.training.trained_with import check_unchanged, trained_with
from lockstep.version import __version__
from lockstep.workers.rank import join
from lockstep.workers.signals import uninterrupted

States = TrainState | Mapping[str, TrainState]


def save(
    states: States, loader: Loader, workdir: str | Path | Store, *, scores: Mapping[str, float] | None = None
) -> None:
    """Write a checkpoint of the run as it stands; only the chief writes, and the others go on.

    Returns once it is on the disk. A `Saver` writes while the run goes on.

    Args:
        states: one state, or several by name.
        loader: its position is saved, not what it has read ahead.
        workdir: the run's folder (checkpoints go to its `checkpoints/`), or a store with other rules of retention.
        scores: of the weights as they stand, by name ("validation/top1"), for a retention that keeps the best.

    Raises:
        CheckpointError: it cannot be written, or the state is not finite: trained parameters and averages have to
            be, and nothing may hold NaN, whatever `nonfinite` says. Older checkpoints are as they were.
    """
    if join().is_chief:
        settle()
        step, tensors, values = contents(states, loader)
        with join().pulse.during(step, "save"):
            store_of(workdir).write(step, tensors, values, scores)


def contents(states: States, loader: Loader) -> tuple[int, dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What a checkpoint of the run holds: its step, the tensors (the run's own, not copies), and the rest as JSON."""
    named = by_name(states)
    sections = {
        prefix + section: members for prefix, state in named.items() for section, members in state.sections().items()
    }
    values: dict[str, Any] = {
        "lockstep": __version__,
        "states": {prefix.rstrip("."): state.values() for prefix, state in named.items()},
        "loader": loader.state(),
        "trained_with": trained_with(_without_dots(named), loader),
    }
    if frozen := {f"{prefix}parameters": state.untrained() for prefix, state in named.items() if state.untrained()}:
        values[FROZEN] = frozen
    for prefix, state in named.items():
        extra = extra_state(state.model)
        if extra.values:
            sections[prefix + SECTION] = dict(extra.tensors)
            values["states"][prefix.rstrip(".")][SECTION] = extra.values
    return max(state.step for state in named.values()), sections, values


def resume(
    states: States,
    loader: Loader,
    workdir: str | Path | Store,
    *,
    changed: Sequence[str] = (),
    accept_data_change: bool = False,
) -> int | None:
    """Take up the newest intact checkpoint of a workdir, if it has one, on all workers alike.

    What the run was trained with is compared: optimizers and all else that `TrainState` is given for the update, batch
    size, order and augmentations of the loader, and its data; with the first step the towers and the exchange.
    Functions and objects of your own are compared by name. Ends, intervals, workers and loader processes may differ,
    and so may the number of threads, which the log then tells; but for an exact exchange, whose bits depend on it.

    Args:
        states: one state, or several by name, as they were saved.
        loader: is set to the position of the checkpoint.
        workdir: the run's folder, or its store.
        changed: paths of what differs on purpose: `("optimizer.lr", "loader.batch_size")`. A path stands for all below
            it: "optimizer". Of several states it begins with the name of one.
        accept_data_change: go on although the examples are other ones, if they are as many; the log names them.

    Returns:
        The step it was saved at, or None where there is none and the run starts afresh.

    Raises:
        CheckpointError: there are checkpoints and none is intact, or it does not fit the states.
        InputError: the loader reads other data, or with another seed; or something else differs from what the run was
            trained with. Towers and exchange are refused by the first step.
        WorkerError: the workers' loaders read different data.
    """
    check_data(loader, join())
    checkpoint = agreed(workdir)
    if checkpoint is None:
        return None
    lines = check_unchanged(checkpoint, _without_dots(by_name(states)), loader, changed)
    take_over(checkpoint, states, loader, accept_data_change=accept_data_change)
    if join().is_chief:
        for line in lines:
            log.info("changed since the checkpoint: %s", line)
        log.info("resumed at step %d, position %d, from %s", checkpoint.step, loader.position, checkpoint.path)
    return checkpoint.step


def agreed(workdir: str | Path | Store, step: int | None = None) -> Checkpoint | None:
    """The same checkpoint on all workers: that of a step, or the newest that is intact; None where there is none.

    Raises:
        CheckpointError: there are checkpoints and none is intact, or that of the step is missing or damaged.
    """
    worker, store = join(), store_of(workdir)
    settle()
    found = store.read(step) if worker.is_chief else None
    newest = worker.group.broadcast(found.step if found else None)
    return found if found or newest is None else store.read(int(str(newest)))


def take_over(checkpoint: Checkpoint, states: States, loader: Loader, *, accept_data_change: bool = False) -> list[str]:
    """Have states and a loader stand where a checkpoint was saved.

    Returns:
        What has changed in the data, a line each.

    Raises:
        CheckpointError: it does not fit the states.
        InputError: the loader reads other data, or with another seed.
    """
    with uninterrupted():
        restore(checkpoint, states)
        changed = loader.load_state(checkpoint.values["loader"], accept_data_change=accept_data_change)
    if join().is_chief:
        for line in changed:
            log.warning("changed in the training data since step %d: %s", checkpoint.step, line)
    return changed


def restore(checkpoint: Checkpoint, states: States) -> None:
    """Take over the states of a checkpoint, and not its place in the stream.

    Raises:
        CheckpointError: it holds other states, or does not fit them.
    """
    named = by_name(states)
    saved: Mapping[str, Any] = checkpoint.values["states"]
    names = {prefix.rstrip(".") for prefix in named}
    if saved.keys() != names:
        raise CheckpointError(
            f"{checkpoint.path} holds other states.",
            given=_named(saved),
            expected=_named(names),
            hint="resume with the same dict of states, or one state alone, as it was saved",
        )
    for prefix, state in named.items():
        sections = {
            section.removeprefix(prefix): tensors
            for section, tensors in checkpoint.tensors.items()
            if section.startswith(prefix)
        }
        values = saved[prefix.rstrip(".")]
        extra = ExtraState(sections.pop(SECTION, {}), values.get(SECTION, {}))
        check_extra_state(state.model, extra)
        state.load(sections, values)
        set_extra_state(state.model, extra)


def _named(states: Iterable[str]) -> str:
    return "one state without a name" if set(states) == {""} else f"states named {', '.join(sorted(states))}"


def by_name(states: States) -> dict[str, TrainState]:
    """The states by the prefix of their sections; that of a single one is empty."""
    if isinstance(states, TrainState):
        return {"": states}
    return {f"{name}.": state for name, state in states.items()}


def _without_dots(named: Mapping[str, TrainState]) -> dict[str, TrainState]:
    return {prefix.rstrip("."): state for prefix, state in named.items()}


def store_of(workdir: str | Path | Store) -> Store:
    """The store itself, or that of a run's folder."""
    return workdir if isinstance(workdir, Store) else Store(Path(workdir) / "checkpoints")
