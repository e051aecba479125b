"""Learning rates as pure functions of the step: nothing to advance, nothing to save.

The update that makes step k uses `schedule(k - 1)`. What is said in epochs, or for another batch size, is resolved once
the run knows both: see `resolve_schedule`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal, Protocol, cast

from lockstep.checks import (
    Checked,
    FiniteFloat,
    Hint,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Range,
    check_value,
    plain,
    wrong_type,
)
from lockstep.errors import InputError, LockstepError
from lockstep.types import Epochs


class Schedule(Protocol):
    """A learning rate as a function of completed updates."""

    def __call__(self, step: int) -> float:
        """Return the rate after `step` completed updates."""
        ...


def rate_at(schedule: float | Schedule, step: int, *, name: str = "The learning rate", low: float = 0.0) -> float:
    """Compute and check a schedule's value after `step` completed updates: a user's function may return anything.

    The schedule is in steps by now; errors name it, and `low` is the least it may be.
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
    """The rate."""

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
    """The rate at the first step, without a burn-in."""
    decay_steps: Length
    """Steps or epochs in which the rate is multiplied by `factor` once."""
    factor: Annotated[float, Range(gt=0, le=1), Hint("give what the rate is multiplied by, such as 0.94")]
    """Multiplies the rate every `decay_steps`."""
    staircase: bool = True
    """Decay in jumps, every `decay_steps`; False: a little at each step."""
    burn_in_steps: OptionalLength = 0
    """Length of the burn-in, in steps or epochs; 0: none."""
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
    """The rate at the first step."""
    steps: Length
    """Length of the decay, in steps or epochs."""
    final: NonNegativeFloat = 1e-4
    """The rate after the decay."""
    power: Annotated[float, Range(gt=0), Hint("give power=1.0 for a straight line, or a number as the rate")] = 1.0
    """Exponent of the decay; 1 is a straight line."""
    cycle: bool = False
    """Begin again after each decay, with a longer one."""

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
    """The highest rate, where the cosine starts."""
    steps: Length
    """Length of the whole schedule, in steps or epochs; epochs become whole batches when the run is built."""
    warmup_steps: OptionalLength = 0
    """Length of the warm-up, in steps or epochs; 0: none."""
    final: NonNegativeFloat = 0.0
    """The rate at the end, and after it."""
    warmup_initial: NonNegativeFloat = 0.0
    """The rate at the first step of the warm-up."""
    hold_steps: OptionalLength = 0
    """Steps or epochs after the warm-up in which the rate stays at `initial`."""

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
    """The rates: one before the first boundary, and one after each."""
    warmup: bool = False
    """Rise from the first value to the second before the first boundary."""

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
    """The highest rate."""
    steps: Length
    """Length of the whole cycle, in steps or epochs."""
    warmup_share: Annotated[float, Range(ge=0, lt=1)] = 0.3
    """Share of the steps before the peak; torch's pct_start."""
    div_factor: Annotated[float, Range(ge=1)] = 25.0
    """The rate at the first step is `peak` divided by it."""
    final_div_factor: Annotated[float, Range(ge=1)] = 1e4
    """The last rate is the first one divided by it."""
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
    """Length of the rise, in steps or epochs."""
    initial: NonNegativeFloat = 0.0
    """The rate at the first step."""

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


# Resolving: lengths in epochs become steps, rates found for another batch size become the run's ----------------------


@dataclass(frozen=True)
class ScaledByBatch(Checked):
    """A rate that was tuned for batches of `base_batch_size`, scaled to the batches of the run.

    The linear scaling rule: batches k times as large learn k times as fast (Goyal et al.: Accurate, Large Minibatch
    SGD, 2017). The batch size is known once the schedule is resolved.
    """

    schedule: LearningRate
    """A rate, one of Lockstep's schedules, or any function of the step."""
    base_batch_size: PositiveInt
    """Examples an update, over all towers."""

    def __call__(self, step: int) -> float:
        """Return the rate is not known yet."""
        raise InputError(
            "This schedule is scaled by the batch size, and was asked for the rate without one.",
            given=f"base_batch_size={self.base_batch_size}",
            expected="a resolved schedule",
            hint="call resolve_schedule(schedule, epoch_size, batch_size) first",
        )

    def factor(self, batch_size: int) -> float:
        """Return the factor of rates for batches of `batch_size`."""
        return batch_size / self.base_batch_size


