"""Names in messages and tables: long lists shortened, the closest of the possible names, lines of CSV."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterable, Sequence
from io import StringIO


def shorten(names: Sequence[str], most: int = 5, *, separator: str = ", ") -> str:
    """Join the first `most` names, and say how many more there are: `a, b and 1,234 more`."""
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def did_you_mean(word: object, words: Iterable[str]) -> str:
    """Suggest the closest of the words: `did you mean "cosine"?`; an empty text where none is close."""
    close = difflib.get_close_matches(str(word), list(words), n=1)
    return f'did you mean "{close[0]}"?' if close else ""


def csv_line(cells: Sequence[object]) -> str:
    """Write a line of CSV, in which cells with commas, quotes or line breaks are quoted."""
    # csv quotes a cell for the line breaks that end its own lines, and no others: so both end them here.
    file = StringIO()
    csv.writer(file, lineterminator="\r\n").writerow(cells)
    return file.getvalue().removesuffix("\r\n") + "\n"
