"""Learning rates in pieces: constant between boundaries, or up to a peak and down again."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from lockstep.checks import check_one_of, check_range, check_switch, check_type
from lockstep.errors import InputError
from lockstep.optim.decays import half_cosine, linear
from lockstep.optim.lengths import check_length, longer, steps_of
from lockstep.progress import Epochs


@dataclass(frozen=True)
class PiecewiseConstant:
    """values[0] until boundaries[0], then values[1] until boundaries[1], and so on; the new value holds at a boundary.

    The manual steps of TensorFlow Object Detection. With `warmup`, the rate rises (or falls) linearly from values[0] to
    values[1] over the steps before boundaries[0]. Boundaries in epochs that stand beside some in steps are compared
    with those when they are resolved. Lists are taken for tuples.

    Raises:
        InputError: the boundaries do not rise, there is not one value more than boundaries, or one is out of range.
    """

    boundaries: tuple[int | Epochs, ...]
    """Where the value changes: 1 or more, strictly rising; none at all for a constant."""
    values: tuple[float, ...]
    warmup: bool = False

    def __post_init__(self) -> None:
        for name in ("boundaries", "values"):
            given = getattr(self, name)
            check_type(name, given, (tuple, list), expected="a tuple", hint=f"write it as {name}=({given!r},)")
            object.__setattr__(self, name, tuple(given))
        for index, boundary in enumerate(self.boundaries):
            check_length(f"boundaries[{index}]", boundary, 1)
        for index, value in enumerate(self.values):
            check_range(f"values[{index}]", value, 0.0)
        check_switch("warmup", self.warmup)
        self._check_order()
        self._check_counts()

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates.

        Raises:
            InputError: a boundary is in epochs.
        """
        boundaries = [steps_of("boundaries", boundary) for boundary in self.boundaries]
        if self.warmup and step < boundaries[0]:
            return linear(self.values[0], self.values[1], step / boundaries[0])
        return self.values[bisect_right(boundaries, step)]

    def _check_order(self) -> None:
        if any(first == second or longer(first, second) for first, second in pairwise(self.boundaries)):
            raise InputError(
                "The boundaries do not rise.",
                given="boundaries=" + ", ".join(str(boundary) for boundary in self.boundaries),
                expected="each later than the one before",
                hint="sort them, with their values, and leave out those that stand twice",
            )

    def _check_counts(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            raise InputError(
                "There is one value before the first boundary, and one after each.",
                given=f"{len(self.boundaries)} boundaries, {len(self.values)} values",
                expected=f"{len(self.boundaries) + 1} values",
                hint="add the values that are missing, or take away those that are too many",
            )
        if self.warmup and not self.boundaries:
            raise InputError(
                "A warm-up leads up to the first boundary, and there is none.",
                given="warmup=True, no boundaries",
                expected="a boundary",
                hint="give a boundary and two values, or leave warmup out",
            )


@dataclass(frozen=True)
class OneCycle:
    """Up to `peak` and down to far below the start, with the numbers of torch.optim.lr_scheduler.OneCycleLR.

    From peak / div_factor to `peak` over the first `warmup_share` of the steps, then down to
    peak / div_factor / final_div_factor at the last one, step `steps` - 1, where it stays (Smith, Topin:
    Super-Convergence, 2018). Momentum is not cycled.

    Raises:
        InputError: a field is out of range.
    """

    peak: float
    steps: int | Epochs
    warmup_share: float = 0.3
    """Share of the steps before the peak, 0 or more, below 1; torch's pct_start."""
    div_factor: float = 25.0
    """1 or more."""
    final_div_factor: float = 1e4
    """1 or more."""
    anneal: Literal["cosine", "linear"] = "cosine"
    """The form of both halves."""

    def __post_init__(self) -> None:
        check_range("peak", self.peak, 0.0)
        check_length("steps", self.steps, 1)
        check_range("warmup_share", self.warmup_share, 0.0, 1.0)
        check_range("div_factor", self.div_factor, 1.0)
        check_range("final_div_factor", self.final_div_factor, 1.0)
        check_one_of("anneal", self.anneal, ("cosine", "linear"))

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates.

        Raises:
            InputError: the length is in epochs.
        """
        steps = steps_of("steps", self.steps)
        start = self.peak / self.div_factor
        final = start / self.final_div_factor
        peak_step, last_step = self.warmup_share * steps - 1.0, steps - 1
        if step >= last_step:
            return final
        curve = half_cosine if self.anneal == "cosine" else linear
        if step < peak_step:
            return curve(start, self.peak, step / peak_step)
        return curve(self.peak, final, (step - peak_step) / (last_step - peak_step))
