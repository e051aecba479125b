"""Ctrl-C and the signals of schedulers as a wish that the training loop sees, instead of an exception anywhere.

For commands, `ls.run` and workers of a launcher; `interrupts` is for the loops of a script.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lockstep.workers.pulse import Pulse

NOTICES = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name))
"""What a scheduler, or a terminal that is closed, sends to a run that is to end soon."""


def notices() -> list[signal.Signals]:
    """The notices that this process is to heed: not SIGHUP where whoever started it, nohup for one, has it ignored."""
    ignored = [number for number in NOTICES if signal.getsignal(number) is signal.SIG_IGN]
    return [number for number in NOTICES if number not in ignored or number.name != "SIGHUP"]


@contextmanager
def stop_on_signals(pulse: Pulse) -> Iterator[None]:
    """The first SIGINT or notice requests a stop after the current step; then SIGINT ends the process at once.

    A notice never does, however often it comes: what it would cost is the checkpoint. Does nothing where a launcher
    listens to the pulse: it decides for all its workers. To be entered in the main thread. The handlers from before are
    put back at the end.
    """
    if pulse.launched:
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *notices())}

    def handle(number: int, _: FrameType | None) -> None:
        # The next one must also reach a process that is deep in compiled code, where no handler of Python's runs.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        request_stop(pulse, owner, number)

    owner = os.getpid()
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pass_on_notices(pulse: Pulse) -> None:
    """Take notices, however often they come, as the wish that the whole run stops: for workers with a launcher.

    Not SIGHUP: the launcher gets it too, and knows whether it is to be ignored.
    """
    owner = os.getpid()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: request_stop(pulse, owner, number))


def request_stop(pulse: Pulse, owner: int, number: int) -> None:
    """Note in the pulse of process `owner` that a signal asks for a stop; the first one counts."""
    if os.getpid() == owner:
        pulse.stop_requested = pulse.stop_requested or signal.Signals(number).name
    elif number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A child forked by the owner, a loader process say, has inherited the handler without having asked for it.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
