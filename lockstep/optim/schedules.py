"""Learning rates as pure functions of the step: nothing to advance, nothing to save.

The update that makes step k uses `schedule(k - 1)`. What is said in epochs, or for another batch size, is resolved once
the run knows both. Here is what goes for all schedules and around any of them; the curves are in `decays` and
`piecewise`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, cast

from lockstep.checks import check_range, check_type, plain, wrong_type
from lockstep.errors import InputError, LockstepError
from lockstep.optim.decays import linear
from lockstep.optim.lengths import Sizes, check_length, in_steps, steps_of
from lockstep.progress import Epochs


class Schedule(Protocol):
    """A learning rate as a function of completed updates."""

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates."""
        ...


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
class Warmup:
    """A straight line from `initial` to what `schedule` gives at `steps`, over `steps`; from there on `schedule`.

    The schedule is not put off: it counts the steps of its warm-up.

    Raises:
        InputError: a field is out of range, or `schedule` is neither a number nor callable.
    """

    schedule: float | Schedule
    """A rate, one of Lockstep's schedules, or any function of the step."""
    steps: int | Epochs
    initial: float = 0.0

    def __post_init__(self) -> None:
        _check_schedule(self.schedule)
        check_length("steps", self.steps, 1)
        check_range("initial", self.initial, 0.0)

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates.

        Raises:
            InputError: a length is in epochs.
        """
        steps = steps_of("steps", self.steps)
        if step >= steps:
            return _rate(self.schedule, step)
        return linear(self.initial, _rate(self.schedule, steps), step / steps)


@dataclass(frozen=True)
class ScaledByBatch:
    """A rate that was found for batches of `base_batch_size`, for the batches of the run.

    The linear scaling rule: batches k times as large learn k times as fast (Goyal et al.: Accurate, Large Minibatch
    SGD, 2017). The batch size is known once the schedule is resolved.

    Raises:
        InputError: a field is out of range, or `schedule` is neither a number nor callable.
    """

    schedule: float | Schedule
    """A rate, one of Lockstep's schedules, or any function of the step."""
    base_batch_size: int
    """Examples an update, over all towers."""

    def __post_init__(self) -> None:
        _check_schedule(self.schedule)
        check_type("base_batch_size", self.base_batch_size, int, expected="a whole number", hint="write it as 256")
        check_range("base_batch_size", self.base_batch_size, 1)

    def __call__(self, step: int) -> float:
        """The rate is not known yet.

        Raises:
            InputError: always; the schedule that `resolved` makes of this one has rates.
        """
        raise InputError(
            "This schedule is scaled by the batch size, and was asked for the rate without one.",
            given=f"base_batch_size={self.base_batch_size}",
            expected="a resolved schedule",
            hint="call resolved(schedule, epoch_size, batch_size) first",
        )

    def factor(self, batch_size: int) -> float:
        """What rates are multiplied by for batches of `batch_size`."""
        return batch_size / self.base_batch_size


