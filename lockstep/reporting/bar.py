"""A live progress bar at the bottom of a terminal, and the measures below it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TextIO

from lockstep.screen import one_line
from lockstep.terminal import num_columns, width_of, wrapped

_SECONDS_BETWEEN_DRAWINGS = 0.2
_SHORTEST_BAR = 5
_BETWEEN = " | "
_CLEAR_BELOW = "\r\x1b[J"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Bar:
    """A bar below the cursor, which rests on an empty line above it.

    Lines that other processes write meanwhile, the launcher or another worker, thus appear above the bar, and the next
    drawing follows below. A killed run leaves the cursor visible.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn: list[str] = []
        self._next_drawing = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to draw again: at most five times a second."""
        return time.monotonic() >= self._next_drawing

    def draw(self, place: str, fraction: float | None, left: str, measures: Sequence[str]) -> None:
        """Show a moment of the work; a fraction (0 to 1) of None is work without an end, and has no bar.

        Where the terminal is too narrow, the measures take several lines and the bar itself is left out: numbers stay.
        """
        width = width_of(self._stream) or 80
        lines = [*self._head(one_line(place), fraction, left, width), *flowed(map(one_line, measures), width)]
        self._drawn = [line if "\x1b" in line else _cut(line, width) for line in lines]
        self._write(_CLEAR_BELOW + "\n" + "\n".join(self._drawn) + f"\r\x1b[{len(self._drawn)}A")
        self._next_drawing = time.monotonic() + _SECONDS_BETWEEN_DRAWINGS

    def close(self) -> None:
        """Leave the last moment on the screen, the cursor on the line below."""
        self._write("\n".join([_CLEAR_BELOW + self._drawn[0], *self._drawn[1:], ""]))

    def remove(self) -> None:
        """Leave nothing on the screen."""
        self._write(_CLEAR_BELOW)

    def _head(self, place: str, fraction: float | None, left: str, width: int) -> list[str]:
        if fraction is None:
            return flowed([place, left] if left else [place], width)
        share = f"{100 * fraction:.0f} %"
        end = f"{share} {left}".rstrip()
        room = width - num_columns(place) - num_columns(end) - 2
        if room < _SHORTEST_BAR:
            return flowed([place, share, left] if left else [place, share], width)
        return [f"{place} {self._bar(fraction, room)} {end}"]

    def _bar(self, fraction: float, width: int) -> str:
        # Only a terminal needs rich, 50 ms to import. It knows the colours and signs that the terminal has.
        from rich.console import Console
        from rich.progress_bar import ProgressBar

        console = Console(file=self._stream)
        with console.capture() as captured:
            console.print(ProgressBar(total=1.0, completed=fraction, width=width), end="")
        drawn = captured.get().rstrip("\n")
        return drawn + " " * (width - len(_COLOUR.sub("", drawn)))  # without colours rich draws what is done alone

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def flowed(parts: Sequence[str] | map[str], width: int) -> list[str]:
    """Join parts to as few lines of at most `width` columns as they need, in their order."""
    lines: list[str] = []
    for part in parts:
        if lines and num_columns(lines[-1] + _BETWEEN + part) <= width:
            lines[-1] += _BETWEEN + part
        else:
            lines += wrapped(part, width)
    return lines


def _cut(line: str, width: int) -> str:
    """Cut a line that is one long word: it must not take two lines of the terminal."""
    if num_columns(line) <= width:
        return line
    while num_columns(line) >= width:
        line = line[:-1]
    return f"{line}…"
