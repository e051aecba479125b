"""Moving averages of the parameters, part of the update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.checks import check_open_unit


@dataclass(frozen=True)
class MovingAverage:
    """average = d * average + (1 - d) * parameter after each update, with d = min(decay, (1 + t) / (10 + t)).

    The rule of tf.train.ExponentialMovingAverage with num_updates; t is the step that the update made, so early
    averages follow the parameters closely. With dynamic=False, d is `decay` throughout.
    """

    decay: float = 0.9999
    dynamic: bool = True
    statistics: bool = False
    """Average the batch-norm statistics too (all floating-point buffers), as the Inception trainer did."""

    def __post_init__(self) -> None:
        check_open_unit("decay", self.decay, mend="give a decay such as 0.999 or 0.9999")

    def decay_at(self, step: int) -> float:
        """The decay used by the update that makes `step`."""
        return min(self.decay, (1 + step) / (10 + step)) if self.dynamic else self.decay

    def bind(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> BoundAverage:
        """The averages, starting at the present values, kept in float32 or wider."""
        floating = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        return BoundAverage(self, {**parameters, **floating} if self.statistics else parameters)


class BoundAverage:
    """The averages of some tensors, by name."""

    def __init__(self, value: MovingAverage, sources: Mapping[str, Tensor]) -> None:
        self._value = value
        self._sources = list(sources.values())
        self._needs_cast = any(s.dtype.itemsize < 4 for s in self._sources)
        self._tensors = [s.detach().to(torch.promote_types(s.dtype, torch.float32), copy=True) for s in self._sources]
        self.tensors = dict(zip(sources, self._tensors, strict=True))

    def update(self, step: int) -> None:
        """Move towards the values as they are after the update that made `step`."""
        sources = self._sources
        if self._needs_cast:
            sources = [s.to(a.dtype) for s, a in zip(sources, self._tensors, strict=True)]
        torch._foreach_lerp_(self._tensors, sources, 1.0 - self._value.decay_at(step))
