"""A live progress bar of two lines at the bottom of a terminal."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


class _Terminal(Console):
    """Leaves the cursor visible: a killed run must not leave a terminal without one."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Bar:
    """What is written to `sys.stdout` and `sys.stderr` meanwhile appears above the bar, if it goes to a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._live = Live(
            console=_Terminal(file=stream),
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def draw(self, place: str, fraction: float | None, left: str, measures: str) -> None:
        """Show a moment of the run; a fraction (0 to 1) of None is a run without an end, and has no bar."""
        self._live.update(Group(_head(place, fraction, left), _line(measures)), refresh=True)

    def close(self) -> None:
        """Leave the last moment on the screen, the cursor on the line below, and the streams as they were."""
        self._live.stop()


def _head(place: str, fraction: float | None, left: str) -> RenderableType:
    if fraction is None:
        return _line(place)
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(place, ProgressBar(total=1.0, completed=fraction), f"{100 * fraction:.0f} % {left}".rstrip())
    return row


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")
