"""Learning rates as pure functions of the step: nothing to advance, nothing to save.

The update that makes step k uses `schedule(k - 1)`. What is said in epochs, or for another batch size, is resolved once
the run knows both: see `resolution`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Literal, Protocol

from lockstep.checks import Checked, FiniteFloat, Hint, NonNegativeFloat, Range, check_value, plain, wrong_type
from lockstep.errors import InputError, LockstepError
from lockstep.progress import Epochs


class Schedule(Protocol):
    """A learning rate as a function of completed updates."""

    def __call__(self, step: int) -> float:
        """Return the rate after `step` completed updates."""
        ...


def rate_at(schedule: float | Schedule, step: int, *, name: str = "The learning rate", low: float = 0.0) -> float:
    """Compute and check a schedule's value after `step` completed updates: a user's function may return anything.

    Args:
        schedule: in steps by now.
        step: completed updates.
        name: of what is scheduled, for errors.
        low: the least it may be.
    """
    if isinstance(schedule, int | float):
        return schedule
    try:
        rate = plain(schedule(step))
    except LockstepError:
        raise
    except Exception as error:
        raise _unusable(schedule, step, name, low, f"{type(error).__name__}: {error}") from error
    if isinstance(rate, (int, float)) and not isinstance(rate, bool) and low <= rate < math.inf and -math.inf < rate:
        return rate
    raise _unusable(schedule, step, name, low, f"{rate!r}")


def _unusable(schedule: Schedule, step: int, name: str, low: float, result: str) -> InputError:
    source = getattr(schedule, "__qualname__", None) or repr(schedule)
    least = "" if low == -math.inf else f", {low:g} or more"
    return InputError(
        f"{name} after {step} updates cannot be used.",
        given=f"{result}, from {source}",
        expected=f"a finite number{least}",
        hint=f"correct what the schedule returns for step {step}: a float or an int",
    )


def check_schedule(name: str, schedule: object) -> None:
    """Refuse anything but a rate or a schedule."""
    if isinstance(schedule, int | float):
        check_value(name, schedule, NonNegativeFloat)
    elif not callable(schedule) or isinstance(schedule, type):
        hint = f"write {name}=0.1, or {name}=ls.optim.Cosine(0.1, 1000)"
        raise wrong_type(name, schedule, expected="a number or a schedule", hint=hint)


def _check_length(name: str, length: object, *, bounds: Range) -> None:
    if isinstance(length, Epochs):
        check_value(name, length.count, FiniteFloat)
    elif not isinstance(length, int) or isinstance(length, bool):
        raise InputError(
            f"{name} is not a length.",
            given=f"{name}={length!r}",
            expected="a whole number of steps, or epochs",
            hint=f"write it as {name}=1000, or as {name}=ls.Epochs(30)",
        )
    else:
        check_value(name, length, Annotated[int, bounds])


LearningRate = Annotated[float | Schedule, check_schedule]
Length = Annotated[int | Epochs, partial(_check_length, bounds=Range(ge=1))]
OptionalLength = Annotated[int | Epochs, partial(_check_length, bounds=Range(ge=0))]
"""A length that may be 0 steps."""


@dataclass(frozen=True)
class Constant(Checked):
    """The same rate at every step."""

    value: NonNegativeFloat

    def __call__(self, step: int) -> float:
        """Return the rate after `step` completed updates."""
        return self.value


@dataclass(frozen=True)
class Exponential(Checked):
    """initial * factor ** (step / decay_steps), the rule of tf.train.exponential_decay.

    With a burn-in (TensorFlow Object Detection, 2018) the rate is first `burn_in` for `burn_in_steps`, and the decay is
    counted from the end of these.
    """

    initial: NonNegativeFloat
    decay_steps: Length
    factor: Annotated[float, Range(gt=0, le=1), Hint("give what the rate is multiplied by, such as 0.94")]
    """Multiplies the rate every `decay_steps`."""
    staircase: bool = True
    """Decay in jumps, every `decay_steps`; False: a little at each step."""
    burn_in_steps: OptionalLength = 0
    burn_in: NonNegativeFloat | None = None
    """The rate during the burn-in; None or 0: `initial`."""
    final: NonNegativeFloat = 0.0
    """The rate never falls below this one, in the burn-in neither."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.final > self.initial:
            raise InputError(
                "The rate would start below its floor.",
                given=f"initial={self.initial}, final={self.final}",
                expected="final <= initial",
                hint="lower final, or leave it out",
            )

    def __call__(self, step: int) -> float:
        """Return the rate after `step` completed updates."""
        elapsed = step - _steps_of("burn_in_steps", self.burn_in_steps)
        decay_steps = _steps_of("decay_steps", self.decay_steps)
        if elapsed < 0:
            return max(self.burn_in or self.initial, self.final)
        times = elapsed // decay_steps if self.staircase else elapsed / decay_steps
        return max(self.initial * self.factor**times, self.final)


