"""Gradients multiplied by numbers, by the name of the parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from lockstep.checks import check_type
from lockstep.errors import InputError
from lockstep.optim.gradients import Gradients
from lockstep.optim.schedules import Schedule, rate_at
from lockstep.optim.transforms import BoundTransform
from lockstep.selection import pattern_of_each

Multiplier = float | Schedule
"""A number, or a function of the completed updates that returns one."""

_HINT = 'write ScaleGradients({r"bias$": 2.0})'


@dataclass(frozen=True)
class ScaleGradients:
    """Multiply the gradients of some parameters: `ScaleGradients({r"bias$": 2.0, "scale": lambda step: 0.1})`.

    A pattern is a regular expression that is searched for in the name, or the exact name; parameters that none of them
    matches keep their gradients, and one without a gradient in this update is passed over. Times 0 a gradient is zero,
    and not absent: momentum and weight decay still move the parameter. What is not to move at all is frozen.
    """

    multipliers: Mapping[str, Multiplier]

    def __post_init__(self) -> None:
        check_type("multipliers", self.multipliers, Mapping, expected="numbers by pattern", hint=_HINT)
        if not self.multipliers:
            raise InputError(
                "There is nothing to multiply gradients by.",
                given="multipliers={}",
                expected="at least one pattern with its number",
                hint="give one, or leave the transform out",
            )
        for pattern, multiplier in self.multipliers.items():
            if not callable(multiplier) or isinstance(multiplier, type):
                _check(pattern, multiplier)

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundTransform:
        """The multiplication, with each parameter's pattern looked up.

        Raises:
            InputError: a pattern matches nothing, or two of them the same parameter.
        """
        pattern_of = pattern_of_each("ScaleGradients", self.multipliers, parameters)
        return partial(
            self._scale,
            {p: [i for i, name in enumerate(parameters) if pattern_of.get(name) == p] for p in self.multipliers},
        )

    def _scale(self, indices_of: Mapping[str, Sequence[int]], gradients: Gradients, step: int) -> None:
        factors: dict[int, float] = {}
        for pattern, multiplier in self.multipliers.items():
            factor = _factor(pattern, multiplier, step)
            if factor != 1:
                factors.update(dict.fromkeys(indices_of[pattern], factor))
        gradients.multiply(factors)


def _factor(pattern: str, multiplier: Multiplier, step: int) -> float:
    if not callable(multiplier):
        return multiplier
    return rate_at(multiplier, step, name=_called(pattern), low=-math.inf)


def _check(pattern: str, factor: object) -> None:
    name = _called(pattern)
    check_type(name, factor, (int, float), expected="a number, or a function of the step that returns one", hint=_HINT)
    if isinstance(factor, int | float) and not math.isfinite(factor):
        raise InputError(f"{name} is not finite.", given=str(factor), expected="a finite number", hint="correct it")


def _called(pattern: str) -> str:
    return f"The multiplier of {pattern!r}"
