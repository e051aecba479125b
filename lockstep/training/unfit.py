"""What is not finite, of an attempt or of the state itself, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from lockstep.checkpoints.encoding import not_finite
from lockstep.errors import NonFiniteError
from lockstep.listing import shorten
from lockstep.optim.gradients import Gradients
from lockstep.parallel.diagnosis import unfit_losses

if TYPE_CHECKING:
    from lockstep.training.state import TrainState
    from lockstep.workers.rank import Worker

MAX_NAMES = 8


def unfit_in_words(losses: Mapping[str, float], gradients: Gradients, *, statistics_fit: bool) -> tuple[str, ...]:
    """A part for each loss and gradient that is not finite, at most eight gradients, and for the statistics."""
    words = unfit_losses(losses)
    names = [
        f"gradient of {name!r}"
        for name, gradient in zip(gradients.names, gradients.tensors, strict=True)
        if gradient is not None and not gradient.isfinite().all()
    ]
    words += names[:MAX_NAMES] + ([f"{len(names) - MAX_NAMES} gradients more"] if len(names) > MAX_NAMES else [])
    if not statistics_fit:
        words.append("the batch-norm statistics")
    return tuple(words or ["the gradients are finite, and their global norm is not"])


def unfit_penalty(penalised: Mapping[str, Tensor]) -> NonFiniteError:
    """The error for penalties that are not finite on their own, for which no batch is to blame."""
    unfit = [name for name, parameter in penalised.items() if not parameter.isfinite().all()]
    return NonFiniteError(
        "The penalty on the parameters is not finite; nothing was changed.",
        given=", ".join(unfit) or "parameters whose squares overflow",
        expected="finite parameters",
        hint="lower the learning rate; skipping a batch cannot help",
    )


def check_finite(state: TrainState, worker: Worker) -> None:
    """Refuse a model that was not finite before the attempt: no batch is to blame. All workers come here together.

    Raises:
        NonFiniteError: trained parameters are not finite, or others or buffers hold NaN. Those may hold infinities, as
            a mask does.
    """
    sections = state.sections()
    mine = not_finite(
        {section: sections[section] for section in ("parameters", "buffers")}, {"parameters": state.untrained()}
    )
    of_all = worker.group.gather(shorten(mine, MAX_NAMES))
    if any(of_all):
        named = [f"worker {rank}: {unfit}" for rank, unfit in enumerate(of_all) if unfit]
        raise NonFiniteError(
            f"The model is not finite after step {state.step}, so no batch is to blame.",
            given=shorten(mine, MAX_NAMES) if len(set(of_all)) == 1 else "; ".join(named),
            expected="finite parameters, and no NaN in buffers",
            hint="go on from the last checkpoint with a lower learning rate or clipped gradients; "
            "skipping batches cannot help",
        )