@dataclass(frozen=True)
class Polynomial(Checked):
    """(initial - final) * (1 - step / steps) ** power + final, then `final`: the rule of tf.train.polynomial_decay.

    With `cycle`, `steps` is multiplied as often as needed to reach the current step: the rate jumps up after each
    `steps`, less each time. A `final` above `initial` is a rise.
    """

    initial: NonNegativeFloat
    steps: Length
    final: NonNegativeFloat = 1e-4
    power: Annotated[float, Range(gt=0), Hint("give power=1.0 for a straight line, or a number as the rate")] = 1.0
    cycle: bool = False

    def __call__(self, step: int) -> float:
        """Return the rate after `step` completed updates."""
        steps = _steps_of("steps", self.steps)
        rounds = max(1, math.ceil(step / steps)) if self.cycle else 1
        share = min(1.0, step / (steps * rounds))
        return (self.initial - self.final) * math.pow(1.0 - share, self.power) + self.final


@dataclass(frozen=True)
class Cosine(Checked):
    """Half a cosine from `initial` down to `final`, reached at `steps`, then constant (Loshchilov, Hutter: SGDR, 2017).

    Within `steps`, the rate may first rise linearly from `warmup_initial` to `initial` for `warmup_steps`, and then
    stay there for `hold_steps`; a hold that reaches beyond `steps` ends there, and the rate drops to `final` after it.
    """

    initial: NonNegativeFloat
    steps: Length
    """`Epochs` are resolved to whole batches when the run is built."""
    warmup_steps: OptionalLength = 0
    final: NonNegativeFloat = 0.0
    warmup_initial: NonNegativeFloat = 0.0
    hold_steps: OptionalLength = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if _longer(self.warmup_steps, self.steps):
            raise InputError(
                "The warm-up is longer than the whole schedule.",
                given=f"steps={self.steps}, warmup_steps={self.warmup_steps}",
                expected="warmup_steps <= steps",
                hint="raise steps or lower warmup_steps",
            )
        if self.warmup_steps != 0 and self.warmup_initial > self.initial:
            raise InputError(
                "The warm-up would fall instead of rise.",
                given=f"initial={self.initial}, warmup_initial={self.warmup_initial}",
                expected="warmup_initial <= initial",
                hint="lower warmup_initial, or leave the warm-up out",
            )

    def __call__(self, step: int) -> float:
        """Return the rate after `step` completed updates."""
        steps = _steps_of("steps", self.steps)
        warmup_steps = _steps_of("warmup_steps", self.warmup_steps)
        held_until = warmup_steps + _steps_of("hold_steps", self.hold_steps)
        if step < warmup_steps:
            return _linear(self.warmup_initial, self.initial, step / warmup_steps)
        if step > steps:
            return self.final
        if step <= held_until:
            return self.initial
        return _half_cosine(self.initial, self.final, (step - held_until) / (steps - held_until))


