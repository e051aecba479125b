"""How messages about recipes name places, values and choices."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple


class Place(NamedTuple):
    """Where a value stands: `optimizer.lr in recipe.toml`; the recipe as a whole where the path is empty."""

    source: str
    path: str = ""

    def at(self, name: object) -> Place:
        """The place of a field of this table, or of an item of this list."""
        return Place(self.source, f"{self.path}.{name}" if self.path else str(name))

    @property
    def name(self) -> str:
        """The last word of the path."""
        return self.path.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.path} in {self.source}" if self.path else self.source


def shown(value: object) -> str:
    """A plain value, much as TOML has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {shown(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(shown(item) for item in value) + "]"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def listed(words: Iterable[str], between: str = ", ") -> str:
    """Words in quotes, one after the other."""
    return between.join(f'"{word}"' for word in words)


def suggestion(word: object, words: Iterable[str]) -> str:
    """`did you mean "cosine"?`, or nothing where no word is close."""
    close = difflib.get_close_matches(str(word), list(words), n=1)
    return f'did you mean "{close[0]}"?' if close else ""
