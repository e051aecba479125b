"""Lists of names in messages, long ones shortened."""

from __future__ import annotations

from collections.abc import Sequence


def shorten(names: Sequence[str], most: int = 5, *, separator: str = ", ") -> str:
    """Join the first `most` names, and say how many more there are: `a, b and 1,234 more`."""
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more:,} more" if more > 0 else "")
