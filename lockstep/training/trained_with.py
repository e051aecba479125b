"""A description of what a script trains with: kept in each checkpoint, and compared when the script resumes.

A run by a recipe has all of this in its workdir, and compares it there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from lockstep.description import Change, changes, described, paths
from lockstep.errors import InputError
from lockstep.parallel.backends import backends_of_steps
from lockstep.parallel.exchange import is_exact
from lockstep.screen import log
from lockstep.training.state import Resumed, TrainState

if TYPE_CHECKING:
    from lockstep.checkpoints.store import Checkpoint
    from lockstep.data.loader import Loader
    from lockstep.parallel.exchange import Exchange
    from lockstep.parallel.towers import Towers
    from lockstep.workers.rank import Worker


_OF_STEP = ("towers", "exchange", "threads", "accelerator")
"""Known with the first step alone."""
_HINTS = {
    "threads": "lockstep run --threads {0}, or torch.set_num_threads({0}) before the first step",
    "towers.count": "ls.Towers({}); without it there is a tower for each worker",
}


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
        state.trained_with = now | {part: before[part] for part in _OF_STEP if part in before}
        state.resumed = Resumed(str(checkpoint.path), name, changed)
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
    state.trained_with |= step
    state.resumed = None


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
