"""The scale of the losses in fp16 (Micikevicius et al.: Mixed Precision Training, 2018)."""

from __future__ import annotations

from typing import Any

LARGEST, LEAST = 2.0**24, 1.0
GROWTH_INTERVAL_STEPS = 2000


class LossScale:
    """A power of two that small gradients are lifted by: halved when they overflow, doubled after 2,000 good updates.

    Powers of two change no bits but the exponent.
    """

    def __init__(self, value: float = 2.0**16, good_steps: int = 0) -> None:
        self.value = value
        self._good_steps = good_steps

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow may be the scale's fault."""
        return self.value > LEAST

    def shrink(self) -> None:
        """The gradients overflowed."""
        self.value, self._good_steps = max(LEAST, self.value / 2), 0

    def grow(self) -> None:
        """An update was made at this scale."""
        self._good_steps += 1
        if self._good_steps >= GROWTH_INTERVAL_STEPS:
            self.value, self._good_steps = min(LARGEST, self.value * 2), 0

    def values(self) -> dict[str, Any]:
        """What has to be saved, as JSON."""
        return {"value": self.value, "good_steps": self._good_steps}