@dataclass(frozen=True)
class Scaled:
    """`factor` times the rate of `schedule`: what `ScaledByBatch` is, once the batch size is known.

    Raises:
        InputError: the factor is negative or not finite, or `schedule` is neither a number nor callable.
    """

    schedule: float | Schedule
    factor: float

    def __post_init__(self) -> None:
        _check_schedule(self.schedule)
        check_range("factor", self.factor, 0.0)

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates."""
        return self.factor * _rate(self.schedule, step)


def rate_at(schedule: Schedule, step: int, *, name: str = "The learning rate", low: float = 0.0) -> float:
    """What the schedule gives after `step` completed updates; one of the user's own may give anything.

    Args:
        schedule: in steps by now.
        step: completed updates.
        name: what errors call that which is scheduled.
        low: the least it may be.

    Raises:
        InputError: it gives no number, one that is not finite or below `low`, or raises an error.
    """
    try:
        rate = plain(schedule(step))
    except LockstepError:
        raise
    except Exception as error:
        raise _unusable(schedule, step, name, low, f"{type(error).__name__}: {error}") from error
    if isinstance(rate, (int, float)) and not isinstance(rate, bool) and low <= rate < math.inf and -math.inf < rate:
        return rate
    raise _unusable(schedule, step, name, low, f"{rate!r}")


def resolved(schedule: float | Schedule, epoch_size: int, batch_size: int) -> Schedule:
    """The same schedule with all lengths in steps and all rates for this batch size.

    Schedules are looked at as dataclasses, nested ones too, those of one's own likewise; any other callable stays as it
    is. A number becomes `Constant`. What is resolved already does not change.

    Args:
        schedule: what an optimizer takes as `lr`.
        epoch_size: examples in an epoch; 0 where there are none, and then lengths have to be in steps.
        batch_size: examples an update, over all towers.

    Raises:
        InputError: epochs are shorter than a batch, or lengths contradict each other now that they can be compared.
    """
    sizes = _checked_sizes(epoch_size, batch_size)
    if isinstance(schedule, int | float):
        return Constant(schedule)
    return cast(Schedule, _resolved("schedule", schedule, sizes))


def describe(schedule: float | Schedule, epoch_size: int, batch_size: int) -> list[str]:
    """How `resolved` understands the schedule, one line for each thing that it settles, if any.

    Raises:
        InputError: epochs are shorter than a batch.
    """
    sizes = _checked_sizes(epoch_size, batch_size)
    return list(dict.fromkeys(_lines("schedule", schedule, sizes)))


def _unusable(schedule: Schedule, step: int, name: str, low: float, result: str) -> InputError:
    source = getattr(schedule, "__qualname__", None) or repr(schedule)
    least = "" if low == -math.inf else f", {low:g} or more"
    return InputError(
        f"{name} after {step} updates cannot be used.",
        given=f"{result}, from {source}",
        expected=f"a finite number{least}",
        hint=f"correct what the schedule returns for step {step}: a float or an int",
    )


def _check_schedule(schedule: object) -> None:
    if isinstance(schedule, int | float):
        check_range("schedule", schedule, 0.0)
    elif not callable(schedule) or isinstance(schedule, type):
        raise wrong_type(
            "schedule", schedule, expected="a number or a schedule", hint="write 0.1, or ls.optim.Cosine(0.1, 1000)"
        )


def _checked_sizes(epoch_size: int, batch_size: int) -> Sizes:
    check_range("epoch_size", epoch_size, 0)
    check_range("batch_size", batch_size, 1)
    return Sizes(epoch_size, batch_size)


def _rate(schedule: float | Schedule, step: int) -> float:
    return schedule if isinstance(schedule, int | float) else rate_at(schedule, step)


def _fields(part: Any) -> dict[str, Any]:
    """The fields that a part was made with; none where it is no dataclass."""
    if not is_dataclass(part) or isinstance(part, type):
        return {}
    return {field.name: getattr(part, field.name) for field in fields(part) if field.init}


def _resolved(name: str, part: Any, sizes: Sizes) -> Any:
    if isinstance(part, Epochs):
        return in_steps(name, part, sizes)
    if isinstance(part, tuple):
        items = tuple(_resolved(name, item, sizes) for item in part)
        return items if any(new is not old for new, old in zip(items, part, strict=True)) else part
    old = _fields(part)
    new = {name: _resolved(name, value, sizes) for name, value in old.items()}
    changes = {name: value for name, value in new.items() if value is not old[name]}
    part = _changed(part, changes, sizes) if changes else part
    return Scaled(part.schedule, part.factor(sizes.batch_size)) if isinstance(part, ScaledByBatch) else part


def _changed(part: Any, changes: dict[str, Any], sizes: Sizes) -> Any:
    """The part with these fields; errors say what the epochs were resolved with."""
    try:
        return replace(part, **changes)
    except InputError as error:
        given = f"{error.given} ({sizes})"
        raise InputError(error.what, given=given, expected=error.expected, hint=error.hint) from error


def _lines(name: str, part: Any, sizes: Sizes) -> Iterator[str]:
    if isinstance(part, Epochs):
        steps = in_steps(name, part, sizes)
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
