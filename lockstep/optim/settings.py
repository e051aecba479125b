"""Checks of the numbers that update rules are given."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.checks import check_range, wrong_type
from lockstep.errors import InputError


def check_number(name: str, value: object, high: float = math.inf) -> None:
    """Refuse what is not a number of 0 or more, below `high`.

    Raises:
        InputError: naming the field.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, value, expected="a number", mend=f"give {name} a number")
    check_range(name, value, 0.0, high)


def check_decay(name: str, decay: object) -> None:
    """Refuse what is not the decay of a running mean: 0 or more, below 1.

    Raises:
        InputError: naming the field.
    """
    check_number(name, decay, 1.0)


def check_betas(betas: object) -> None:
    """Refuse what is not two decays.

    Raises:
        InputError: it is no pair, or one of them is out of range.
    """
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise InputError(
            "betas are not two numbers.",
            given=f"betas={betas!r}",
            expected="the decays of the means of the gradients and of their squares",
            mend="write betas=(0.9, 0.999)",
        )
    for index, beta in enumerate(betas):
        check_decay(f"betas[{index}]", beta)
