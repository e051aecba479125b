"""Reading numbers from a device: whether the host waits for them, and a copy of them that is read when it has come.

An accelerator works through what was enqueued; the host runs ahead of it, and waits only where it reads a result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_PATIENCE_SECONDS, _POLL_SECONDS = 0.1, 0.02


def reading_waits(device: torch.device) -> bool:
    """Whether the host waits to read a number from this device: always, but on a CPU.

    What may wait asks here, as `readback.reading_waits(device)`, and nowhere else: a test that says yes for the CPU
    runs what an accelerator would.
    """
    return device.type != "cpu"


def numbers_on(device: torch.device, values: Sequence[float]) -> list[float] | Tensor:
    """Numbers of the host, to be computed with beside those of a device: sent there, without a wait, where it waits."""
    if not reading_waits(device):
        return list(values)
    numbers = torch.tensor(values, dtype=torch.float64)
    # Out of memory that is not pinned, a copy waits for all that the device has to do before.
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


class Readback:
    """A copy of some numbers of a device, on its way to the host.

    Args:
        numbers: float64, one-dimensional; they may change once this is made.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.Event | None = None
        if numbers.device.type == "cpu":
            self._numbers = numbers.clone()
            return
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._event = torch.Event(numbers.device)
        self._event.record()

    def read(self, poll: Callable[[], None] | None = None) -> list[float]:
        """Wait until the copy has come, and return it.

        Args:
            poll: called every 20 ms of a long wait, and at its end: what has ended it may have left other numbers
                than were to come. What it raises comes out of here.
        """
        if self._event is not None:
            if poll is None:
                self._event.synchronize()
            else:
                self._wait(self._event, poll)
        values: list[float] = self._numbers.tolist()
        return values

    @staticmethod
    def _wait(event: torch.Event, poll: Callable[[], None]) -> None:
        due = time.monotonic() + _PATIENCE_SECONDS
        while not event.query():
            if time.monotonic() > due:
                poll()
                due = time.monotonic() + _POLL_SECONDS
            time.sleep(2e-5)
        poll()
