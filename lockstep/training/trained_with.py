"""What a script trains with: said in each checkpoint, and compared when a start of the script resumes.

A run by a recipe has all of this in its workdir, and compares it there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lockstep.checks import check_all
from lockstep.description import Change, changes, described, paths
from lockstep.errors import InputError
from lockstep.optim.by_name import ByName
from lockstep.screen import log

if TYPE_CHECKING:
    from lockstep.checkpoints.store import Checkpoint
    from lockstep.data.loader import Loader
    from lockstep.parallel.exchange import Exchange
    from lockstep.parallel.towers import Towers
    from lockstep.training.state import TrainState
    from lockstep.workers.rank import Worker


_OF_STEP = ("towers", "exchange", "threads")
"""What is known with the first step alone."""
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


def trained_with(states: Mapping[str, TrainState], loader: Loader) -> dict[str, Any]:
    """What a checkpoint says, by the names of the states; of a state without a step yet what was resumed."""
    return {
        "states": {
            name: {**state.made_with, **(state.computed_with or (state.resumed.saved if state.resumed else {}))}
            for name, state in states.items()
        },
        "loader": loader.made_with,
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
        InputError: something else differs, or `changed` names a path that neither of the two has.
    """
    check_all("changed", changed, str, hint='write changed=("optimizer.lr",), a tuple of paths')
    saved = checkpoint.values.get("trained_with", {"states": {}, "loader": {}})
    found = list(_compared("loader", saved["loader"], loader.made_with))
    known = {*_paths("loader", saved["loader"]), *_paths("loader", loader.made_with)}
    for name, state in states.items():
        before = saved["states"].get(name, {})
        found += _compared(name, before, state.made_with)
        later = {part: before[part] for part in _OF_STEP if part in before}
        known |= {*_paths(name, dict.fromkeys(_OF_STEP)), *_paths(name, before), *_paths(name, state.made_with)}
        state.resumed = Resumed(str(checkpoint.path), name, later, changed)
    _check_known(changed, known, found)
    return _allowed(str(checkpoint.path), found, changed)


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
        changed = [*changed, _path(name, "threads")]
    hints = {_path(name, part): hint for part, hint in _HINTS.items()}
    for line in _allowed(checkpoint, found, changed, hints):
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
            yield from changes(_path(name, part), saved[part], given[part])


def _path(name: str, part: str) -> str:
    """The path of a part of the loader or of a state, whose name is empty where there is only one."""
    return f"{name}.{part}" if name else part


def _paths(name: str, parts: Mapping[str, Any]) -> Iterator[str]:
    if name:
        yield name
    for part, description in parts.items():
        yield from paths(_path(name, part), description)


def _allowed(
    checkpoint: str, found: Sequence[Change], changed: Sequence[str], hints: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
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
