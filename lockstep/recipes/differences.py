"""In what the recipe of a run and the one given to go on with it differ, and whether it matters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from lockstep.progress import Interval
from lockstep.recipes.recipe import Recipe

HARMLESS = (
    "name",
    "num_workers",
    "device",
    "end",
    "checkpoints",
    "data.folder",
    "watch",
    "evaluate.every",
    "evaluate.patience",
    "feed.num_processes",
    "feed.num_threads",
    "feed.prefetch",
    "feed.bad_budget",
)
"""Fields, or parts as a whole, that change nothing in what is trained: a resumed run may have others."""
_PLACES = ("data.train", "data.validation", "data.test")
"""One path for another may be the same data, moved. A resume compares the training data itself by its fingerprint."""


@dataclass(frozen=True)
class Difference:
    """A field in which two recipes differ, or a part, where the two are of different classes."""

    path: str
    saved: Any
    given: Any
    harmless: bool
    """A resumed run may differ in it without more ado."""

    def __str__(self) -> str:
        return f"{self.path}: saved {self.saved}, given {self.given}"


def differences(saved: Recipe, given: Recipe) -> list[Difference]:
    """Where the recipe of a run and the one given to go on with it differ, in the order of the fields.

    Towers that are not counted in `given` are those of `saved`: the first start has settled their number.
    """
    if given.num_towers is None:
        saved = replace(saved, num_towers=None)
    return list(_differences("", saved, given))


def _differences(path: str, saved: Any, given: Any) -> Iterator[Difference]:
    if saved == given:
        return
    if is_dataclass(saved) and type(saved) is type(given) and not isinstance(saved, Interval):
        for name in [each.name for each in fields(saved)]:
            inner = f"{path}.{name}" if path else name
            yield from _differences(inner, getattr(saved, name), getattr(given, name))
    elif isinstance(saved, tuple) and isinstance(given, tuple) and len(saved) == len(given):
        for index, (before, now) in enumerate(zip(saved, given, strict=True)):
            yield from _differences(f"{path}.{index}", before, now)
    else:
        moved = path in _PLACES and None not in (saved, given)
        harmless = moved or f"{path}.".startswith(tuple(f"{outer}." for outer in HARMLESS))
        yield Difference(path, saved, given, harmless)
