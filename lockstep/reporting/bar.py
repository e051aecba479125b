"""A live progress bar of two lines at the bottom of a terminal."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.screen import one_line

_CLEAR_BELOW = "\r\x1b[J"


class Bar:
    """A bar below the cursor, which rests on an empty line above it.

    Lines that other processes write meanwhile, the launcher or another worker, thus appear above the bar, and the next
    drawing follows below. A killed run leaves the cursor visible.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream)
        self._drawn = ""

    def draw(self, place: str, fraction: float | None, left: str, measures: str) -> None:
        """Show a moment of the run; a fraction (0 to 1) of None is a run without an end, and has no bar."""
        with self._console.capture() as captured:
            self._console.print(Group(_head(place, fraction, left), _line(measures)), end="")
        self._drawn = captured.get().rstrip("\n")
        num_lines = self._drawn.count("\n") + 1
        self._write(f"{_CLEAR_BELOW}\n{self._drawn}\r\x1b[{num_lines}A")

    def close(self) -> None:
        """Leave the last moment on the screen, the cursor on the line below."""
        self._write(f"{_CLEAR_BELOW}{self._drawn}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _head(place: str, fraction: float | None, left: str) -> RenderableType:
    if fraction is None:
        return _line(place)
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(_line(place), ProgressBar(total=1.0, completed=fraction), f"{100 * fraction:.0f} % {left}".rstrip())
    return row


def _line(text: str) -> Text:
    return Text(one_line(text), no_wrap=True, overflow="ellipsis")
