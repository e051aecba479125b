"""The pulse of a worker, its heartbeat: where it is in the run, and whether it was asked to stop.

Where a launcher has started the process, a thread sends it the pulse and receives its request to stop. A beat proves
that the process runs; a beat that says something new, that the run advances.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, get_args

from lockstep.spans import span
from lockstep.workers.channel import Channel, Message
from lockstep.workers.limits import BEAT_SECONDS
from lockstep.workers.membership import Generations
from lockstep.workers.network import Probe

Phase = Literal[
    "start", "script", "data", "first step", "compute", "exchange", "loop body", "save", "evaluate", "regroup", "end"
]


@dataclass(eq=False, kw_only=True, slots=True)
class Pulse:
    """What the training loop reports, and what it was asked for and given; nobody need be listening.

    The main thread writes what it reports. The thread that beats, signals and the command that starts the worker write
    the rest.
    """

    # What the loop reports.
    step: int = 0
    phase: Phase = "start"
    count: int = 0
    """Grows at every call of `at`: at the same step and phase, the run may still advance."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(get_args(Phase), 0.0))
    """Seconds spent so far in each phase, but for the present stay."""
    _since: float = field(default_factory=perf_counter, init=False)
    on_phase: Callable[[Phase, float, float, int], None] | None = None
    """Called during a trace with each phase that ends, when it began and ended (`time.perf_counter`), and its step."""
    waits: bool = False
    """The worker waits for all others to make the same call."""
    stopped: bool = False
    """All workers have ended their loops after the same step, as one of them was asked to."""
    ended: bool = False
    """The run has reached its end and is saved: a stop that is asked for now does not interrupt it."""
    saves_at_stop: bool = False
    """A run is under way that writes a checkpoint when it is stopped; of a script's own loop nobody knows it."""
    hang_seconds: float | None = None
    """How long a worker may stay at one place, as the recipe has it that this one runs; see `limits.Limits`."""

    # What the worker was asked for and given.
    stop_requested: str | None = None
    """The name of the signal ("SIGTERM") that asked for the run to end after this step."""
    launched: bool = False
    """A launcher listens, and it handles Ctrl-C."""
    named_threads: int | None = None
    """Torch's threads in each worker, where the command that started it has named their number."""
    shared_threads: int | None = None
    """Threads that the launcher gave this worker as its share of the cores, where nobody had named a number."""
    earlier_seconds: float = 0.0
    """How long others had been at work in this run before the launcher started its workers again."""
    generations: Generations | None = None
    """What the launcher says of who takes part, where workers go on when others are lost."""

    @property
    def regroup_requested(self) -> bool:
        """Whether newcomers wait for `rank.regroup()`, after a step that all workers agree on."""
        return self.generations is not None and self.generations.regroup_requested

    def at(self, step: int, phase: Phase) -> None:
        """Report where the loop is; costs half a microsecond."""
        now = perf_counter()
        self.seconds[self.phase] += now - self._since
        if self.on_phase is not None:
            self.on_phase(self.phase, self._since, now, self.step)
        self._since = now
        self.step = step
        self.phase = phase
        self.count += 1

    @contextmanager
    def during(self, step: int, phase: Phase) -> Iterator[None]:
        """Enter a phase for the block. An error leaves it as it is: the launcher says in which phase it came."""
        before = self.phase
        self.at(step, phase)
        yield
        self.at(step, before)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Report in the block that this worker waits for all others."""
        self.waits = True
        try:
            with span("wait for other workers"):
                yield
        finally:
            self.waits = False


_launched: Pulse | None = None


def of_this_process() -> Pulse:
    """Return the pulse that the launcher listens to, else one that nobody does."""
    return _launched or Pulse()


def start_beating(channel: Channel, pulse: Pulse) -> None:
    """Send this process's pulse over the channel to its launcher; the process ends when the other end goes away."""
    global _launched
    _launched = pulse
    threading.Thread(target=_keep_beating, args=(pulse, channel), name="lockstep-pulse", daemon=True).start()


def beat(pulse: Pulse, channel: Channel) -> None:
    """Send the pulse as it is now."""
    place = {"step": pulse.step, "phase": pulse.phase, "count": pulse.count, "seconds": pulse.seconds}
    waits = pulse.waits or pulse.phase == "exchange"
    asks = {"stop": pulse.stop_requested, "hang_seconds": pulse.hang_seconds}
    channel.send({**place, "waits": waits, "ended": pulse.ended, "saves_at_stop": pulse.saves_at_stop, **asks})


def beats(pulse: Pulse, channel: Channel) -> Iterator[list[Message]]:
    """Send the pulse until the other end is gone; after each beat yield what that end has said.

    Its questions are answered before: where this worker is, by stacks, and which hosts it reaches.
    """
    probe = Probe(channel.send)
    while not channel.ended:
        beat(pulse, channel)
        messages = channel.receive(BEAT_SECONDS)
        for message in messages:
            if "show" in message:
                channel.send({"stacks": stacks()})
            elif "trial" in message:
                probe.obey(message)
        yield messages


def _keep_beating(pulse: Pulse, channel: Channel) -> None:
    for messages in beats(pulse, channel):
        for message in messages:
            if "stop" in message:
                pulse.stop_requested = message["stop"]
            elif "lost" in message and pulse.generations is not None:
                pulse.generations.receive(message)
    os._exit(1)


def stacks() -> str:
    """The stacks of this process's threads, the main thread last, without this one."""
    frames = sys._current_frames()
    threads = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    threads.sort(key=lambda thread: thread is threading.main_thread())
    stacks = [(thread.name, frames[thread.ident]) for thread in threads if thread.ident in frames]
    return "".join(f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in stacks)
