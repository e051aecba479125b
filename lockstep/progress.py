"""How far a run is, and when it ends: steps, epochs, hours.

Whether an interval has passed is a pure function of two moments of the run. All workers see the same moments (the clock
is the chief's, sent along with the gradients), so all decide alike without asking each other.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, NamedTuple

from lockstep.errors import InputError


class Progress(NamedTuple):
    """One moment of a run."""

    step: int
    """Completed updates."""
    position: int
    """Place in the stream of the first example that has not been used."""
    epoch_size: int
    """Examples in an epoch; 0 where the stream has none."""
    elapsed_seconds: float = 0.0
    """Time since this start of the run, on the chief's clock."""

    @property
    def epochs(self) -> float:
        """Epochs done, with the fraction of the current one."""
        return self.position / self.epoch_size if self.epoch_size else 0.0


def _positive(count: float, unit: str) -> None:
    if not count > 0:
        raise InputError(
            f"A run of {count} {unit} has no step to do.",
            given=f"{count} {unit}",
            expected="a number above 0",
            hint=f"give a positive number of {unit}, or none at all to train until stopped",
        )


@dataclass(frozen=True)
class Steps:
    """The run ends when `count` updates are complete."""

    count: int

    def __post_init__(self) -> None:
        _positive(self.count, "steps")

    def __str__(self) -> str:
        return f"{self.count:g} steps"

    def reached(self, progress: Progress, batch_size: int) -> bool:
        """Whether no further step is due."""
        return progress.step >= self.count

    def fraction(self, progress: Progress) -> float:
        """Share of the run that is done, 0 to 1."""
        return min(1.0, progress.step / self.count)


@dataclass(frozen=True)
class Epochs:
    """The run ends at the end of epoch `count`; every batch is full.

    The rest that does not fill a batch is left out, as by the reference trainers. With `keep_last` the last batch takes
    it, and is filled from the next epoch.
    """

    count: float
    keep_last: bool = False

    def __post_init__(self) -> None:
        _positive(self.count, "epochs")

    def steps(self, epoch_size: int, batch_size: int) -> int:
        """Number of batches in that many epochs, rounded down, or up with `keep_last`."""
        batches = epoch_size * self.count / batch_size
        return math.ceil(batches) if self.keep_last else int(batches)

    def __str__(self) -> str:
        return f"{self.count:g} epochs"

    def reached(self, progress: Progress, batch_size: int) -> bool:
        """Whether no further batch fits: no full one, or with `keep_last` not one example."""
        needed = 1 if self.keep_last else batch_size
        return progress.position + needed > self.count * progress.epoch_size

    def fraction(self, progress: Progress) -> float:
        """Share of the run that is done, 0 to 1."""
        return min(1.0, progress.epochs / self.count)


@dataclass(frozen=True)
class Hours:
    """This start of the run ends after `count` hours of the chief's clock."""

    count: float

    def __post_init__(self) -> None:
        _positive(self.count, "hours")

    def __str__(self) -> str:
        return f"{self.count:g} hours"

    def reached(self, progress: Progress, batch_size: int) -> bool:
        """Whether the time is up."""
        return progress.elapsed_seconds >= self.count * 3600

    def fraction(self, progress: Progress) -> float:
        """Share of the run that is done, 0 to 1."""
        return min(1.0, progress.elapsed_seconds / (self.count * 3600))


End = Steps | Epochs | Hours

_INTERVAL = re.compile(r"(\d+(?:\.\d+)?)\s*(steps?|s|seconds?|epochs?)")


@dataclass(frozen=True)
class Interval:
    """How often something happens: every `amount` steps, seconds or epochs; an amount of 0 is never."""

    amount: float
    unit: Literal["steps", "seconds", "epochs"] = "steps"

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Parse `"20 steps"`, `"600 s"`, `"1 epochs"` or `"0"`; other texts are an InputError."""
        if text.strip() == "0":
            return cls(0)
        match = _INTERVAL.fullmatch(text.strip())
        if match is None:
            raise InputError(
                f"{text!r} is not an interval.",
                given=repr(text),
                expected='a number and a unit: "20 steps", "600 s" or "1 epochs"; "0" switches it off',
                hint="write the number, a space and steps, s or epochs",
            )
        unit: Literal["steps", "seconds", "epochs"] = (
            "steps" if match[2].startswith("step") else "epochs" if match[2].startswith("epoch") else "seconds"
        )
        return cls(float(match[1]), unit)

    def __post_init__(self) -> None:
        if not 0 <= self.amount < math.inf:
            raise InputError(
                "An interval is a finite number, 0 or more.",
                given=f"{self.amount} {self.unit}",
                expected="0 (never) or more",
                hint="give a positive amount, or 0 to switch it off",
            )

    def __str__(self) -> str:
        amount = Decimal(str(self.amount)).normalize()
        return f"{amount:f} {'s' if self.unit == 'seconds' else self.unit}"

    def passed(self, before: Progress, now: Progress) -> bool:
        """Whether a whole multiple of the interval lies in (before, now]."""
        if not self.amount:
            return False
        return self._count(now) > self._count(before)

    def _count(self, progress: Progress) -> int:
        if self.unit == "steps":
            return int(progress.step / self.amount)
        return int((progress.elapsed_seconds if self.unit == "seconds" else progress.epochs) / self.amount)
