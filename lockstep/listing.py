"""Names in messages: long lists shortened, and the closest of the possible names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def shorten(names: Sequence[str], most: int = 5, *, separator: str = ", ") -> str:
    """Join the first `most` names, and say how many more there are: `a, b and 1,234 more`."""
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def did_you_mean(word: object, words: Iterable[str]) -> str:
    """Suggest the closest of the words: `did you mean "cosine"?`; an empty text where none is close."""
    close = difflib.get_close_matches(str(word), list(words), n=1)
    return f'did you mean "{close[0]}"?' if close else ""
