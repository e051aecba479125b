"""Moving averages of the parameters, part of the update."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch

from lockstep.checks import Checked, Decay, Hint, PositiveFloat
from lockstep.errors import InputError
from lockstep.optim.rules import can_fuse_lerp, fused_lerp
from lockstep.tensors import all_widened

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MovingAverage(Checked):
    """average = d * average + (1 - d) * parameter after each update, with d = min(decay, (1 + t) / (10 + t)).

    The rule of tf.train.ExponentialMovingAverage with num_updates; t is the step that the update made, so early
    averages follow the parameters closely. With dynamic=False, d is `decay` throughout. With `half_life_steps`, decay
    is 0.5 ** (1 / half_life_steps).
    """

    decay: Annotated[Decay, Hint("give a decay such as 0.999 or 0.9999")] = 0.9999
    """The most of the average that an update keeps."""
    dynamic: bool = True
    """Follow the parameters closely at first; false: the decay throughout."""
    statistics: bool = False
    """Average the batch-norm statistics too, as the Inception trainer did: all floating-point buffers but float8.

    A buffer that is not finite at the start, such as a mask of -inf, has no average: its values are copied."""
    half_life_steps: PositiveFloat | None = None
    """Updates after which the parameters of before weigh half as much; None: `decay` says it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        usual = type(self).decay
        if self.half_life_steps is not None and self.decay != usual:
            raise InputError(
                "The decay of the average is said twice.",
                given=f"decay={self.decay}, half_life_steps={self.half_life_steps}",
                expected="one of them",
                hint="leave decay or half_life_steps out",
            )
        if self.half_life_steps is not None and 0.5 ** (1 / self.half_life_steps) == 1:
            raise InputError(
                "The average would never move.",
                given=f"half_life_steps={self.half_life_steps}",
                expected="fewer updates, such as 1000",
                hint="give the updates after which the parameters of before weigh half as much",
            )

    def decay_at(self, step: int) -> float:
        """Return the decay used by the update that makes `step`."""
        decay = self.decay if self.half_life_steps is None else 0.5 ** (1 / self.half_life_steps)
        return min(decay, (1 + step) / (10 + step)) if self.dynamic else decay

    def bind(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> BoundAverage:
        """Start the averages at the present values, kept in float32 or wider."""
        candidates = buffers.items() if self.statistics else ()
        floating = {name: buffer for name, buffer in candidates if buffer.is_floating_point() and buffer.itemsize > 1}
        copied = {name for name, buffer in floating.items() if not buffer.isfinite().all()}
        return BoundAverage(self, {**parameters, **floating}, copied)


class BoundAverage:
    """Averages of some tensors, by name; of those named in `copied` the present values."""

    def __init__(self, value: MovingAverage, sources: Mapping[str, Tensor], copied: Collection[str]) -> None:
        self._value = value
        self.tensors = {
            name: source.detach().to(torch.promote_types(source.dtype, torch.float32), copy=True)
            for name, source in sources.items()
        }
        self._averages = [average for name, average in self.tensors.items() if name not in copied]
        self._sources = [source for name, source in sources.items() if name not in copied]
        self._needs_cast = any(source.dtype.itemsize < 4 for source in self._sources)
        self._fused = bool(self._sources) and can_fuse_lerp(self._sources)
        self._copies = [(self.tensors[name], sources[name]) for name in copied]

    def update(self, step: int) -> None:
        """Move towards the values as they are after the update that made `step`."""
        sources = all_widened(self._sources) if self._needs_cast else self._sources
        weight = 1.0 - self._value.decay_at(step)
        if self._fused and weight < 0.5:
            fused_lerp(self._averages, sources, weight)
        else:
            torch._foreach_lerp_(self._averages, sources, weight)
        for copy, source in self._copies:
            copy.copy_(source)
