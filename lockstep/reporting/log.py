"""The logger `lockstep` on the screen: plain sentences, after the worker's name."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

from lockstep.screen import Lines, log


class LineFormatter(logging.Formatter):
    """The message alone, with its level if above INFO, and the worker's name before every line."""

    def __init__(self, worker_name: str | None = None) -> None:
        super().__init__("%(message)s")
        self._prefix = f"[{worker_name}] " if worker_name else ""

    def format(self, record: logging.LogRecord) -> str:
        """One record as text: `[worker 1] warning: ...`; a traceback follows on lines of its own."""
        kind = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return "\n".join(self._prefix + line for line in Lines(kind + super().format(record)).split("\n"))


class LineHandler(logging.Handler):
    """Writes each record with a single call, so that the lines of several workers never mix.

    A stream of None is `sys.stderr` at the time of writing. On a terminal everything below the cursor is cleared
    first: that is where any process draws its progress bar, and draws it again.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; an error goes to `logging`'s own handling and never to the caller."""
        try:
            stream = self._stream or sys.stderr
            stream.write(("\x1b[J" if is_terminal(stream) else "") + self.format(record) + "\n")
            stream.flush()
        except Exception:
            self.handleError(record)


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream goes to a terminal that moves its cursor when told to."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def configure(worker_name: str | None = None, stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Show the lines of the logger `lockstep` on a stream; to call it again replaces what the first call set.

    The command line calls this, never the library: a script decides on its own where log lines go.
    `worker_name` is None for the chief, whose lines stand alone.
    """
    for handler in [handler for handler in log.handlers if isinstance(handler, LineHandler)]:
        log.removeHandler(handler)
    handler = LineHandler(stream)
    handler.setFormatter(LineFormatter(worker_name))
    log.addHandler(handler)
    log.setLevel(level)
