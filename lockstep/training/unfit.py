"""What of an attempt is not finite, in words."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lockstep.errors import NonFiniteError
from lockstep.optim.gradients import Gradients
from lockstep.parallel.diagnosis import unfit_losses

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
        mend="lower the learning rate; skipping a batch cannot help",
    )
