"""Ctrl-C and preemption notices as requests that the training loop sees, instead of exceptions at any line.

`stop_on_signals` is for commands and `ls.run`, `pass_on_notices` for the workers of a launcher, and `stop_on_interrupt`
for the loops of a script. `uninterrupted` keeps a step from being cut in two.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGINT
from time import monotonic
from types import FrameType
from typing import Any

from lockstep.screen import log
from lockstep.workers.pulse import Pulse

try:  # the functions of `signal` call these, and make enums of all numbers: 3 us a call instead of 0.3
    from _signal import getsignal as _handler_of  # type: ignore[import-not-found]
    from _signal import signal as _set_handler
except ImportError:
    from signal import getsignal as _handler_of
    from signal import signal as _set_handler

NOTICES = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name))
"""The signals that a scheduler, or a terminal that is closed, sends to a run that is to end soon."""
BODY_SECONDS = 10
"""A loop body that has taken longer, in seconds, may never come to the next step: Ctrl-C raises at once there."""
_MAIN_THREAD = threading.main_thread().ident


def notices() -> list[signal.Signals]:
    """The notices that this process heeds: not SIGHUP where its parent, nohup for one, has it ignored."""
    ignored = [number for number in NOTICES if signal.getsignal(number) is signal.SIG_IGN]
    return [number for number in NOTICES if number not in ignored or number.name != "SIGHUP"]


@contextmanager
def stops_handled_by(handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle SIGINT and notices so in the block; the handlers from before are put back at the end."""
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, *notices())}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals(pulse: Pulse) -> Iterator[None]:
    """The first SIGINT or notice requests a stop after the current step; then SIGINT ends the process at once.

    A notice never ends it, however often it comes: that would cost the checkpoint. At a prompt, or in a notebook, the
    next SIGINT raises KeyboardInterrupt, and what is typed next is not meant: the request is forgotten at the end. Does
    nothing where a launcher listens to the pulse: it decides for all its workers. Enter it in the main thread.
    """
    if pulse.launched:
        yield
        return

    def handle(number: int, _: FrameType | None) -> None:
        # The next SIGINT must also end a process that is deep in compiled code, where no handler of Python's runs.
        signal.signal(signal.SIGINT, signal.default_int_handler if _is_at_prompt() else signal.SIG_DFL)
        request_stop(pulse, owner, number)

    owner = os.getpid()
    try:
        with stops_handled_by(handle):
            yield
    finally:
        if _is_at_prompt():
            pulse.stop_requested = None


def pass_on_notices(pulse: Pulse) -> None:
    """Take a notice to this worker of a launcher, however often it comes, as a request that the whole run stops.

    Not SIGHUP: the launcher gets it too, and knows whether it is to be ignored.
    """
    owner = os.getpid()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: request_stop(pulse, owner, number))


def request_stop(pulse: Pulse, owner: int, number: int) -> None:
    """Record in the pulse of process `owner` that a signal asks for a stop; the first signal counts."""
    if os.getpid() == owner:
        pulse.stop_requested = pulse.stop_requested or signal.Signals(number).name
    elif number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A child that the owner has forked, a loader process say, has inherited the handler unasked.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


@contextmanager
def stop_on_interrupt(pulse: Pulse) -> Iterator[None]:
    """Have the first SIGINT in a loop of a script request a stop after the current step; the next one raises as ever.

    In a loop body that has taken more than `BODY_SECONDS` the first one raises too: the generator of a loop that was
    broken off may still be alive, in a notebook for one, and no step will come.

    Does nothing where a launcher listens to the pulse, outside the main thread, and where the script has its own
    handler. Loops may overlap: the last one to end puts Python's handler back. The request outlives the loop, so that
    the script's next loop stops too; at a prompt it is forgotten.
    """
    if pulse.launched or not _is_main_thread() or not _interrupts.is_default():
        yield
        return
    _interrupts.begin_loop(pulse)
    try:
        yield
    finally:
        _interrupts.end_loop()


def enter_body() -> None:
    """Note that a loop hands over to its body."""
    _interrupts.body_began = monotonic()


def log_stop(pulse: Pulse, step: int) -> None:
    """Log that a loop ends at this step, if it does so because of Ctrl-C in a script."""
    if pulse.stop_requested == "SIGINT" and _handler_of(SIGINT) is _interrupts.handler:
        log.warning("stopped at step %d by Ctrl-C", step)


