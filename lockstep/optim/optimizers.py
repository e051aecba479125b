"""Optimizers as values: what to do, bound once to the parameters it is done to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lockstep.checks import check_range, wrong_type
from lockstep.errors import InputError
from lockstep.optim import kernels
from lockstep.optim.schedules import Constant, Schedule


class BoundOptimizer(Protocol):
    """An optimizer with its parameters and their slots."""

    slots: Mapping[str, list[Tensor]]
    """The optimizer's own tensors, by slot name, in the order of the parameters."""

    def learning_rate(self, step: int) -> float:
        """The rate of the update that follows `step` completed ones."""
        ...

    def update(self, gradients: Sequence[Tensor | None], lr: float) -> None:
        """Update the parameters in place; those whose gradient is None stay untouched, slots included."""
        ...


class Optimizer(Protocol):
    """What `TrainState` wants of an optimizer."""

    def bind(self, parameters: list[Tensor]) -> BoundOptimizer:
        """The same optimizer, ready to update these parameters in place."""
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with torch's argument names and arithmetic."""

    lr: float | Schedule
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    """Added to the gradient as weight_decay * parameter, after the gradient transforms."""

    def __post_init__(self) -> None:
        if isinstance(self.lr, int | float):
            check_range("lr", self.lr, 0.0, math.inf)
        elif not callable(self.lr):
            raise wrong_type(
                "lr", self.lr, expected="a number or a schedule", mend="write lr=0.1, or lr=ls.optim.Cosine(...)"
            )
        check_range("momentum", self.momentum, 0.0, 1.0)
        check_range("weight_decay", self.weight_decay, 0.0, math.inf)
        if self.nesterov and not self.momentum > 0:
            raise InputError(
                "Nesterov's update looks ahead along the momentum, and there is none.",
                given=f"nesterov=True, momentum={self.momentum}",
                expected="momentum above 0",
                mend="set momentum (0.9 is usual), or nesterov=False",
            )

    def bind(self, parameters: list[Tensor]) -> BoundSGD:
        """The optimizer with a momentum buffer of zeros for each parameter."""
        return BoundSGD(self, parameters)


class BoundSGD:
    """SGD with its parameters and their momentum buffers."""

    def __init__(self, value: SGD, parameters: list[Tensor]) -> None:
        self._schedule: Schedule = Constant(value.lr) if isinstance(value.lr, int | float) else value.lr
        self._value = value
        self._parameters = parameters
        self._momentum_buffers = [torch.zeros_like(p) for p in parameters] if value.momentum else []
        self._fused = kernels.can_fuse(parameters)
        self.slots: Mapping[str, list[Tensor]] = {"momentum_buffer": self._momentum_buffers} if value.momentum else {}

    def learning_rate(self, step: int) -> float:
        """The rate of the update that follows `step` completed ones."""
        return self._schedule(step)

    def update(self, gradients: Sequence[Tensor | None], lr: float) -> None:
        """Update the parameters in place; those whose gradient is None stay untouched, slots included."""
        parameters, buffers = self._parameters, self._momentum_buffers
        given = [g for g in gradients if g is not None]
        if len(given) < len(parameters):
            parameters = [p for p, g in zip(parameters, gradients, strict=True) if g is not None]
            buffers = [b for b, g in zip(buffers, gradients, strict=True) if g is not None] if buffers else []
        kernels.sgd(
            parameters,
            given,
            buffers,
            lr=lr,
            momentum=self._value.momentum,
            nesterov=self._value.nesterov,
            weight_decay=self._value.weight_decay,
            fused=self._fused,
        )
