"""The names that the tensors of a file get on the way to a model, and prefixes with which more would be found there."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.errors import InputError
from lockstep.listing import shorten
from lockstep.weights.names import Place, Rename, aligned, renamed
from lockstep.weights.source import WeightSource
from lockstep.weights.warm_start import WarmStart


class Pair(NamedTuple):
    """A tensor of the file, and a place in the model that it would go to."""

    tensor: str
    variable: str
    """What the tensor holds, or holds the average of."""
    place: Place
    target: str
    """The parameter of that name; of a tied one that has several, the first."""

    @property
    def names(self) -> tuple[str, str, str]:
        """By which patterns choose it."""
        return self.tensor, self.variable, self.place.name

    @property
    def is_average(self) -> bool:
        """Whether the tensor is the moving average of the variable."""
        return self.tensor != self.variable


def pairs_of(
    source: WeightSource, variables: Mapping[str, str], firsts: Mapping[str, str], mapping: WarmStart
) -> list[Pair]:
    """Every tensor that may be loaded with every name that it gets.

    Raises:
        InputError: the prefix is on none of the names, or a rename or the name map matches none.
    """
    if mapping.strip_prefix and not any(name.startswith(mapping.strip_prefix) for name in variables):
        raise _matches_nothing(source, f"strip_prefix={mapping.strip_prefix!r}", variables)
    stripped = {name: [Place(name.removeprefix(mapping.strip_prefix))] for name in variables}
    mapped, idle = renamed(stripped, mapping.resolved_map.renames)
    if mapping.name_map is not None and len(idle) == len(mapping.resolved_map.renames):
        called = f"name_map={mapping.name_map!r}" if isinstance(mapping.name_map, str) else "The name map"
        raise _matches_nothing(source, called, _names(stripped))
    places, idle = renamed(mapped, mapping.rename)
    if idle:
        raise _matches_nothing(source, ", ".join(map(repr, idle)), _names(mapped))
    prefixed = {
        name: [Place(mapping.add_prefix + place.name, place.layout) for place in each] for name, each in places.items()
    }
    return [
        Pair(tensor, variable, place, firsts.get(place.name, place.name))
        for variable, tensor in variables.items()
        for place in prefixed[variable]
    ]


def one_each(source: WeightSource, pairs: Sequence[Pair]) -> list[Pair]:
    """The pair of each place, which is one name of a parameter.

    Raises:
        InputError: a place has two.
    """
    taken: dict[str, Pair] = {}
    for pair in pairs:
        other = taken.setdefault(pair.place.name, pair)
        if other is not pair:
            raise InputError(
                f"Two tensors of {source.path} would go to {pair.place.name!r}.",
                given=f"{other.tensor!r} and {pair.tensor!r}",
                expected="one tensor for each parameter",
                hint="make a rename narrower, or skip one of the two by its name in the file",
            )
    return [*taken.values()]


def prefixes_that_find(
    missing: Sequence[str],
    found: Collection[str],
    unused: Sequence[Pair],
    mapping: WarmStart,
    pairs_by: Callable[[WarmStart], list[Pair]],
) -> str:
    """The prefixes to strip or add so that at least half of what is missing is found, and nothing else is lost.

    Args:
        missing: names in the model.
        found: other names in the model.
        unused: tensors of the file that have no place in the model.
        mapping: what was asked for.
        pairs_by: all pairs by another mapping.

    Returns:
        What to give, in the words of an error; "" if there are no such prefixes.
    """
    strip, add = aligned([pair.place.name.removeprefix(mapping.add_prefix) for pair in unused], missing)
    changes: dict[str, Any] = {}
    words = []
    if strip and (mapping.rename or mapping.name_map):  # which come after strip_prefix
        last = Rename(f"^{re.escape(strip)}", "")
        changes["rename"] = (*mapping.rename, last)
        words = [f"rename=({'..., ' if mapping.rename else ''}Rename({last.pattern!r}, ''),)"]
    elif strip:
        changes["strip_prefix"] = mapping.strip_prefix + strip
        words = [f"strip_prefix={changes['strip_prefix']!r}"]
    if add != mapping.add_prefix:
        changes["add_prefix"] = add
        words.append(f"add_prefix={add!r}")
    names = {pair.target for pair in pairs_by(replace(mapping, **changes))}
    num_found = len(names.intersection(missing))
    if 2 * num_found < len(missing) or not names.issuperset(found):
        return ""
    return f"give {' and '.join(words)}, with which {num_found:,} of the {len(missing):,} missing names are found"


def _names(places: Mapping[str, Sequence[Place]]) -> list[str]:
    return [place.name for each in places.values() for place in each]


def _matches_nothing(source: WeightSource, what: str, names: Iterable[str]) -> InputError:
    return InputError(
        f"{what} matches no tensor of {source.path}.",
        given=what,
        expected=f"what is found in one of {shorten(list(names)) or 'no names at all'}",
        hint="correct it, or leave it out",
    )
