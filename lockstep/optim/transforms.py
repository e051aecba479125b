"""What happens to the gradients before the update, as a list of small values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
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
    """A transform ready to use: values are bound, a function of one's own `(gradients, step)` is used as it is.

    It raises an InputError where it has changed a gradient in place instead of putting another one.
    """
    bind: Callable[[Mapping[str, Tensor]], BoundTransform] | None = getattr(transform, "bind", None)
    if isinstance(transform, type) or not (bind or callable(transform)):
        raise InputError(
            "This is no gradient transform.",
            given=repr(transform),
            expected="a value such as ls.optim.ClipGlobalNorm(10.0), or a function (gradients, step)",
            hint="write the value with its arguments",
        )
    function = bind(parameters) if bind else cast("BoundTransform", transform)
    return partial(_watched, function, getattr(transform, "__qualname__", repr(transform)))


def _watched(function: BoundTransform, name: str, gradients: Gradients, step: int) -> None:
    gradients.watch()
    function(gradients, step)
    changed = gradients.changed()
    if changed:
        raise InputError(
            f"A gradient transform has changed the gradient of {changed[0]!r} in place.",
            given=name,
            expected="a transform that puts new tensors in the place of gradients: others may hold these",
            hint="write gradients.put({index: gradient * 10}), with a tensor of its own",
        )
