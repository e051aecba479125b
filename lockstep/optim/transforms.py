"""What happens to the averaged gradients before the update, as a list of small values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lockstep.errors import InputError


class Gradients:
    """The averaged gradients of one attempt on their way to the optimizer.

    The tensors may belong to the exchange, and other workers may be reading them: nothing here changes one in place.
    """

    def __init__(self, tensors: Sequence[Tensor | None], norm: float) -> None:
        self.tensors = list(tensors)
        """In the order of the parameters; None where no tower had a gradient."""
        self.norm = norm
        """The global norm of `tensors` as they are now."""

    def scale(self, factor: float) -> None:
        """Multiply every gradient, and the norm."""
        present = [i for i, g in enumerate(self.tensors) if g is not None]
        scaled = torch._foreach_mul([g for g in self.tensors if g is not None], factor)
        for i, gradient in zip(present, scaled, strict=True):
            self.tensors[i] = gradient
        self.norm *= factor


class GradientTransform(Protocol):
    """One stage between the exchange and the optimizer."""

    def __call__(self, gradients: Gradients, step: int) -> None:
        """Transform the gradients of the update that follows `step` completed ones."""
        ...


@dataclass(frozen=True)
class ClipGlobalNorm:
    """Scale all gradients by max_norm / norm where their global norm exceeds it (Pascanu et al., 2013)."""

    max_norm: float

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise InputError(
                "Gradients cannot be clipped to this norm.",
                given=f"max_norm={self.max_norm}",
                expected="a number above 0",
                mend="give the largest norm allowed, or leave the transform out",
            )

    def __call__(self, gradients: Gradients, step: int) -> None:
        """Transform the gradients of the update that follows `step` completed ones."""
        if gradients.norm > self.max_norm:
            gradients.scale(self.max_norm / gradients.norm)
