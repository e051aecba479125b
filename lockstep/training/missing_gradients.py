"""Parameters that no tower of any worker has a gradient for: an update leaves them, and their slots, as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lockstep import readback
from lockstep.screen import log
from lockstep.training.preflight import check_parameters

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.parallel.tower_outputs import Totals
    from lockstep.training.state import TrainState


MAX_SURPRISES = 8
"""Attempts of a run that may be made again as other parameters miss gradients than before; then each waits instead."""


class MissingGradients:
    """Finds them, and names each of them once in the log.

    What other workers lack comes with the sum, and to read it a host waits for its device. So an attempt that is read
    late takes those of the last one that was read, and a number on the device says whether that is wrong. Then it
    changes nothing, and is made again.

    Args:
        state: whose parameters they are.
        num_leaves: of the tree.
        is_chief: this worker writes the log.
    """

    def __init__(self, state: TrainState, num_leaves: int, *, is_chief: bool) -> None:
        self._state, self._num_leaves, self._is_chief = state, num_leaves, is_chief
        self.told: set[str] = set()
        """Those that are named already."""
        self._expected: list[bool] | None = None
        """For each parameter, whether no leaf had a gradient for it in the last attempt that was read."""
        self._expected_there: Tensor | None = None
        """The same on the device, where it has been needed."""
        self._num_surprises = 0

    def left_out(self, totals: Totals, absent: Mapping[int, int]) -> list[Tensor | None]:
        """The gradients of the sum, None for each parameter that no leaf of the tree had one for.

        Args:
            totals: the sum over all towers, with zeros for what a tower lacks.
            absent: how many of this worker's leaves lack a gradient, by the index of the parameter, where any does.
        """
        indices = range(len(totals.gradients))
        self._expected_there = None
        if not absent:  # what this worker has is not missing everywhere
            self._expected = [False for _ in indices]
            return totals.gradients
        of_all = [absent.get(i, 0) for i in indices] if totals.absent is None else totals.absent.tolist()
        self._expected = is_missing = [count == self._num_leaves for count in of_all]
        self._tell([name for name, nowhere in zip(self._state.parameters, is_missing, strict=True) if nowhere])
        return _without(totals.gradients, is_missing)

    def expected(self, totals: Totals, absent: Mapping[int, int]) -> tuple[list[Tensor | None], Tensor | None]:
        """What `left_out` returns if they are those of the last attempt that was read; the host reads nothing.

        Returns:
            The gradients, and a number on the device: of how many parameters that is wrong. None where it is right.
        """
        if self._expected is None or totals.absent is None:
            return self.left_out(totals, absent), None
        if not absent and not any(self._expected):
            return totals.gradients, None
        if self._expected_there is None:
            sent = readback.numbers_on(totals.absent.device, [float(nowhere) for nowhere in self._expected])
            self._expected_there = torch.as_tensor(sent).bool()
        wrong = (totals.absent == self._num_leaves) != self._expected_there
        return _without(totals.gradients, self._expected), wrong.sum(dtype=torch.float64)

    def forget(self) -> bool:
        """Expect nothing of the next attempt, which is then read; false if that has been so too often."""
        self._expected = None
        self._num_surprises += 1
        return self._num_surprises < MAX_SURPRISES

    def _tell(self, missing: Sequence[str]) -> None:
        new = [name for name in missing if name not in self.told]
        if not new:
            return
        self.told.update(new)
        check_parameters(self._state)
        penalised = [name for name in new if name in self._state.penalised]
        untouched = [name for name in new if name not in penalised]
        for some, what_happens in ((untouched, "left untouched"), (penalised, "moved by the penalty alone")):
            if some and self._is_chief:
                log.warning("no tower has a gradient for %s: %s", ", ".join(some), what_happens)


def _without(gradients: Sequence[Tensor | None], is_missing: Sequence[bool]) -> list[Tensor | None]:
    return [None if nowhere else g for g, nowhere in zip(gradients, is_missing, strict=True)]
