"""Terminals: whether a stream goes to one, how wide it is, lines that fit into it, and one that may be closed."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any, TextIO

_USUAL_WIDTH = 80
_LEAST_COLUMN = 20
_FIRST_COLUMN = re.compile(r"  [a-z]+: +(?=[^ ])| *[^ ]+(?: [^ ]+)*  +(?=[^ ])")
_WORD = re.compile(r"( *)([^ ]+)")


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream goes to a terminal that moves its cursor when told to."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def width_of(stream: TextIO) -> int | None:
    """Return the number of columns of a stream's terminal; None where it goes elsewhere: its lines are never broken.

    As in Python's `shutil.get_terminal_size`, the variable COLUMNS goes before what the terminal says.
    """
    if not is_terminal(stream):
        return None
    said = os.environ.get("COLUMNS", "")
    try:
        return (int(said) if said.isdecimal() else 0) or os.get_terminal_size(stream.fileno()).columns or _USUAL_WIDTH
    except OSError:
        return _USUAL_WIDTH


def num_columns(text: str) -> int:
    """Count the columns that printable text takes: Chinese signs take two, accents that stand alone none."""
    return len(text) if text.isascii() else sum(map(_columns_of_sign, text))


def _columns_of_sign(sign: str) -> int:
    if unicodedata.category(sign) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1


def wrapped(line: str, width: int | None) -> list[str]:
    """Break a line at its spaces into lines of at most `width` columns; a word that is longer stays whole.

    In a line of two columns, as in `  given:    3 workers` or wherever two spaces follow the first one, what is left
    stands below the second one, if there is room for it; else it is indented by four. A width of None breaks nothing.
    """
    if width is None or num_columns(line) <= width:
        return [line]
    column = _FIRST_COLUMN.match(line)
    second = num_columns(column[0]) if column else width
    indent = second if second + _LEAST_COLUMN <= width else len(line) - len(line.lstrip(" ")) + 4
    lines, length = [""], 0
    for gap, word in _WORD.findall(line):
        added = len(gap) + num_columns(word)
        if length and length + added > width:
            lines.append(" " * indent + word)
            length = indent + num_columns(word)
        else:
            lines[-1] += gap + word
            length += added
    return lines


def in_columns(rows: Sequence[Sequence[str]], *, to_the_right: bool = False) -> list[str]:
    """Lay out rows of as many cells each in columns, two spaces apart, cells to the left or to the right."""
    widths = [max(map(num_columns, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        gaps = [" " * (width - num_columns(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [gap + cell if to_the_right else cell + gap for cell, gap in zip(row, gaps, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


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
