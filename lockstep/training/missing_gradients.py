"""Parameters that no tower of any worker has a gradient for: an update leaves them, and their slots, as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lockstep.screen import log
from lockstep.training.preflight import check_parameters

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.parallel.tower_outputs import Totals
    from lockstep.training.state import TrainState


class MissingGradients:
    """Finds them, and names each of them once in the log.

    Args:
        state: whose parameters they are.
        num_leaves: of the tree.
        is_chief: this worker writes the log.
    """

    def __init__(self, state: TrainState, num_leaves: int, *, is_chief: bool) -> None:
        self._state, self._num_leaves, self._is_chief = state, num_leaves, is_chief
        self._told: set[str] = set()

    def left_out(self, totals: Totals, absent: Mapping[int, int]) -> list[Tensor | None]:
        """The gradients of the sum, None for each parameter that no leaf of the tree had one for.

        Args:
            totals: the sum over all towers, with zeros for what a tower lacks.
            absent: how many of this worker's leaves lack a gradient, by the index of the parameter, where any does.
        """
        if not absent:  # what this worker has is not missing everywhere
            return totals.gradients
        indices = range(len(totals.gradients))
        of_all = [absent.get(i, 0) for i in indices] if totals.absent is None else totals.absent.tolist()
        is_missing = [count == self._num_leaves for count in of_all]
        self._tell([name for name, nowhere in zip(self._state.parameters, is_missing, strict=True) if nowhere])
        return [None if nowhere else g for g, nowhere in zip(totals.gradients, is_missing, strict=True)]

    def _tell(self, missing: Sequence[str]) -> None:
        new = [name for name in missing if name not in self._told]
        if not new:
            return
        self._told.update(new)
        check_parameters(self._state)
        penalised = [name for name in new if name in self._state.penalised]
        untouched = [name for name in new if name not in penalised]
        for some, what_happens in ((untouched, "left untouched"), (penalised, "moved by the penalty alone")):
            if some and self._is_chief:
                log.warning("no tower has a gradient for %s: %s", ", ".join(some), what_happens)
