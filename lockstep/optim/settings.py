"""Checks of the numbers that update rules are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.checks import check_range, wrong_type
from lockstep.errors import InputError


def check_rates(lr: Any, weight_decay: Any) -> None:
    """Refuse what is no learning rate or no weight decay.

    Raises:
        InputError: one of them is of the wrong type or out of range.
    """
    if isinstance(lr, int | float):
        check_range("lr", lr, 0.0)
    elif not callable(lr) or isinstance(lr, type):
        raise wrong_type("lr", lr, expected="a number or a schedule", hint="write lr=0.1, or lr=ls.optim.Cosine(...)")
    decays = weight_decay if isinstance(weight_decay, Mapping) else {"": weight_decay}
    for pattern, decay in decays.items():
        check_range(f"weight_decay of {pattern!r}" if pattern else "weight_decay", decay, 0.0)


def check_betas(betas: object) -> None:
    """Refuse what is not two decays of running means: 0 or more, below 1.

    Raises:
        InputError: it is no pair, or one of them is out of range.
    """
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise InputError(
            "betas are not two numbers.",
            given=f"betas={betas!r}",
            expected="the decays of the means of the gradients and of their squares",
            hint="write betas=(0.9, 0.999)",
        )
    for index, beta in enumerate(betas):
        check_range(f"betas[{index}]", beta, 0.0, 1.0)
