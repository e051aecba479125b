"""What happens to the gradients before the update, as a list of small values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, cast

from torch import Tensor

from lockstep.errors import InputError
from lockstep.optim.gradients import Gradients

BoundTransform = Callable[[Gradients, int], None]
"""`transform(gradients, step)` changes the gradients of the update that follows `step` completed ones."""


class GradientTransform(Protocol):
    """One stage between the backward pass and the optimizer, as a value."""

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundTransform:
        """The transform of the gradients of these parameters, in their order."""
        ...


def bound(transform: GradientTransform | BoundTransform, parameters: Mapping[str, Tensor]) -> BoundTransform:
    """A transform ready to use: values are bound, a function of one's own `(gradients, step)` is used as it is."""
    bind: Callable[[Mapping[str, Tensor]], BoundTransform] | None = getattr(transform, "bind", None)
    if isinstance(transform, type) or not (bind or callable(transform)):
        raise InputError(
            "This is no gradient transform.",
            given=repr(transform),
            expected="a value such as ls.optim.ClipGlobalNorm(10.0), or a function (gradients, step)",
            mend="write the value with its arguments",
        )
    return bind(parameters) if bind else cast("BoundTransform", transform)
