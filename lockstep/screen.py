r"""Text on its way to a screen or a log, and screens that may be closed.

A name from a file may hold any character: one that moves the cursor, a line break that forges a line, a mark that turns
the direction of writing. So characters that are not printable are escaped as by `repr`: `\x1b`, `\n`, `\u202e`.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any, TextIO


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


log = logging.getLogger("lockstep")
"""The logger of the library. Names from files that it logs stay on their line, whatever handler shows them."""
log.addFilter(escape_arguments)


def write_lines(lines: Iterable[str]) -> None:
    """Write lines to the standard output, each escaped."""
    sys.stdout.write("".join(f"{one_line(line)}\n" for line in lines))


def write_json(value: object) -> None:
    """Write a value as JSON to the standard output, in printable ASCII."""
    text = json.dumps(value, indent=1, allow_nan=False)
    sys.stdout.write(text.replace("\x7f", "\\u007f") + "\n")


class _Terminal(io.FileIO):
    """A terminal that accepts writes after it is closed, instead of raising."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(memoryview(data))


def outlive_terminal() -> None:
    """Make `sys.stdout` and `sys.stderr` accept writes though their terminal is closed: the run still saves."""
    while (nowhere := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # Open what was closed: a file that is opened later would else be taken for the screen.
    os.close(nowhere)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))
            continue
        if not stream.isatty():
            continue
        stream.flush()
        raw = _Terminal(descriptor, "w", closefd=False)
        lasting = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True
        )
        setattr(sys, name, lasting)