def _is_at_prompt() -> bool:
    """Whether this is Python's prompt, or the kernel of a notebook: what is typed next is not meant by a request."""
    return hasattr(sys, "ps1")


def _is_main_thread() -> bool:
    return threading.get_ident() == _MAIN_THREAD


class _Interrupts:
    """A handler of SIGINT in place of another one, which it calls, now or later."""

    def __init__(self) -> None:
        self.handler = self._handle  # a bound method is another object each time
        self.replaced: Callable[[int, FrameType | None], Any] = signal.default_int_handler
        self.waits = False
        """Signals are kept until an `uninterrupted` block has ended."""
        self.kept: list[FrameType | None] = []
        self.body_began = math.inf
        """When the body of the loop began, by `monotonic`; infinite within a step."""
        self._num_loops = 0
        self._pulse = Pulse()
        self._owner = os.getpid()

    def is_default(self) -> bool:
        """Whether Python itself handles Ctrl-C, or loops already under way do."""
        current = _handler_of(SIGINT)
        return current is signal.default_int_handler or (
            current is self.handler and self.replaced is signal.default_int_handler
        )

    def begin_loop(self, pulse: Pulse) -> None:
        """Take the first SIGINT from now on as a request."""
        self._num_loops += 1
        self.body_began = math.inf  # that of an earlier loop says nothing of this one
        self._pulse, self._owner = pulse, os.getpid()
        self.replaced = signal.default_int_handler
        _set_handler(SIGINT, self.handler)

    def end_loop(self) -> None:
        """Put Python's handler back with the last loop; one that ends in another thread cannot, and need not."""
        self._num_loops -= 1
        if self._num_loops:
            return
        if _is_at_prompt():
            self._pulse.stop_requested = None
        if _is_main_thread() and _handler_of(SIGINT) is self.handler:
            _set_handler(SIGINT, self.replaced)

    def pass_on(self, to: Callable[[int, FrameType | None], Any], frame: FrameType | None) -> None:
        """Handle a signal that the handler `to` would have handled."""
        is_first = self._num_loops and self._pulse.stop_requested is None
        is_left = self._pulse.phase != "data" and monotonic() - self.body_began > BODY_SECONDS
        if to is signal.default_int_handler and is_first and not is_left:
            log.warning("Ctrl-C: training stops after the next step; Ctrl-C again interrupts it at once")
            request_stop(self._pulse, self._owner, SIGINT)
        else:
            to(SIGINT, frame)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        if self.waits:
            self.kept.append(frame)
        else:
            self.pass_on(self.replaced, frame)


_interrupts = _Interrupts()


class uninterrupted:  # noqa: N801 (written as a class for its speed: steps enter it)
    """Hold SIGINT back in the block; at its end, the handler that would have handled it at once does.

    So a KeyboardInterrupt comes before the block or after it. Outside the main thread no handler runs, and the block
    does nothing. `interruptible` makes a hole in it for code that may take long.
    """

    __slots__ = ("_before", "_replaced")

    def __enter__(self) -> None:
        self._before: bool | None = None
        self._replaced: Any = None
        if not _is_main_thread():
            return
        self._before, _interrupts.waits = _interrupts.waits, True
        _interrupts.body_began = math.inf
        handler = _handler_of(SIGINT)
        if handler is _interrupts.handler or not callable(handler):
            return
        self._replaced, _interrupts.replaced = _interrupts.replaced, handler
        try:
            _set_handler(SIGINT, _interrupts.handler)
        except BaseException:  # a signal has come just before
            _interrupts.waits, _interrupts.replaced = self._before, self._replaced
            raise

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        handler = _interrupts.replaced
        try:
            if self._replaced is not None:
                if _handler_of(SIGINT) is _interrupts.handler:
                    _set_handler(SIGINT, handler)
                _interrupts.replaced = self._replaced
        finally:
            _interrupts.waits = self._before
            if not self._before:
                _interrupts.body_began = monotonic()
        if _interrupts.kept and not self._before:
            _deliver(handler)


class interruptible:  # noqa: N801
    """A part of an `uninterrupted` block that may be interrupted: it leaves nothing half done."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before: bool | None = None
        if _is_main_thread():
            self._before, _interrupts.waits = _interrupts.waits, False
            if _interrupts.kept:
                _deliver(_interrupts.replaced)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _interrupts.waits = self._before


def _deliver(to: Callable[[int, FrameType | None], Any]) -> None:
    frames, _interrupts.kept = _interrupts.kept, []
    for frame in frames:
        _interrupts.pass_on(to, frame)