@dataclass(frozen=True)
class PiecewiseConstant(Checked):
    """values[0] until boundaries[0], then values[1] until boundaries[1], and so on; the new value holds at a boundary.

    The manual steps of TensorFlow Object Detection. With `warmup`, the rate rises (or falls) linearly from values[0] to
    values[1] over the steps before boundaries[0]. Boundaries in epochs that stand beside some in steps are compared
    with those when they are resolved. Lists are taken for tuples.
    """

    boundaries: tuple[Length, ...]
    """Where the value changes: 1 or more, strictly rising; none at all for a constant."""
    values: tuple[NonNegativeFloat, ...]
    warmup: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("boundaries", "values"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_order()
        self._check_counts()

    def __call__(self, step: int) -> float:
        """Return the rate after `step` completed updates."""
        boundaries = [_steps_of("boundaries", boundary) for boundary in self.boundaries]
        if self.warmup and step < boundaries[0]:
            return _linear(self.values[0], self.values[1], step / boundaries[0])
        return self.values[bisect_right(boundaries, step)]

    def _check_order(self) -> None:
        if any(first == second or _longer(first, second) for first, second in pairwise(self.boundaries)):
            raise InputError(
                "The boundaries do not rise.",
                given="boundaries=" + ", ".join(str(boundary) for boundary in self.boundaries),
                expected="each later than the one before",
                hint="sort them, with their values, and leave out those that stand twice",
            )

    def _check_counts(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            raise InputError(
                "There is one value before the first boundary, and one after each.",
                given=f"{len(self.boundaries)} boundaries, {len(self.values)} values",
                expected=f"{len(self.boundaries) + 1} values",
                hint="add the values that are missing, or take away those that are too many",
            )
        if self.warmup and not self.boundaries:
            raise InputError(
                "A warm-up leads up to the first boundary, and there is none.",
                given="warmup=True, no boundaries",
                expected="a boundary",
                hint="give a boundary and two values, or leave warmup out",
            )


@dataclass(frozen=True)
class OneCycle(Checked):
    """Up to `peak` and down to far below the start, with the numbers of torch.optim.lr_scheduler.OneCycleLR.

    From peak / div_factor to `peak` over the first `warmup_share` of the steps, then down to
    peak / div_factor / final_div_factor at the last one, step `steps` - 1, where it stays (Smith, Topin:
    Super-Convergence, 2018). Momentum is not cycled.
    """

    peak: NonNegativeFloat
    steps: Length
    warmup_share: Annotated[float, Range(ge=0, lt=1)] = 0.3
    """Share of the steps before the peak; torch's pct_start."""
    div_factor: Annotated[float, Range(ge=1)] = 25.0
    final_div_factor: Annotated[float, Range(ge=1)] = 1e4
    anneal: Literal["cosine", "linear"] = "cosine"
    """The form of both halves."""

    def __call__(self, step: int) -> float:
        """Return the rate after `step` completed updates."""
        steps = _steps_of("steps", self.steps)
        start = self.peak / self.div_factor
        final = start / self.final_div_factor
        peak_step, last_step = self.warmup_share * steps - 1.0, steps - 1
        if step >= last_step:
            return final
        curve = _half_cosine if self.anneal == "cosine" else _linear
        if step < peak_step:
            return curve(start, self.peak, step / peak_step)
        return curve(self.peak, final, (step - peak_step) / (last_step - peak_step))


@dataclass(frozen=True)
class Warmup(Checked):
    """A straight line from `initial` to what `schedule` gives at `steps`, over `steps`; from there on `schedule`.

    The schedule is not put off: it counts the steps of its warm-up.
    """

    schedule: LearningRate
    """A rate, one of Lockstep's schedules, or any function of the step."""
    steps: Length
    initial: NonNegativeFloat = 0.0

    def __call__(self, step: int) -> float:
        """Return the rate after `step` completed updates."""
        steps = _steps_of("steps", self.steps)
        if step >= steps:
            return rate_at(self.schedule, step)
        return _linear(self.initial, rate_at(self.schedule, steps), step / steps)


def _longer(first: int | Epochs, second: int | Epochs) -> bool:
    """Tell whether `first` is known to be longer: until resolved, steps and epochs compare only among themselves."""
    if isinstance(first, Epochs) and isinstance(second, Epochs):
        return first.count > second.count
    return isinstance(first, int) and isinstance(second, int) and first > second


def _steps_of(name: str, length: int | Epochs) -> int:
    """Return a length that has to be in steps by now."""
    if isinstance(length, int):
        return length
    raise InputError(
        "This schedule counts in epochs, and was asked for the rate at a step.",
        given=f"{name}={length}",
        expected="a number of steps",
        hint=f"call resolve_schedule(schedule, epoch_size, batch_size) first, or give {name} as a number of steps",
    )


def _linear(start: float, end: float, share: float) -> float:
    """Compute the rate at `share` (0 to 1) of a straight line."""
    return start + (end - start) * share


def _half_cosine(start: float, end: float, share: float) -> float:
    """Compute the rate at `share` (0 to 1) of half a cosine, flat at both ends."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * share))
