"""Lists of names in messages: long ones are cut."""

from __future__ import annotations

from collections.abc import Sequence


def shorten(names: Sequence[str], most: int = 5) -> str:
    """The first few names, and how many more there are: `a, b and 3 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
