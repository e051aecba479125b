"""Which checkpoints are kept: the newest few, and one every few hours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import InputError


@dataclass(frozen=True)
class Retention:
    """Keep the `newest` checkpoints; of the older ones, those at least `every_hours` apart.

    The oldest one counts as the first of these. Step 0 is a checkpoint like any other.

    Raises:
        InputError: `newest` is below 1, or `every_hours` is not above 0.
    """

    newest: int = 5
    every_hours: float | None = None
    """None keeps no older ones."""

    def __post_init__(self) -> None:
        if self.newest < 1:
            raise InputError(
                "At least the newest checkpoint has to be kept.",
                given=f"newest={self.newest}",
                expected="1 or more",
                mend="keep at least one: a run without checkpoints cannot be resumed",
            )
        if self.every_hours is not None and not self.every_hours > 0:
            raise InputError(
                f"One checkpoint every {self.every_hours} hours cannot be kept.",
                given=f"every_hours={self.every_hours}",
                expected="a number above 0, or None",
                mend="give the hours between two checkpoints to keep, or None to keep the newest alone",
            )

    def surplus(self, saved_seconds: Mapping[int, float]) -> list[int]:
        """The steps whose checkpoints are to be deleted, oldest first.

        Deleting them and asking again gives none.

        Args:
            saved_seconds: when the checkpoint of each step was saved, in seconds since 1970.
        """
        older = sorted(saved_seconds)[: -self.newest]
        if self.every_hours is None:
            return older
        surplus, last_kept = [], float("-inf")
        for step in older:
            # A clock that was set back makes a distance too: it must not have everything deleted until it catches up.
            if abs(saved_seconds[step] - last_kept) < 3600 * self.every_hours:
                surplus.append(step)
            else:
                last_kept = saved_seconds[step]
        return surplus
