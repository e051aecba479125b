"""Writing the checkpoints of a run: at once, or while the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from lockstep.checkpoints.background import BackgroundWriter, wait_for_writers
from lockstep.checkpoints.encoding import FROZEN
from lockstep.checkpoints.store import Store
from lockstep.data.loader import Loader
from lockstep.errors import CheckpointError
from lockstep.training.saved_state import EXTRA, extra_state
from lockstep.training.state import TrainState, before_change
from lockstep.version import __version__
from lockstep.workers.rank import join

States = TrainState | Mapping[str, TrainState]


def save(
    states: States, loader: Loader, workdir: str | Path | Store, *, scores: Mapping[str, float] | None = None
) -> None:
    """Write a checkpoint of the run as it is now; only the chief writes, and the others go on.

    Returns once it is on the disk. A `Saver` writes while the run goes on.

    Args:
        states: one state, or several by name.
        loader: its position is saved, not what it has read ahead.
        workdir: the run's folder (checkpoints go to its `checkpoints/`), or a store with other rules of retention.
        scores: of the weights as they are now, by name ("validation/top1"), for a retention that keeps the best.

    Raises:
        CheckpointError: it cannot be written, or the state is not finite: trained parameters, averages and slots have
            to be, and nothing may hold NaN, whatever `nonfinite` says. Older checkpoints are as they were.
    """
    worker = join()
    if worker.is_chief:
        wait_for_writers()
        step, tensors, values = snapshot(states, loader)
        with worker.pulse.during(step, "save"):
            store_of(workdir).write(step, tensors, values, scores)


class Saver:
    """Writes the checkpoints of a run while it goes on; only the chief does, and on the others nothing happens.

    `save` returns once the state is copied, and a thread writes the copy: whatever the loop body changes afterwards, by
    whatever means, is not in it. On an accelerator the copy is a clone there, for which nobody waits, as long as its
    memory has room for one. Where a checkpoint cannot be written, a later step or `save` raises the error. At most one
    is in flight: the next `save` waits for it. After `wait`, or at the end of a `with` statement, the last one is on
    the disk.

    Args:
        workdir: the run's folder (checkpoints go to its `checkpoints/`), or a store with other rules of retention.
    """

    def __init__(self, workdir: str | Path | Store) -> None:
        self._writer = BackgroundWriter(store_of(workdir))

    def save(self, states: States, loader: Loader, *, scores: Mapping[str, float] | None = None) -> None:
        """Begin to write a checkpoint of the run as it is now; the arguments are those of `lockstep.save`.

        Raises:
            CheckpointError: the one before could not be written, or a tensor cannot be saved. That the state is not
                finite, a later call says.
        """
        if not join().is_chief:
            return
        step, tensors, values = snapshot(states, loader)
        self._writer.begin(step, tensors, values, scores, before_change=before_change)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        self._writer.wait()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except CheckpointError as unwritten:
            if error is None:
                raise
            error.add_note(f"Besides: {unwritten}")


def snapshot(states: States, loader: Loader) -> tuple[int, dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Step, tensors and values of a checkpoint; the tensors are the run's own, not copies, the values JSON."""
    named = named_states(states)
    sections: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, Any] = {}
    frozen: dict[str, list[str]] = {}
    for name, state in named.items():
        sections |= {dotted(name, section): tensors for section, tensors in state.sections().items()}
        saved[name] = state.values()
        if untrained := state.untrained():
            frozen[dotted(name, "parameters")] = untrained
    for name, state in named.items():
        extra = extra_state(state.model)
        if extra.values:
            sections[dotted(name, EXTRA)] = dict(extra.tensors)
            saved[name][EXTRA] = extra.values
    values: dict[str, Any] = {
        "lockstep": __version__,
        "states": saved,
        "loader": loader.state(),
        "trained_with": {
            "states": {name: state.trained_with for name, state in named.items()},
            "loader": loader.made_with,
        },
    }
    if frozen:
        values[FROZEN] = frozen
    return max(state.step for state in named.values()), sections, values


def named_states(states: States) -> dict[str, TrainState]:
    """The states by name; a single one has the name ""."""
    return {"": states} if isinstance(states, TrainState) else dict(states)


def dotted(name: str, part: str) -> str:
    """The part of a state: `generator.parameters`; of a single state, which has no name, the part alone."""
    return f"{name}.{part}" if name else part


def store_of(workdir: str | Path | Store) -> Store:
    """The store itself, or that of a run's folder."""
    return workdir if isinstance(workdir, Store) else Store(Path(workdir) / "checkpoints")
