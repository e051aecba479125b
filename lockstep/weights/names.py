"""Names of tensors, renamed in order on the way from a file to a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from lockstep.checks import Checked, Hint, check_all
from lockstep.errors import InputError
from lockstep.weights.layouts import Layout, System

_EXAMPLE = r"""write Rename(r"^(.*)/weights$", r"\1.weight")"""


@dataclass(frozen=True)
class Rename(Checked):
    """Replace every match of a regular expression in a name."""

    pattern: Annotated[str, Hint(_EXAMPLE)]
    """A regular expression that is searched for in the name."""
    to: str | tuple[str, ...]
    r"""The replacement, with `\1` for what the first parentheses matched; with several, the tensor goes to them all."""
    layout: Annotated[Layout | None, Hint('write Layout("i o -> o i")')] = None
    """How the axes of these tensors change; None leaves that to the shapes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_all("to", self._ends, str, hint=_EXAMPLE)
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise self._unusable(str(error)) from error
        if not self.pattern or not self._ends:
            raise self._unusable("it has no pattern, or nothing to become")

    @property
    def _ends(self) -> tuple[str, ...]:
        return (self.to,) if isinstance(self.to, str) else self.to

    def matches(self, name: str) -> bool:
        """Whether the pattern is found in a name."""
        return re.search(self.pattern, name) is not None

    def ends(self, name: str) -> list[str]:
        """The new names of a name that matches."""
        try:
            return [re.sub(self.pattern, end, name) for end in self._ends]
        except (re.error, IndexError) as error:
            raise self._unusable(str(error)) from error

    def _unusable(self, why: str) -> InputError:
        return InputError(
            f"This renaming cannot be used: {why}.",
            given=f"Rename({self.pattern!r}, {self.to!r})",
            expected="a regular expression, and one name or more for what it matches",
            hint=_EXAMPLE,
        )


@dataclass(frozen=True)
class NameMap:
    """A map from the names of one trainer to ours."""

    renames: tuple[Rename, ...]
    """Replacements in the names, in this order."""
    system: System = "tensorflow"
    """The system whose layouts the tensors have where no rename says."""
    may_lack: tuple[str, ...] = ()
    """Patterns of parameters that such files need not hold; they keep the values they have."""
    may_be_cut: tuple[str, ...] = ()
    """Patterns of kernels that such files may hold smaller than the model: they are put in the middle of zeros."""

    def apply(self, names: Iterable[str]) -> tuple[dict[str, list[Destination]], list[Rename]]:
        """Return the places of names, and the renames that matched none."""
        return apply_renames({name: [Destination(name)] for name in names}, self.renames)


@dataclass(frozen=True)
class NameTable(NameMap):
    """A map by a table of names, beside renames that come first; a detector makes it of its own layers."""

    places: Mapping[str, Sequence[Destination]] = field(default_factory=dict)
    """Where names go, once they are renamed."""

    def apply(self, names: Iterable[str]) -> tuple[dict[str, list[Destination]], list[Rename]]:
        """Return the places of names, and the renames that matched none."""
        renamed, unmatched = super().apply(names)
        found = {
            name: [end for place in each for end in self.places.get(place.name, [place])]
            for name, each in renamed.items()
        }
        return found, unmatched


class Destination(NamedTuple):
    """The place of a tensor in the model."""

    name: str
    layout: Layout | None = None
    """The layout of the last renaming that has one; None leaves it to the shapes."""
    is_subtracted: bool = False
    """Whether it is subtracted from the tensor that goes there, as a bias is from the mean of the norm behind it."""


Places = Mapping[str, Sequence[Destination]]
"""The places of each tensor, by its name in the file."""


def apply_renames(places: Places, renames: Sequence[Rename]) -> tuple[dict[str, list[Destination]], list[Rename]]:
    """Apply renames in order; return the places, and the renames that matched nothing."""
    unmatched = []
    renamed = {name: list(each) for name, each in places.items()}
    for rename in renames:
        # Most renames match few names of many: the loop over all of them does no more than to look.
        is_match = re.compile(rename.pattern).search
        found = [name for name, each in renamed.items() for place in each if is_match(place.name)]
        if not found:
            unmatched.append(rename)
        for name in dict.fromkeys(found):
            renamed[name] = [end for place in renamed[name] for end in _ends(place, rename)]
    return renamed, unmatched


def _ends(place: Destination, rename: Rename) -> list[Destination]:
    if not rename.matches(place.name):
        return [place]
    return [place._replace(name=end, layout=rename.layout or place.layout) for end in rename.ends(place.name)]


def find_prefixes(names: Collection[str], wanted: Collection[str]) -> tuple[str, str]:
    """Find the prefix to strip from `names` and the one to add instead, so that as many as possible are in `wanted`.

    Wrappers put such prefixes before all names of a model: at least half of the shorter list must begin with one. Both
    are empty where no others do better.
    """
    least = min(len(names), len(wanted)) / 2
    strips, adds = _common_prefixes(names, least), _common_prefixes(wanted, least)
    by_rest: dict[str, list[str]] = {}
    for name in {*names}:
        for strip in strips.intersection(_prefixes(name)):
            by_rest.setdefault(name.removeprefix(strip), []).append(strip)
    found = Counter(
        (strip, add)
        for name in {*wanted}
        for add in adds.intersection(_prefixes(name))
        for strip in by_rest.get(name.removeprefix(add), ())
    )
    # Of several that find as many, the shortest; the rest makes it the same in every process.
    return max(found, key=lambda pair: (found[pair], -len(pair[0] + pair[1]), pair), default=("", ""))


def swap_prefix(name: str, strip: str, add: str) -> str:
    """Exchange the prefix of a name, if it has the one to strip."""
    return add + name.removeprefix(strip) if name.startswith(strip) else name


def _common_prefixes(names: Collection[str], least: float) -> set[str]:
    """The prefixes of at least this many names, and the empty one."""
    counts = Counter(prefix for name in names for prefix in _prefixes(name))
    return {"", *(prefix for prefix, count in counts.items() if count >= least)}


def _prefixes(name: str) -> list[str]:
    """The empty prefix, and those up to each dot or slash."""
    return ["", *(name[: part.end()] for part in re.finditer("[./]", name))]
