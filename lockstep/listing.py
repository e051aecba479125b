"""Lists of names in messages: long ones are cut, and of possible names the closest is suggested."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def shorten(names: Sequence[str], most: int = 5) -> str:
    """The first few names, and how many more there are: `a, b and 3 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def did_you_mean(word: object, words: Iterable[str]) -> str:
    """Suggest the closest of the words: `did you mean "cosine"?`; an empty text where none is close."""
    close = difflib.get_close_matches(str(word), list(words), n=1)
    return f'did you mean "{close[0]}"?' if close else ""
