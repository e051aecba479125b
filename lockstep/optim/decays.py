"""Learning rates that fall along a curve: exponential, polynomial, cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.checks import check_range, check_switch
from lockstep.errors import InputError
from lockstep.optim.lengths import check_length, longer, steps_of
from lockstep.progress import Epochs


def linear(start: float, end: float, share: float) -> float:
    """The rate at `share` (0 to 1) of a straight line."""
    return start + (end - start) * share


def half_cosine(start: float, end: float, share: float) -> float:
    """The rate at `share` (0 to 1) of half a cosine, flat at both ends."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * share))


@dataclass(frozen=True)
class Exponential:
    """initial * factor ** (step / decay_steps), the rule of tf.train.exponential_decay.

    With a burn-in (TensorFlow Object Detection, 2018) the rate is first `burn_in` for `burn_in_steps`, and the decay is
    counted from the end of these.

    Raises:
        InputError: a field is out of range.
    """

    initial: float
    decay_steps: int | Epochs
    factor: float
    """What the rate is multiplied by every `decay_steps`: above 0, at most 1."""
    staircase: bool = True
    """Decay in jumps, every `decay_steps`; False: a little at each step."""
    burn_in_steps: int | Epochs = 0
    burn_in: float | None = None
    """The rate during the burn-in; None or 0: `initial`."""
    final: float = 0.0
    """The rate never falls below this one, in the burn-in neither."""

    def __post_init__(self) -> None:
        for name in ("initial", "factor", "final"):
            check_range(name, getattr(self, name), 0.0)
        if self.burn_in is not None:
            check_range("burn_in", self.burn_in, 0.0)
        check_length("decay_steps", self.decay_steps, 1)
        check_length("burn_in_steps", self.burn_in_steps, 0)
        check_switch("staircase", self.staircase)
        self._check_decay()

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates.

        Raises:
            InputError: a length is in epochs.
        """
        elapsed = step - steps_of("burn_in_steps", self.burn_in_steps)
        decay_steps = steps_of("decay_steps", self.decay_steps)
        if elapsed < 0:
            return max(self.burn_in or self.initial, self.final)
        times = elapsed // decay_steps if self.staircase else elapsed / decay_steps
        return max(self.initial * self.factor**times, self.final)

    def _check_decay(self) -> None:
        if not 0 < self.factor <= 1:
            raise InputError(
                "This factor makes no decay.",
                given=f"factor={self.factor}",
                expected="0 < factor <= 1",
                hint="give what the rate is multiplied by, such as 0.94",
            )
        if self.final > self.initial:
            raise InputError(
                "The rate would start below its floor.",
                given=f"initial={self.initial}, final={self.final}",
                expected="final <= initial",
                hint="lower final, or leave it out",
            )


@dataclass(frozen=True)
class Polynomial:
    """(initial - final) * (1 - step / steps) ** power + final, then `final`: the rule of tf.train.polynomial_decay.

    With `cycle`, `steps` is multiplied as often as needed to reach the current step: the rate jumps up after each
    `steps`, less each time. A `final` above `initial` is a rise.

    Raises:
        InputError: a field is out of range.
    """

    initial: float
    steps: int | Epochs
    final: float = 1e-4
    power: float = 1.0
    """Above 0; 1 is a straight line."""
    cycle: bool = False

    def __post_init__(self) -> None:
        for name in ("initial", "final", "power"):
            check_range(name, getattr(self, name), 0.0)
        check_length("steps", self.steps, 1)
        check_switch("cycle", self.cycle)
        if not self.power:
            raise InputError(
                "A polynomial of power 0 does not decay.",
                given=f"power={self.power}",
                expected="a power above 0",
                hint="give power=1.0 for a straight line, or use Constant",
            )

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates.

        Raises:
            InputError: the length is in epochs.
        """
        steps = steps_of("steps", self.steps)
        rounds = max(1, math.ceil(step / steps)) if self.cycle else 1
        share = min(1.0, step / (steps * rounds))
        return (self.initial - self.final) * math.pow(1.0 - share, self.power) + self.final


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `initial` down to `final`, reached at `steps`, then constant (Loshchilov, Hutter: SGDR, 2017).

    Within `steps`, the rate may first rise linearly from `warmup_initial` to `initial` for `warmup_steps`, and then
    stay there for `hold_steps`; a hold that reaches beyond `steps` ends there, and the rate drops to `final` after it.

    Raises:
        InputError: a field is out of range, or the warm-up is longer than `steps`, or would fall.
    """

    initial: float
    steps: int | Epochs
    """The length; `Epochs` are resolved to whole batches when the run is built."""
    warmup_steps: int | Epochs = 0
    final: float = 0.0
    warmup_initial: float = 0.0
    hold_steps: int | Epochs = 0

    def __post_init__(self) -> None:
        for name in ("initial", "final", "warmup_initial"):
            check_range(name, getattr(self, name), 0.0)
        check_length("steps", self.steps, 1)
        check_length("warmup_steps", self.warmup_steps, 0)
        check_length("hold_steps", self.hold_steps, 0)
        self._check_warmup()

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates.

        Raises:
            InputError: a length is in epochs, which have no steps without a data set.
        """
        steps = steps_of("steps", self.steps)
        warmup_steps = steps_of("warmup_steps", self.warmup_steps)
        held_until = warmup_steps + steps_of("hold_steps", self.hold_steps)
        if step < warmup_steps:
            return linear(self.warmup_initial, self.initial, step / warmup_steps)
        if step > steps:
            return self.final
        if step <= held_until:
            return self.initial
        return half_cosine(self.initial, self.final, (step - held_until) / (steps - held_until))

    def _check_warmup(self) -> None:
        if longer(self.warmup_steps, self.steps):
            raise InputError(
                "The warm-up is longer than the whole schedule.",
                given=f"steps={self.steps}, warmup_steps={self.warmup_steps}",
                expected="warmup_steps <= steps",
                hint="raise steps or lower warmup_steps",
            )
        if self.warmup_steps != 0 and self.warmup_initial > self.initial:
            raise InputError(
                "The warm-up would fall instead of rise.",
                given=f"initial={self.initial}, warmup_initial={self.warmup_initial}",
                expected="warmup_initial <= initial",
                hint="lower warmup_initial, or leave the warm-up out",
            )
