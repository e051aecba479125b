"""Names and sizes in messages and tables: long lists shortened, the closest names and paths there are, lines of CSV."""

from __future__ import annotations

import csv
import difflib
import os
from collections.abc import Iterable, Sequence
from io import StringIO
from itertools import islice
from pathlib import Path

_MOST_COMPARED = 1000
_UNITS = ("bytes", "kB", "MB", "GB", "TB")
_RUNS = Path("runs")
"""Where `lockstep train` keeps the folders of runs that are given no other."""


def shorten(names: Sequence[str], most: int = 5, *, separator: str = ", ") -> str:
    """Join the first `most` names, and say how many more there are: `a, b and 1,234 more`."""
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def format_size(num_bytes: int) -> str:
    """Format a number of bytes: "812 bytes", "12.3 MB"."""
    power = min((len(str(num_bytes)) - 1) // 3, len(_UNITS) - 1)
    return f"{num_bytes / 1000**power:.{min(power, 1)}f} {_UNITS[power]}"


def did_you_mean(word: object, words: Iterable[str]) -> str:
    """Suggest the closest of the words: `did you mean "cosine"?`; an empty text where none is close."""
    close = difflib.get_close_matches(str(word), list(words), n=1)
    return f'did you mean "{close[0]}"?' if close else ""


def hint_for_path(path: object) -> str:
    """Say what a path that leads nowhere may mean: another path, else which folder it is read from."""
    if "://" in str(path):
        return "check the address: the bucket, and the path in it"
    path = Path(str(path))
    if meant := closest_path(path):
        return f"did you mean {meant}?"
    return "check the path" if path.is_absolute() else f"check the path; it is read from {Path.cwd()}"


def closest_path(path: Path) -> Path | None:
    """Return what a path that leads nowhere may mean: the run of that name, or the closest name beside it."""
    if (run := _RUNS / path).exists():
        return run
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in islice(entries, _MOST_COMPARED)]
    except OSError:
        names = []
    close = difflib.get_close_matches(path.name, names, n=1)
    return path.with_name(close[0]) if close else None


def what_is_there(path: Path) -> str:
    """Say what a path leads to: a file, a folder with some of its names, or nothing."""
    if not path.is_dir():
        return "a file" if path.exists() else "no such file or folder"
    try:
        inside = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        return f"a folder that cannot be read ({error.strerror})"
    return f"a folder with {shorten(inside)}" if inside else "an empty folder"


def csv_line(cells: Sequence[object]) -> str:
    """Write a line of CSV, in which cells with commas, quotes or line breaks are quoted."""
    # csv quotes a cell for the line breaks that end its own lines, and no others: so both end them here.
    file = StringIO()
    csv.writer(file, lineterminator="\r\n").writerow(cells)
    return file.getvalue().removesuffix("\r\n") + "\n"
