"""What towers change in the buffers of a model: batch-norm statistics, above all.

Buffers hold their values of the step's start before each tower and again at the end. What a tower has changed is part
of what it returns, goes through the exchange, and is committed by the update alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.parallel.towers import BatchNorm


class Statistics:
    """The buffers of a model around its towers, and the share of each tower in their new values."""

    def __init__(self, model: nn.Module, policy: BatchNorm, num_towers: int) -> None:
        self._model = model
        self._policy = policy
        self._last = num_towers - 1
        self._held = list(model.buffers())
        self._buffers = changeable_buffers(model)
        self._starts = [torch.empty_like(b) for b in self._buffers]
        self._checked = False

    def keep(self) -> None:
        """Remember the values: this is the start of a step."""
        _copy(self._starts, self._buffers)

    def put_back(self) -> None:
        """Have the values of the step's start again."""
        _copy(self._buffers, self._starts)

    def shares(self, tower: int, share: float) -> list[Tensor]:
        """What a tower that has just run adds to the sum over all towers, of which it is a `share`."""
        policy = self._policy
        if policy in ("none", "frozen"):
            return []
        shares: list[Tensor] = []
        for buffer, start in zip(self._buffers, self._starts, strict=True):
            if buffer.is_floating_point() and policy in ("mean", "sync"):
                shares.append(torch.where(buffer == start, 0.0, buffer - start) * share)
            elif tower == (self._last if buffer.is_floating_point() and policy == "last" else 0):
                shares.append(buffer.clone())
            else:
                shares.append(torch.zeros_like(buffer))
        return shares

    def combined(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """The new values of the buffers, from the sums over all towers; what no tower has changed keeps its bits."""
        if self._policy not in ("mean", "sync"):
            return list(sums)
        pairs = zip(self._buffers, sums, strict=True)
        return [buffer + change if buffer.is_floating_point() else change for buffer, change in pairs]

    def check(self) -> None:
        """Refuse a model that has replaced a buffer, or made one, while it ran."""
        if not self._buffers and self._checked:
            return
        self._checked = True
        held = set(map(id, self._held))
        replaced = [name for name, buffer in self._model.named_buffers() if id(buffer) not in held]
        if replaced:
            raise InputError(
                "The model has replaced a buffer, or made one, while it ran.",
                given=", ".join(replaced),
                expected="buffers that are there from the start and change in place",
                mend=f"register it in __init__, and write its values: self.{replaced[0].rpartition('.')[2]}.copy_(...)",
            )


def changeable_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that a step may change: all but those that are expanded, and so cannot be written."""
    return [b for b in model.buffers() if not any(n > 1 and s == 0 for n, s in zip(b.shape, b.stride(), strict=True))]


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if to:  # torch refuses empty lists
        torch._foreach_copy_(to, values)
