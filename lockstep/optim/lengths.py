"""Lengths of schedules, in steps or in epochs."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.checks import check_range
from lockstep.errors import InputError
from lockstep.progress import Epochs


class Sizes(NamedTuple):
    """What epochs and scaled rates are resolved with, in examples."""

    epoch_size: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.epoch_size} examples, batches of {self.batch_size}"


def check_length(name: str, length: object, least: int) -> None:
    """Refuse what is neither epochs nor a whole number of at least so many steps.

    Raises:
        InputError: naming the field.
    """
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


def longer(first: int | Epochs, second: int | Epochs) -> bool:
    """Whether `first` is known to be longer: steps and epochs compare only among themselves, until resolved."""
    if isinstance(first, Epochs) and isinstance(second, Epochs):
        return first.count > second.count
    return isinstance(first, int) and isinstance(second, int) and first > second


def steps_of(name: str, length: int | Epochs) -> int:
    """A length that has to be in steps by now.

    Raises:
        InputError: it is in epochs, which have no steps without a data set.
    """
    if isinstance(length, int):
        return length
    raise InputError(
        "This schedule counts in epochs, and was asked for the rate at a step.",
        given=f"{name}={length}",
        expected="a number of steps",
        hint=f"call resolved(schedule, epoch_size, batch_size) first, or give {name} as a number of steps",
    )


def in_steps(name: str, length: int | Epochs, sizes: Sizes) -> int:
    """The length in steps: whole batches in that many epochs, truncated.

    Raises:
        InputError: the epochs are shorter than one batch.
    """
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
