"""Progress of work other than training: a live bar on a terminal, else a line of the log every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from lockstep.reporting.bar import Bar
from lockstep.reporting.console import format_duration, format_rate
from lockstep.screen import log
from lockstep.terminal import is_terminal
from lockstep.types import ProgressFunction

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def show_progress(title: str) -> Iterator[ProgressFunction]:
    """Yield a function that shows, after a title, how many items of how many are done, at which rate."""
    display = _Display(title, sys.stderr)
    try:
        yield display.show
    finally:
        display.close()


@contextmanager
def show_elapsed(title: str) -> Iterator[None]:
    """Show, after a title, how long the block has taken so far: for work whose length nobody knows."""
    display, over = _Display(title, sys.stderr), threading.Event()

    def show_until_over() -> None:
        while not over.wait(display.seconds_between):
            display.show_elapsed()

    thread = threading.Thread(target=show_until_over, name="elapsed", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        display.close()


class _Display:
    """Work under way, on the screen; when it is over, its bar is removed: what it came to says whoever did it."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title = title
        self._bar = Bar(stream) if is_terminal(stream) else None
        self._began = time.monotonic()
        self._first: tuple[int, float] | None = None
        self._next_line = self._began + _SECONDS_BETWEEN_LINES

    @property
    def seconds_between(self) -> float:
        """How often the time is shown where nothing is counted."""
        return 1.0 if self._bar else _SECONDS_BETWEEN_LINES

    def show(self, done: int, total: int) -> None:
        """Show how many are done, if it is time to."""
        now = time.monotonic()
        # The pace is that of this start alone.
        self._first = self._first or (done, now)
        if not (self._bar.is_due if self._bar else now >= self._next_line):
            return
        num_since, seconds = done - self._first[0], now - self._first[1]
        pace = num_since / seconds if seconds else 0.0
        place, rate = f"{self._title}: {done} of {total}", f"{format_rate(pace)}/s"
        left = f"{format_duration((total - done) / pace)} left" if pace else ""
        if self._bar:
            self._bar.draw(place, done / total if total else 1.0, left, [rate] if pace else [])
        else:
            log.info("%s", " | ".join(part for part in (place, rate, left) if part))
            self._next_line = now + _SECONDS_BETWEEN_LINES

    def show_elapsed(self) -> None:
        """Show how long it has taken."""
        place = f"{self._title}: {format_duration(time.monotonic() - self._began)}"
        if self._bar:
            self._bar.draw(place, None, "", [])
        else:
            log.info("%s", place)

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar:
            self._bar.remove()
