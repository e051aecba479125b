"""Moving averages of the parameters, part of the update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import InputError


@dataclass(frozen=True)
class MovingAverage:
    """average = d * average + (1 - d) * parameter after each update, with d = min(decay, (1 + t) / (10 + t)).

    The rule of tf.train.ExponentialMovingAverage with num_updates; t is the step that the update made, so early
    averages follow the parameters closely. With dynamic=False, d is `decay` throughout.
    """

    decay: float = 0.9999
    dynamic: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise InputError(
                "This decay gives no moving average.",
                given=f"decay={self.decay}",
                expected="0 <= decay < 1",
                mend="give a decay such as 0.999 or 0.9999",
            )

    def decay_at(self, step: int) -> float:
        """The decay used by the update that makes `step`."""
        return min(self.decay, (1 + step) / (10 + step)) if self.dynamic else self.decay

    def bind(self, parameters: list[Tensor]) -> BoundAverage:
        """The average of these parameters, starting at their values, kept in float32 or wider."""
        return BoundAverage(self, parameters)


class BoundAverage:
    """The averages of a list of parameters."""

    def __init__(self, value: MovingAverage, parameters: list[Tensor]) -> None:
        self._value = value
        self._parameters = parameters
        self._needs_cast = any(p.dtype.itemsize < 4 for p in parameters)
        self.tensors = [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in parameters]

    def update(self, step: int) -> None:
        """Move towards the parameters as they are after the update that made `step`."""
        parameters = self._parameters
        if self._needs_cast:
            parameters = [p.to(a.dtype) for p, a in zip(parameters, self.tensors, strict=True)]
        torch._foreach_lerp_(self.tensors, parameters, 1.0 - self._value.decay_at(step))
