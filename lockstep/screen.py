r"""Text on its way to a screen or a log.

A name that comes from a file may hold any character: one that moves the cursor, a line break that forges a line, a mark
that turns the direction of writing. So what is not printable is escaped as `repr` does it: `\x1b`, `\n`, `\u202e`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from pathlib import PurePath


def one_line(text: object) -> str:
    """The text with each character escaped that is not printable, line breaks and tabs too; twice is as once."""
    line = str(text)
    if line.isprintable():
        return line
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in line)


class Lines(str):
    """Text that may have several lines; within each, what is not printable is escaped."""

    __slots__ = ()

    def __new__(cls, text: object) -> Lines:
        """Escape each line of the text."""
        return super().__new__(cls, "\n".join(map(one_line, str(text).split("\n"))))


def escape_arguments(record: logging.LogRecord) -> bool:
    """A filter of the logger `lockstep`: each text or path that fills in a message stays on its line, but for `Lines`.

    So it is for the handlers of a script, too, and where there is none.
    """
    if isinstance(record.args, tuple):
        record.args = tuple(
            one_line(value) if isinstance(value, str | PurePath) and not isinstance(value, Lines) else value
            for value in record.args
        )
    return True


def write_lines(lines: Iterable[str]) -> None:
    """Write lines to the standard output, each of them as one."""
    sys.stdout.write("".join(f"{one_line(line)}\n" for line in lines))


def write_json(value: object) -> None:
    """Write a value as JSON to the standard output, in printable characters of ASCII alone."""
    text = json.dumps(value, indent=1, allow_nan=False)
    sys.stdout.write(text.replace("\x7f", "\\u007f") + "\n")
