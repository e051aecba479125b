"""What a script trains with: said in each checkpoint, and compared when a start of the script resumes.

A run by a recipe has all of this in its workdir, and compares it there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lockstep.checks import check_all
from lockstep.description import Change, changes, described
from lockstep.errors import InputError
from lockstep.optim.by_name import ByName

if TYPE_CHECKING:
    from lockstep.checkpoints.store import Checkpoint
    from lockstep.data.loader import Loader
    from lockstep.parallel.exchange import Exchange
    from lockstep.parallel.towers import Towers
    from lockstep.training.state import TrainState
    from lockstep.workers.rank import Worker

log = logging.getLogger("lockstep")

_HINTS = {
    "threads": "torch.set_num_threads({}) before the first step",
    "towers.count": "ls.Towers({}); without it there is a tower for each worker",
}


class Resumed(NamedTuple):
    """What the first step after a resume is compared with."""

    checkpoint: str
    name: str
    """That of the state; empty where there is only one."""
    saved: Mapping[str, Any]
    changed: Sequence[str]
    """What may differ."""


def of_state(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a `TrainState` is made with, as far as it changes the update of an attempt that is finite."""
    names = ("freeze_statistics", "regularization", "tower_gradient_transforms", "gradient_transforms", "average")
    given = {name: arguments[name] for name in ("optimizer", "frozen", "train_only", *names, "updates", "name")}
    for patterns in ("frozen", "train_only"):
        given[patterns] = [given[patterns]] if isinstance(given[patterns], str) else given[patterns]
    if isinstance(given["optimizer"], ByName):
        given["optimizer"] = given["optimizer"].optimizers
    return {name: described(value) for name, value in given.items()}


def of_step(towers: Towers, exchange: Exchange) -> dict[str, Any]:
    """What the steps of a state are made with, in this process."""
    return {"towers": described(towers), "exchange": described(exchange), "threads": torch.get_num_threads()}


def _of_loader(loader: Loader) -> dict[str, Any]:
    return {name: described(getattr(loader, name)) for name in ("batch_size", "order", "augment")}


def trained_with(states: Mapping[str, TrainState], loader: Loader) -> dict[str, Any]:
    """What a checkpoint says, by the names of the states; of a state without a step yet what was resumed."""
    return {
        "states": {
            name: {**state.made_with, **(state.computed_with or (state.resumed.saved if state.resumed else {}))}
            for name, state in states.items()
        },
        "loader": _of_loader(loader),
    }


def check_unchanged(
    checkpoint: Checkpoint, states: Mapping[str, TrainState], loader: Loader, changed: Sequence[str]
) -> list[str]:
    """Compare what a checkpoint was trained with; nothing where an older version wrote it.

    Towers, exchange and threads are known with the first step of a state, and compared then.

    Args:
        checkpoint: to be resumed.
        states: by name.
        loader: gives the batches.
        changed: paths that may differ: "optimizer.lr"; "optimizer" for all of it; with several states
            "generator.optimizer.lr".

    Returns:
        A line for each allowed difference.

    Raises:
        InputError: something else differs.
    """
    check_all("changed", changed, str, mend='write changed=("optimizer.lr",), a tuple of paths')
    saved = checkpoint.values.get("trained_with", {"states": {}, "loader": {}})
    found = list(_compared("loader", saved["loader"], _of_loader(loader)))
    for name, state in states.items():
        before = saved["states"].get(name, {})
        found += _compared(name, before, state.made_with)
        later = {part: before[part] for part in ("towers", "exchange", "threads") if part in before}
        state.resumed = Resumed(str(checkpoint.path), name, later, changed)
    return _allowed(str(checkpoint.path), found, changed)


def check_threads(exchange: Exchange, worker: Worker) -> None:
    """Where the exchange is exact, say which threads its bits depend on; all workers come here together.

    Raises:
        WorkerError: the workers compute on different numbers of threads.
    """
    if _is_exact(exchange, worker):
        num_threads = torch.get_num_threads()
        worker.group.agree("the number of threads", num_threads)
        if num_threads > 1 and worker.is_chief:
            log.warning(
                "exact: the bits depend on the %d threads of each worker, and a resume with others is refused; "
                "`lockstep run` starts workers with one",
                num_threads,
            )


def check_resumed(state: TrainState, towers: Towers, exchange: Exchange, worker: Worker) -> None:
    """Compare what the first step after a resume is made with; the threads are refused where the exchange is exact.

    Raises:
        InputError: it differs from what the checkpoint was trained with, and is not said to.
    """
    assert state.resumed, "it is asked for after a resume"
    checkpoint, name, saved, changed = state.resumed
    found = list(_compared(name, saved, of_step(towers, exchange)))
    if not _is_exact(exchange, worker):
        changed = [*changed, f"{name}.threads" if name else "threads"]
    for line in _allowed(checkpoint, found, changed):
        if worker.is_chief:
            log.info("changed since the checkpoint: %s", line)
    state.resumed = None


def _is_exact(exchange: Exchange, worker: Worker) -> bool:
    """Whether the bits are promised, and threads of the CPU decide them."""
    return getattr(exchange, "exact", False) and worker.device.type == "cpu"


def _compared(name: str, saved: Mapping[str, Any], given: Mapping[str, Any]) -> Iterable[Change]:
    """What only one of the two says does not count: it is not known yet, or of another version."""
    for part in given:
        if part in saved:
            yield from changes(f"{name}.{part}" if name else part, saved[part], given[part])


def _allowed(checkpoint: str, found: Sequence[Change], changed: Sequence[str]) -> list[str]:
    grave = [change for change in found if not change.is_allowed(changed)]
    if grave:
        hints = [
            hint.format(change.saved) for change in grave for end, hint in _HINTS.items() if change.path.endswith(end)
        ]
        paths = "".join(f'"{change.path}", ' for change in grave)
        raise InputError(
            f"{checkpoint} was trained with something else.",
            given="; ".join(map(str, grave)),
            expected="what the run was trained with",
            mend=f"take the changes back{''.join(f' ({hint})' for hint in hints)}, "
            f"or go on with them: ls.resume(..., changed=({paths.rstrip()}))",
        )
    return [str(change) for change in found]