@dataclass(frozen=True)
class Scaled(Checked):
    """`factor` times the rate of `schedule`: what `ScaledByBatch` is, once the batch size is known."""

    schedule: LearningRate
    factor: NonNegativeFloat

    def __call__(self, step: int) -> float:
        """Return the rate after `step` completed updates."""
        return self.factor * rate_at(self.schedule, step)


@dataclass(frozen=True)
class _Sizes(Checked):
    """The sizes, in examples, by which epochs and scaled rates are resolved."""

    epoch_size: NonNegativeInt
    batch_size: PositiveInt

    def __str__(self) -> str:
        return f"{self.epoch_size} examples, batches of {self.batch_size}"


def resolve_schedule(schedule: float | Schedule, epoch_size: int, batch_size: int) -> Schedule:
    """Return the schedule with all lengths in steps and all rates for this batch size.

    Schedules are looked at as dataclasses, nested ones too, those of one's own likewise; any other callable stays as it
    is. A number becomes `Constant`. What is resolved already does not change.

    Args:
        schedule: what an optimizer takes as `lr`.
        epoch_size: examples in an epoch; 0 where there are none, and then lengths have to be in steps.
        batch_size: examples an update, over all towers.
    """
    sizes = _Sizes(epoch_size, batch_size)
    if isinstance(schedule, int | float):
        return Constant(schedule)
    return cast(Schedule, _resolved("schedule", schedule, sizes))


def describe_schedule(schedule: float | Schedule, epoch_size: int, batch_size: int) -> list[str]:
    """Describe in a line each length or rate that `resolve_schedule` converts."""
    sizes = _Sizes(epoch_size, batch_size)
    return list(dict.fromkeys(_lines("schedule", schedule, sizes)))


def _in_steps(name: str, length: int | Epochs, sizes: _Sizes) -> int:
    """Return the length in steps: whole batches in that many epochs, truncated."""
    if isinstance(length, int):
        return length
    steps = length.steps(sizes.epoch_size, sizes.batch_size)
    if steps:
        return steps
    raise InputError(
        f"{name} is shorter than one step.",
        given=f"{name}={length} ({sizes})",
        expected="at least one whole batch",
        hint=f"raise {name}, or give it as a number of steps",
    )


def _resolved(name: str, part: Any, sizes: _Sizes) -> Any:
    if isinstance(part, Epochs):
        return _in_steps(name, part, sizes)
    if isinstance(part, tuple):
        items = tuple(_resolved(name, item, sizes) for item in part)
        return items if any(new is not old for new, old in zip(items, part, strict=True)) else part
    old = _fields(part)
    new = {name: _resolved(name, value, sizes) for name, value in old.items()}
    changes = {name: value for name, value in new.items() if value is not old[name]}
    part = _with(part, changes, sizes) if changes else part
    return Scaled(part.schedule, part.factor(sizes.batch_size)) if isinstance(part, ScaledByBatch) else part


def _with(part: Any, changes: dict[str, Any], sizes: _Sizes) -> Any:
    """Replace fields of a part; errors say what the epochs were resolved with."""
    try:
        return replace(part, **changes)
    except InputError as error:
        given = f"{error.given} ({sizes})"
        raise InputError(error.what, given=given, expected=error.expected, hint=error.hint) from error


def _fields(part: Any) -> dict[str, Any]:
    if not is_dataclass(part) or isinstance(part, type):
        return {}
    return {field.name: getattr(part, field.name) for field in fields(part) if field.init}


def _lines(name: str, part: Any, sizes: _Sizes) -> Iterator[str]:
    if isinstance(part, Epochs):
        steps = _in_steps(name, part, sizes)
        epochs = "1 epoch is" if part.count == 1 else f"{part} are"
        yield f"{epochs} {steps} step{'s' if steps != 1 else ''} ({sizes})"
    elif isinstance(part, tuple):
        for item in part:
            yield from _lines(name, item, sizes)
    else:
        if isinstance(part, ScaledByBatch):
            yield _scaling(part, sizes.batch_size)
        for inner, value in _fields(part).items():
            yield from _lines(inner, value, sizes)


def _scaling(part: ScaledByBatch, batch_size: int) -> str:
    base, factor, rate = part.base_batch_size, part.factor(batch_size), part.schedule
    if isinstance(rate, int | float):
        return f"the learning rate {rate:g} for batches of {base} is {rate * factor:g} for batches of {batch_size}"
    return f"the learning rates for batches of {base} are multiplied by {factor:g} for batches of {batch_size}"
