"""The pulse of a worker: where it is in the run, and whether it was asked to stop.

Where a launcher started the process, a thread sends the pulse to it and brings back its request to stop. That a beat
comes proves that the process runs; that it tells something new, that the run advances.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from lockstep.workers.channel import Channel

Phase = Literal["start", "script", "data", "first step", "compute", "exchange", "loop body", "save", "evaluate", "end"]

BEAT_SECONDS = 0.1


class Pulse:
    """What the training loop tells about itself, and what it is told; nobody need be listening."""

    __slots__ = ("count", "ended", "launched", "phase", "step", "stop_requested", "waits")

    def __init__(self, *, launched: bool = False) -> None:
        self.step = 0
        self.phase: Phase = "start"
        self.count = 0
        """Grows at every call of `at`: at the same step and phase, the run may still advance."""
        self.waits = False
        """It waits for all other workers to make the same call."""
        self.stop_requested: str | None = None
        """The name of the signal ("SIGTERM") once somebody wants the run to end after this step."""
        self.ended = False
        """The run has reached its end, and all of it is saved: whoever asks for a stop now does not interrupt it."""
        self.launched = launched
        """A launcher listens, and is the one that handles Ctrl-C."""

    def at(self, step: int, phase: Phase) -> None:
        """Tell where the loop is; costs three assignments."""
        self.step = step
        self.phase = phase
        self.count += 1

    @contextmanager
    def during(self, step: int, phase: Phase) -> Iterator[None]:
        """Be in another phase for a while. An error leaves it as it is: the launcher says in which phase it came."""
        before = self.phase
        self.at(step, phase)
        yield
        self.at(step, before)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for all other workers."""
        self.waits = True
        try:
            yield
        finally:
            self.waits = False


_launched: Pulse | None = None


def of_this_process() -> Pulse:
    """The pulse that the launcher listens to, or else one that nobody does."""
    return _launched or Pulse()


def start_beating(channel: Channel) -> Pulse:
    """Send this process's pulse over the channel from now on. When the other end goes away, so does this process."""
    global _launched
    _launched = Pulse(launched=True)
    threading.Thread(target=_keep_beating, args=(_launched, channel), name="lockstep-pulse", daemon=True).start()
    return _launched


def beat(pulse: Pulse, channel: Channel) -> None:
    """Send the pulse as it is now."""
    place = {"step": pulse.step, "phase": pulse.phase, "count": pulse.count}
    waits = pulse.waits or pulse.phase == "exchange"
    channel.send({**place, "waits": waits, "stop": pulse.stop_requested, "ended": pulse.ended})


def _keep_beating(pulse: Pulse, channel: Channel) -> None:
    while True:
        beat(pulse, channel)
        for message in channel.receive(BEAT_SECONDS):
            if "stop" in message:
                pulse.stop_requested = message["stop"]
            else:
                channel.send({"stacks": _stacks()})
        if channel.ended:
            os._exit(1)


def _stacks() -> str:
    """Where the threads of this process are, the main thread last; not this one, which answers for them."""
    frames = sys._current_frames()
    threads = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    threads.sort(key=lambda thread: thread is threading.main_thread())
    stacks = [(thread.name, frames[thread.ident]) for thread in threads if thread.ident in frames]
    return "".join(f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in stacks)
