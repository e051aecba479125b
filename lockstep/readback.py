"""Reading numbers from a device: whether the host waits for them."""

from __future__ import annotations

import torch


def reading_waits(device: torch.device) -> bool:
    """Whether the host waits to read a number from this device: always, but on a CPU.

    What may wait asks here, as `readback.reading_waits(device)`, and nowhere else: a test that says yes for the CPU
    runs what an accelerator would.
    """
    return device.type != "cpu"
