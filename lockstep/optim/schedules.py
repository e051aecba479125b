"""Learning rates as pure functions of the step: nothing to advance, nothing to save.

The update that makes step k uses `schedule(k - 1)`. What is said in epochs, or for another batch size, is resolved once
the run knows both: see `resolution`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

from lockstep.checks import check_one_of, check_range, check_switch, check_type, plain, wrong_type
from lockstep.errors import InputError, LockstepError
from lockstep.progress import Epochs


class Schedule(Protocol):
    """A learning rate as a function of completed updates."""

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates."""
        ...


def rate_at(schedule: float | Schedule, step: int, *, name: str = "The learning rate", low: float = 0.0) -> float:
    """The value of a schedule after `step` completed updates, checked: a user's own function may return anything.

    Args:
        schedule: in steps by now.
        step: completed updates.
        name: of what is scheduled, for errors.
        low: the least it may be.

    Raises:
        InputError: it is no number, not finite or below `low`, or the schedule raises an error.
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


@dataclass(frozen=True)
class Constant:
    """The same rate at every step."""

    value: float

    def __post_init__(self) -> None:
        check_range("value", self.value, 0.0)

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates."""
        return self.value


@dataclass(frozen=True)
class Exponential:
    """initial * factor ** (step / decay_steps), the rule of tf.train.exponential_decay.

    With a burn-in (TensorFlow Object Detection, 2018) the rate is first `burn_in` for `burn_in_steps`, and the decay is
    counted from the end of these.
    """

    initial: float
    decay_steps: int | Epochs
    factor: float
    """What the rate is multiplied by every `decay_steps`: above 0, at most 1."""
    staircase: bool = True
    """Decay in jumps, every `decay_steps`; False: a little at each step."""
    burn_in_steps: int | Epochs = 0
    burn_in: float | None = None
    """The rate during the burn-in; None or 0: `initial`."""
    final: float = 0.0
    """The rate never falls below this one, in the burn-in neither."""

    def __post_init__(self) -> None:
        for name in ("initial", "factor", "final"):
            check_range(name, getattr(self, name), 0.0)
        if self.burn_in is not None:
            check_range("burn_in", self.burn_in, 0.0)
        _check_length("decay_steps", self.decay_steps, 1)
        _check_length("burn_in_steps", self.burn_in_steps, 0)
        check_switch("staircase", self.staircase)
        if not 0 < self.factor <= 1:
            raise InputError(
                "This factor makes no decay.",
                given=f"factor={self.factor}",
                expected="0 < factor <= 1",
                hint="give what the rate is multiplied by, such as 0.94",
            )
        if self.final > self.initial:
            raise InputError(
                "The rate would start below its floor.",
                given=f"initial={self.initial}, final={self.final}",
                expected="final <= initial",
                hint="lower final, or leave it out",
            )

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates."""
        elapsed = step - _steps_of("burn_in_steps", self.burn_in_steps)
        decay_steps = _steps_of("decay_steps", self.decay_steps)
        if elapsed < 0:
            return max(self.burn_in or self.initial, self.final)
        times = elapsed // decay_steps if self.staircase else elapsed / decay_steps
        return max(self.initial * self.factor**times, self.final)


@dataclass(frozen=True)
class Polynomial:
    """(initial - final) * (1 - step / steps) ** power + final, then `final`: the rule of tf.train.polynomial_decay.

    With `cycle`, `steps` is multiplied as often as needed to reach the current step: the rate jumps up after each
    `steps`, less each time. A `final` above `initial` is a rise.
    """

    initial: float
    steps: int | Epochs
    final: float = 1e-4
    power: float = 1.0
    """Above 0; 1 is a straight line."""
    cycle: bool = False

    def __post_init__(self) -> None:
        for name in ("initial", "final", "power"):
            check_range(name, getattr(self, name), 0.0)
        _check_length("steps", self.steps, 1)
        check_switch("cycle", self.cycle)
        if not self.power:
            raise InputError(
                "A polynomial of power 0 does not decay.",
                given=f"power={self.power}",
                expected="a power above 0",
                hint="give power=1.0 for a straight line, or use Constant",
            )

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates."""
        steps = _steps_of("steps", self.steps)
        rounds = max(1, math.ceil(step / steps)) if self.cycle else 1
        share = min(1.0, step / (steps * rounds))
        return (self.initial - self.final) * math.pow(1.0 - share, self.power) + self.final


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `initial` down to `final`, reached at `steps`, then constant (Loshchilov, Hutter: SGDR, 2017).

    Within `steps`, the rate may first rise linearly from `warmup_initial` to `initial` for `warmup_steps`, and then
    stay there for `hold_steps`; a hold that reaches beyond `steps` ends there, and the rate drops to `final` after it.
    """

    initial: float
    steps: int | Epochs
    """The length; `Epochs` are resolved to whole batches when the run is built."""
    warmup_steps: int | Epochs = 0
    final: float = 0.0
    warmup_initial: float = 0.0
    hold_steps: int | Epochs = 0

    def __post_init__(self) -> None:
        for name in ("initial", "final", "warmup_initial"):
            check_range(name, getattr(self, name), 0.0)
        _check_length("steps", self.steps, 1)
        _check_length("warmup_steps", self.warmup_steps, 0)
        _check_length("hold_steps", self.hold_steps, 0)
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
        """The rate after `step` completed updates."""
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
class PiecewiseConstant:
    """values[0] until boundaries[0], then values[1] until boundaries[1], and so on; the new value holds at a boundary.

    The manual steps of TensorFlow Object Detection. With `warmup`, the rate rises (or falls) linearly from values[0] to
    values[1] over the steps before boundaries[0]. Boundaries in epochs that stand beside some in steps are compared
    with those when they are resolved. Lists are taken for tuples.
    """

    boundaries: tuple[int | Epochs, ...]
    """Where the value changes: 1 or more, strictly rising; none at all for a constant."""
    values: tuple[float, ...]
    warmup: bool = False

    def __post_init__(self) -> None:
        for name in ("boundaries", "values"):
            given = getattr(self, name)
            check_type(name, given, (tuple, list), expected="a tuple", hint=f"write it as {name}=({given!r},)")
            object.__setattr__(self, name, tuple(given))
        for index, boundary in enumerate(self.boundaries):
            _check_length(f"boundaries[{index}]", boundary, 1)
        for index, value in enumerate(self.values):
            check_range(f"values[{index}]", value, 0.0)
        check_switch("warmup", self.warmup)
        self._check_order()
        self._check_counts()

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates."""
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
class OneCycle:
    """Up to `peak` and down to far below the start, with the numbers of torch.optim.lr_scheduler.OneCycleLR.

    From peak / div_factor to `peak` over the first `warmup_share` of the steps, then down to
    peak / div_factor / final_div_factor at the last one, step `steps` - 1, where it stays (Smith, Topin:
    Super-Convergence, 2018). Momentum is not cycled.
    """

    peak: float
    steps: int | Epochs
    warmup_share: float = 0.3
    """Share of the steps before the peak, 0 or more, below 1; torch's pct_start."""
    div_factor: float = 25.0
    """1 or more."""
    final_div_factor: float = 1e4
    """1 or more."""
    anneal: Literal["cosine", "linear"] = "cosine"
    """The form of both halves."""

    def __post_init__(self) -> None:
        check_range("peak", self.peak, 0.0)
        _check_length("steps", self.steps, 1)
        check_range("warmup_share", self.warmup_share, 0.0, 1.0)
        check_range("div_factor", self.div_factor, 1.0)
        check_range("final_div_factor", self.final_div_factor, 1.0)
        check_one_of("anneal", self.anneal, ("cosine", "linear"))

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates."""
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
class Warmup:
    """A straight line from `initial` to what `schedule` gives at `steps`, over `steps`; from there on `schedule`.

    The schedule is not put off: it counts the steps of its warm-up.
    """

    schedule: float | Schedule
    """A rate, one of Lockstep's schedules, or any function of the step."""
    steps: int | Epochs
    initial: float = 0.0

    def __post_init__(self) -> None:
        check_schedule("schedule", self.schedule)
        _check_length("steps", self.steps, 1)
        check_range("initial", self.initial, 0.0)

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates."""
        steps = _steps_of("steps", self.steps)
        if step >= steps:
            return rate_at(self.schedule, step)
        return _linear(self.initial, rate_at(self.schedule, steps), step / steps)


def check_schedule(name: str, schedule: object) -> None:
    """Refuse what is neither a rate nor a schedule."""
    if isinstance(schedule, int | float):
        check_range(name, schedule, 0.0)
    elif not callable(schedule) or isinstance(schedule, type):
        hint = f"write {name}=0.1, or {name}=ls.optim.Cosine(0.1, 1000)"
        raise wrong_type(name, schedule, expected="a number or a schedule", hint=hint)


def _check_length(name: str, length: object, least: int) -> None:
    """Refuse what is neither epochs nor a whole number of at least so many steps."""
    if isinstance(length, Epochs):
        check_range(name, length.count, 0.0)
    elif not isinstance(length, int) or isinstance(length, bool):
        raise InputError(
            f"{name} is not a length.",
            given=f"{name}={length!r}",
            expected="a whole number of steps, or epochs",
            hint=f"write it as {name}=1000, or as {name}=ls.Epochs(30)",
        )
    else:
        check_range(name, length, least)


def _longer(first: int | Epochs, second: int | Epochs) -> bool:
    """Whether `first` is known to be longer: steps and epochs compare only among themselves, until resolved."""
    if isinstance(first, Epochs) and isinstance(second, Epochs):
        return first.count > second.count
    return isinstance(first, int) and isinstance(second, int) and first > second


def _steps_of(name: str, length: int | Epochs) -> int:
    """A length that has to be in steps by now."""
    if isinstance(length, int):
        return length
    raise InputError(
        "This schedule counts in epochs, and was asked for the rate at a step.",
        given=f"{name}={length}",
        expected="a number of steps",
        hint=f"call resolve_schedule(schedule, epoch_size, batch_size) first, or give {name} as a number of steps",
    )


def _linear(start: float, end: float, share: float) -> float:
    """The rate at `share` (0 to 1) of a straight line."""
    return start + (end - start) * share


def _half_cosine(start: float, end: float, share: float) -> float:
    """The rate at `share` (0 to 1) of half a cosine, flat at both ends."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * share))
