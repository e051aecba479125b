r"""Text on its way to the screen, and the log of the library.

A name from a file may hold any character: one that moves the cursor, a line break that forges a line, a mark that turns
the direction of writing. So characters that are not printable are escaped as by `repr`: `\x1b`, `\n`, `\u202e`.

On a terminal lines break at words; elsewhere a record is one line, however long.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import PurePath
from typing import Any, TextIO

from lockstep.terminal import is_terminal, width_of, wrapped


def one_line(text: object) -> str:
    """Escape every character that is not printable, line breaks and tabs too. Escaping twice changes no more."""
    line = str(text)
    if line.isprintable():
        return line
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in line)


class Lines(str):
    """Text of several lines, each of them escaped; `escape_arguments` leaves it as it is."""

    __slots__ = ()

    def __new__(cls, text: object) -> Lines:
        """Escape each line of the text."""
        return super().__new__(cls, "\n".join(map(one_line, str(text).split("\n"))))


def escape_arguments(record: logging.LogRecord) -> bool:
    """Filter of the logger `lockstep`: escape texts and paths that fill in a message, except `Lines`.

    A filter of the logger also covers the handlers of a script, and the case without any.
    """
    if isinstance(record.args, tuple):
        record.args = tuple(
            one_line(value) if isinstance(value, str | PurePath) and not isinstance(value, Lines) else value
            for value in record.args
        )
    return True


class LineHandler(logging.Handler):
    """Writes records as plain sentences: `[worker 1] warning: ...`, the level where it is not INFO.

    Each record is written with a single call, so that the lines of several workers never mix. On a terminal everything
    below the cursor is cleared first: that is where any process draws its progress bar, and draws it again.

    A stream of None is `sys.stderr` at the time of writing. The worker's name stands before every line; the chief has
    none.
    """

    def __init__(self, stream: TextIO | None = None, worker_name: str | None = None) -> None:
        super().__init__()
        self._given_stream = stream
        self._prefix = f"[{worker_name}] " if worker_name else ""

    @property
    def _stream(self) -> TextIO:
        return self._given_stream or sys.stderr

    def format(self, record: logging.LogRecord) -> str:
        """One record as text; a traceback follows on lines of its own."""
        kind = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        columns = width_of(self._stream)
        width = columns and columns - len(self._prefix)
        lines = Lines(kind + super().format(record)).split("\n")
        return "\n".join(self._prefix + part for line in lines for part in wrapped(line, width))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; an error goes to `logging`'s own handling and never to the caller."""
        try:
            stream = self._stream
            stream.write(("\x1b[J" if is_terminal(stream) else "") + self.format(record) + "\n")
            stream.flush()
        except Exception:
            self.handleError(record)


class Log(logging.LoggerAdapter[logging.Logger]):
    """The logger `lockstep`, whose lines are on the screen where nobody has configured logging.

    In a script that has configured nothing, Python shows the warnings of any library. This shows the chief's few lines
    as well (resumed at, nothing to do, what patterns matched), and of other workers the warnings. Nothing is installed:
    as soon as the logger or one above it has a handler, that one gets the records, and nobody else does.
    `logging.getLogger("lockstep").setLevel(...)` sets in either case what is seen.
    """

    _is_known = False
    _known_name: str | None = None

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        """Log a message; all other methods call this one.

        With `chief_only`, other workers log nothing: each of them would say the same, as of files that all read.
        """
        if options.pop("chief_only", False) and self._worker_name:
            return
        if self.logger.hasHandlers():
            self.logger.log(level, msg, *args, stacklevel=options.pop("stacklevel", 1) + 1, **options)
        elif level >= self._least_level() and level > self.logger.manager.disable and not self.logger.disabled:
            record = self.logger.makeRecord(self.logger.name, level, __file__, 0, msg, args, None)
            if self.logger.filter(record):
                self._last_resort.handle(record)

    def speak_as(self, worker_name: str | None) -> None:
        """Show lines as those of this worker from now on, or as the chief's (None): after others were lost or joined.

        What a script has configured stays as it is.
        """
        self._is_known, self._known_name = True, worker_name
        self.__dict__.pop("_last_resort", None)
        if any(isinstance(handler, LineHandler) for handler in self.logger.handlers):
            show_log(worker_name, level=logging.WARNING if worker_name else logging.INFO)

    @property
    def _worker_name(self) -> str | None:
        """The name below which lines are shown; None on the chief."""
        if self._is_known:
            return self._known_name
        return f"worker {_rank()}" if _rank() else None

    @cached_property
    def _last_resort(self) -> LineHandler:
        """Made with the first line: only then is the worker's rank known."""
        return LineHandler(worker_name=self._worker_name)

    def _least_level(self) -> int:
        """The level that was asked for; where the root logger has Python's default, INFO on the chief."""
        level = self.logger.getEffectiveLevel()
        is_default = level == logging.WARNING and not self.logger.level
        return logging.INFO if is_default and not self._worker_name else level


QUIET = "LOCKSTEP_QUIET"
"""The variable of the environment by which a command and its workers tell warnings and errors alone."""


def is_quiet() -> bool:
    """Whether the command has been asked to tell warnings and errors alone, and to show no progress."""
    return bool(os.environ.get(QUIET))


def _rank() -> int:
    """The rank that a launcher has given this process; 0 for a script that is started by itself."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


_OLD_NAMES = "LOCKSTEP_OLD_NAMES"
"""The variable of the environment that holds the old names, a line each, whose new ones this command has logged."""

log = Log(logging.getLogger("lockstep"), {})
"""The log of the library. Names from files that it logs stay on their line, whatever handler shows them."""
log.logger.addFilter(escape_arguments)


def log_new_name(old: str, new: str) -> None:
    """Warn that what a file or a command line names, which is still understood, has another name now.

    It is said once: the processes that a command starts after this read the same files and flags again.
    """
    said = os.environ.get(_OLD_NAMES, "").split("\n")
    if old not in said:
        os.environ[_OLD_NAMES] = "\n".join([*said, old])
        log.warning("%s is called %s now", old, new, chief_only=True)


@contextmanager
def errors_alone() -> Iterator[None]:
    """Log errors alone in the block, as where data or parts are made once more, which remark what was said before."""
    before = log.logger.level
    log.logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.logger.setLevel(before)


def show_log(worker_name: str | None = None, stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Show the log on a stream, whatever other libraries do; to call it again replaces what the first call set.

    Commands call this, never the library: a script decides on its own where log lines go.
    """
    for handler in [handler for handler in log.logger.handlers if isinstance(handler, LineHandler)]:
        log.logger.removeHandler(handler)
    log.logger.addHandler(LineHandler(stream, worker_name))
    log.logger.setLevel(max(level, logging.WARNING) if is_quiet() else level)


def write_lines(lines: Iterable[str]) -> None:
    """Write lines to the standard output, each escaped."""
    width = width_of(sys.stdout)
    sys.stdout.write("".join(f"{part}\n" for line in lines for part in wrapped(one_line(line), width)))


def write_json(value: Mapping[str, Any], *, in_one_line: bool = False) -> None:
    """Write an object as JSON to the standard output, in printable ASCII; in one line where others follow it."""
    text = json.dumps(value, indent=None if in_one_line else 1, allow_nan=False)
    sys.stdout.write(text.replace("\x7f", "\\u007f") + "\n")
