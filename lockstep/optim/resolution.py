"""Resolving a schedule: lengths in epochs become steps, rates found for another batch size become the run's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, cast

from lockstep.checks import Checked, NonNegativeFloat, NonNegativeInt, PositiveInt, check_value
from lockstep.errors import InputError
from lockstep.optim.schedules import Constant, LearningRate, Schedule, rate_at
from lockstep.progress import Epochs


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


class _Sizes(NamedTuple):
    """The sizes, in examples, by which epochs and scaled rates are resolved."""

    epoch_size: int
    batch_size: int

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
    sizes = _checked_sizes(epoch_size, batch_size)
    if isinstance(schedule, int | float):
        return Constant(schedule)
    return cast(Schedule, _resolved("schedule", schedule, sizes))


def describe_schedule(schedule: float | Schedule, epoch_size: int, batch_size: int) -> list[str]:
    """Describe in a line each length or rate that `resolve_schedule` converts."""
    sizes = _checked_sizes(epoch_size, batch_size)
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


def _checked_sizes(epoch_size: int, batch_size: int) -> _Sizes:
    check_value("epoch_size", epoch_size, NonNegativeInt)
    check_value("batch_size", batch_size, PositiveInt)
    return _Sizes(epoch_size, batch_size)


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
    """Return the fields that a part was made with; none where it is no dataclass."""
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
