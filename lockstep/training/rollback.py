"""Going back to the last checkpoint, and on from there without the batch that was not finite."""

from __future__ import annotations

from pathlib import Path

from lockstep.checkpoints.store import Checkpoint, Store
from lockstep.data.loader import Loader, Stuck
from lockstep.errors import CheckpointError, InputError
from lockstep.screen import log
from lockstep.training.nonfinite import check_finite, in_short
from lockstep.training.saving import States, load_run, named_states, read_checkpoint
from lockstep.types import NonFiniteError, NonFiniteReport
from lockstep.workers.rank import join

_TRIES = 2
"""Batches that are skipped after the same step before the weights are to blame."""


def rollback(states: States, loader: Loader, workdir: str | Path | Store, error: NonFiniteError) -> int:
    """Take up the newest intact checkpoint, and leave the batch of the error out of the stream from now on.

    What follows is the run that was told from the start to skip that batch. Where no step could be made from
    the checkpoint, and then none again, the one before it is taken up; if the third batch after the same step is not
    finite either, no batch is to blame, and none of the three is skipped. All workers call it together, where they
    have caught the error, and begin their loop anew: `batches` and `train_steps` called before still have the old
    stream. What is skipped is saved with the next checkpoint; a run that is killed before comes to the batch again.

    Args:
        states: one state, or several by name, as they are saved.
        loader: the one that the batch came from.
        workdir: the run's folder, or its store.
        error: what the attempt has raised.

    Returns:
        The step of the checkpoint.

    Raises:
        NonFiniteError: more batches would be skipped than the `nonfinite_budget` of the states allows; or the model
            itself is to blame: it is not finite, or no batch is with its weights. The states have not changed.
        CheckpointError: there is no checkpoint, none is intact, or it does not fit the states.
        InputError: the error does not come from an attempt, or the batch was to be skipped already.
    """
    check_may_roll_back(states, loader, error)
    checkpoint = last_checkpoint(workdir, states, loader, error)
    go_back(checkpoint, states, loader, error)
    return checkpoint.step


def check_may_roll_back(states: States, loader: Loader, error: NonFiniteError) -> None:
    """Refuse to go back where that would skip more than the states allow."""
    for state in named_states(states).values():
        check_finite(state, join())
    nonfinite, budget = _refusal(error), _budget(states)
    stuck = join().group.broadcast(loader.stuck)  # a worker that has joined since knows of none
    loader.stuck = Stuck(stuck[0], tuple(stuck[1])) if stuck else None
    if nonfinite.position in loader.skipped:
        raise InputError(
            "A batch has come that was to be skipped.",
            given=f"the batch at position {nonfinite.position}, skipped: {', '.join(map(str, loader.skipped))}",
            expected="batches from `batches` or `train_steps`, called after the last rollback",
            hint="begin the loop anew after each rollback",
        ) from error
    if (found := _stuck(states, loader)) and len(found.positions) == _TRIES:
        raise _blamed(found, states, loader, error).about(nonfinite) from error
    if len(loader.skipped) >= budget:
        raise NonFiniteError(
            f"Another batch is not finite, and no more than {budget} may be skipped.",
            given=error.given,
            expected="no more batches that are not finite than the nonfinite_budget",
            hint="lower the learning rate, clip the gradients, look at these examples, or raise nonfinite_budget",
        ).about(nonfinite) from error


def last_checkpoint(workdir: str | Path | Store, states: States, loader: Loader, error: NonFiniteError) -> Checkpoint:
    """The newest intact checkpoint, on all workers alike; the one before it, if no step could be made from it.

    The loader keeps in mind that no step was made after the checkpoint, and with which batches it was tried.
    """
    checkpoint, position, step = read_checkpoint(workdir), _refusal(error).position, _step(states)
    if checkpoint is None:
        raise CheckpointError(
            "There is no checkpoint to go back to.",
            given=f"a batch at position {position} that is not finite, and {workdir} without checkpoints",
            expected="a checkpoint saved before it",
            hint="save before the first step: save(state, loader, workdir)",
        ) from error
    if stuck := _stuck(states, loader):
        loader.stuck = Stuck(stuck.step, (*stuck.positions, position))
        return read_checkpoint(workdir, before=checkpoint.step) or checkpoint
    loader.stuck = Stuck(step, (position,)) if step == checkpoint.step else None
    return checkpoint


def go_back(checkpoint: Checkpoint, states: States, loader: Loader, error: NonFiniteError) -> None:
    """Take up a checkpoint, and leave the batch of the error out of the stream from now on."""
    nonfinite = _refusal(error)
    # The data was compared when the run began: it may have been accepted that the checkpoint is of other data.
    load_run(checkpoint, named_states(states), loader, accept_data_change=True)
    loader.skip(nonfinite.position)
    if join().is_chief:
        log.warning(
            "%s Going back to step %d, position %d, and on without the batch at position %d (%s): %s",
            error.what,
            checkpoint.step,
            loader.position,
            nonfinite.position,
            f"{len(loader.skipped)} of at most {_budget(states)}",
            in_short(nonfinite),
        )


def _step(states: States) -> int:
    return max(state.step for state in named_states(states).values())


def _stuck(states: States, loader: Loader) -> Stuck | None:
    """The step after which the attempts before this one have failed, too; None where others were made since."""
    stuck = loader.stuck
    return stuck if stuck and _step(states) <= stuck.step else None


def _blamed(stuck: Stuck, states: States, loader: Loader, error: NonFiniteError) -> NonFiniteError:
    """The error where batch after batch is not finite with the same weights; the batches are skipped no longer."""
    step, positions = stuck
    loader.skipped = [position for position in loader.skipped if position not in positions]
    loader.stuck = None
    tried = [*positions, _refusal(error).position]
    sizes = {
        name: parameter.detach().abs().max().item()
        for state in named_states(states).values()
        for name, parameter in state.parameters.items()
        if parameter.numel()
    }
    largest = max(sizes, key=sizes.__getitem__)
    return NonFiniteError(
        f"The weights after step {step} are to blame, and their checkpoint: no batch is finite with them.",
        given=f"the batches at positions {', '.join(map(str, tried))}, one after the other; "
        f"the largest weight is {sizes[largest]:.3g}, in {largest!r}",
        expected="a step after the checkpoint to which the run has gone back",
        hint=f"delete the checkpoint of step {step} and go on from the one before it, with a lower learning rate or "
        "clipped gradients; these batches are not skipped: if it is they that are bad, leave them out by loader.skip",
    )


def _budget(states: States) -> int:
    return min(state.nonfinite_budget for state in named_states(states).values())


def _refusal(error: NonFiniteError) -> NonFiniteReport:
    if error.nonfinite is None:
        raise InputError(
            "This error does not say which batch was not finite.",
            given=f"a {type(error).__name__} without a refusal",
            expected="the error that train_step or train_steps has raised",
            hint="pass on what was caught: except ls.NonFiniteError as error",
        ) from error
    return error.nonfinite
