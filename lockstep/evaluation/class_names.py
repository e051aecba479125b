"""What classes are called where people read of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ClassNames = Sequence[str] | Mapping[int, str]
"""By label; it need not have them all."""


def class_name(names: ClassNames, label: int) -> str:
    """The name of a class, or its number where it has none."""
    known = names if isinstance(names, Mapping) else dict(enumerate(names))
    return known.get(label) or str(label)
