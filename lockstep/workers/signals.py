"""Ctrl-C and SIGTERM as a wish that the training loop sees, instead of an exception anywhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lockstep.workers.pulse import Pulse


@contextmanager
def stop_on_signals(pulse: Pulse) -> Iterator[None]:
    """The first SIGINT or SIGTERM requests a stop after the current step; a second one ends the process at once.

    Does nothing where a launcher listens to the pulse: it decides for all its workers. To be entered in the main
    thread. The handlers from before are put back at the end.
    """
    if pulse.launched:
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, _: FrameType | None) -> None:
        # The next one must also reach a process that is deep in compiled code, where no handler of Python's runs.
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        _request(pulse, owner, number)

    owner = os.getpid()
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pass_on_sigterm(pulse: Pulse) -> None:
    """Take SIGTERM, however often it comes, as the wish that the whole run stops: for workers with a launcher."""
    owner = os.getpid()
    signal.signal(signal.SIGTERM, lambda number, _: _request(pulse, owner, number))


def _request(pulse: Pulse, owner: int, number: int) -> None:
    if os.getpid() == owner:
        pulse.stop_requested = signal.Signals(number).name
        return
    # A child forked by the owner, a loader process say, has inherited the handler without having asked for it.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
