"""Which tensor of a file goes to which parameter of a model: decided by names and shapes, before any is read."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from lockstep.errors import CheckpointError, InputError
from lockstep.weights.fits import arranged, fit, same_bits, two_values
from lockstep.weights.name_maps import AVERAGE, bookkeeping, map_that_knows
from lockstep.weights.names import Place, matched, renamed
from lockstep.weights.report import Left, Loaded, Mismatch, Report, shortened
from lockstep.weights.source import WeightSource
from lockstep.weights.warm_start import Target, WarmStart

__all__ = ["Plan", "Target", "WarmStart", "plan"]

# Torch counts the batches that a batch norm has seen; no other system does, nor did torch before 0.4.1.
_MAY_LACK = (r"(^|\.)num_batches_tracked$",)
_MOST_GUESSES = 8
_MOST_NAMED = 40
_AS_THEY_ARE = WarmStart()


@dataclass(frozen=True)
class Plan:
    """Which tensors are to be read, and for what."""

    report: Report
    targets: Mapping[str, Target] = field(repr=False)
    twins: tuple[Loaded, ...] = field(default=(), repr=False)
    """Tensors under other names of parameters that are loaded; they must have the same values."""

    def tensors(self, source: WeightSource) -> Iterator[tuple[str, Tensor]]:
        """Each parameter and buffer that is loaded, with its tensor in the model's layout, shape and dtype.

        A tensor of the file is read once; those that go to several places may share memory.

        Raises:
            CheckpointError: a tensor is damaged, not what it was when this was planned, or out of a dtype's range; or
                a tied parameter has other values under another of its names.
        """
        by_tensor: dict[str, list[Loaded]] = {}
        for each in self.report.loaded:
            by_tensor.setdefault(each.source, []).append(each)
        for name, uses in by_tensor.items():
            tensor = source.read(name)
            for each in uses:
                value = arranged(tensor, each, self.targets[each.target], source)
                self._check_twins(each, value, source)
                yield each.target, value

    def _check_twins(self, used: Loaded, value: Tensor, source: WeightSource) -> None:
        for twin in self.twins:
            if twin.target == used.target:
                other = arranged(source.read(twin.source), twin, self.targets[twin.target], source)
                if not same_bits(value, other):
                    raise two_values(source, used.target, used.source, f"{twin.source!r}, which has other values")


class _Pair(NamedTuple):
    """A tensor of the file, and a place in the model that it would go to."""

    tensor: str
    variable: str
    """What the tensor holds, or holds the average of."""
    place: Place
    target: str
    """The parameter of that name; of a tied one that has several, the first."""

    @property
    def names(self) -> tuple[str, str, str]:
        return self.tensor, self.variable, self.place.name


def plan(source: WeightSource, targets: Mapping[str, Target], mapping: WarmStart = _AS_THEY_ARE) -> Plan:
    """Decide which tensors of `source` go to which of the model's parameters and buffers; none of them is read.

    Raises:
        InputError: a pattern, a rename, a prefix or the name map matches nothing, or two tensors go to one place.
        CheckpointError: tensors are missing or do not fit, nothing is loaded, or less than what is required; or a tied
            parameter has tensors under two names of which one fits and one does not.
    """
    firsts = {other: name for name, target in targets.items() for other in target.other_names}
    variables, ignored = _variables(source, prefer_average=mapping.prefer_average)
    why_not = _choice([*source.tensors, *variables, *targets, *firsts], mapping)
    pairs = {pair: why_not(*pair.names) for pair in _pairs(source, variables, mapping, firsts)}
    chosen = _one_each(source, [pair for pair, why in pairs.items() if not why and pair.target in targets])
    taken = {pair.target: pair for pair in reversed(chosen)}
    fits = [_fit(pair, source, targets, mapping) for name in targets if (pair := taken.get(name))]
    others = [pair for pair in chosen if pair is not taken[pair.target]]
    twins = [_check_fits(source, each, taken[each.target], _fit(each, source, targets, mapping)) for each in others]
    pairs |= {pair: f"another name of {pair.target}" for pair in others}
    loaded = tuple(each for each in fits if isinstance(each, Loaded))
    refused = {pair.target: why for pair, why in pairs.items() if why}
    rest = [name for name in targets if name not in taken]
    missing, skipped = _by_reason({n: why_not(n) or refused.get(n) or _why_lacking(n, mapping) for n in rest})
    used = {pair.tensor for pair in taken.values()}
    unexpected, refused_tensors = _by_reason({p.tensor: why for p, why in pairs.items() if p.tensor not in used})
    report = Report(
        origin=f"{source.path} ({source.kind})",
        loaded=loaded,
        missing=missing,
        skipped=skipped,
        mismatched=tuple(each for each in fits if isinstance(each, Mismatch)),
        unexpected=unexpected,
        ignored=(*ignored, *refused_tensors),
        num_values=_num_values(targets, targets),
        num_values_loaded=_num_values(targets, [each.target for each in loaded]),
    )
    known = map_that_knows(variables, missing) if missing and mapping.name_map is None else None
    _check(report, mapping, {pair.place.name: pair.tensor for pair in pairs if pair.tensor in unexpected}, known)
    return Plan(report, dict(targets), tuple(twins))


def _fit(pair: _Pair, source: WeightSource, targets: Mapping[str, Target], mapping: WarmStart) -> Loaded | Mismatch:
    place = Place(pair.target, pair.place.layout)
    return fit(place, pair.tensor, source.tensors[pair.tensor], targets[pair.target], mapping)


def _variables(source: WeightSource, *, prefer_average: bool) -> tuple[dict[str, str], list[Left]]:
    """The tensor to load for each variable of the file, and the tensors that are none or are not to be loaded.

    Raises:
        InputError: averages are preferred and there are none.
    """
    own = bookkeeping(source.tensors)
    weights = [name for name in source.tensors if name not in own]
    averages = {name.removesuffix(AVERAGE): name for name in weights if name.endswith(AVERAGE)}
    raw = {name: name for name in weights if not name.endswith(AVERAGE)}
    ignored = [Left(name, what) for name, what in own.items()]
    if not prefer_average:
        return raw, ignored + [Left(name, "moving average") for name in averages.values()]
    if not averages:
        raise InputError(
            f"{source.path} holds no moving averages.",
            given="prefer_average=True",
            expected=f"tensors with names that end with {AVERAGE}",
            mend="leave prefer_average out to load the raw weights",
        )
    return raw | averages, ignored + [Left(name, "its moving average is loaded") for name in raw if name in averages]


def _pairs(
    source: WeightSource, variables: Mapping[str, str], mapping: WarmStart, firsts: Mapping[str, str]
) -> list[_Pair]:
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
        _Pair(tensor, variable, place, firsts.get(place.name, place.name))
        for variable, tensor in variables.items()
        for place in prefixed[variable]
    ]


def _choice(names: Sequence[str], mapping: WarmStart) -> Callable[..., str]:
    """Why what has these names, in the file or in the model, is not to be loaded, as a function; "" where it is.

    Raises:
        InputError: a pattern matches none of all the names.
    """
    include = matched("include", mapping.include, names) if mapping.include else None
    skip = matched("skip", mapping.skip, names) if mapping.skip else set()

    def reason(*own: str) -> str:
        if not skip.isdisjoint(own):
            return "skip"
        return "not in include" if include is not None and include.isdisjoint(own) else ""

    return reason


def _one_each(source: WeightSource, pairs: Sequence[_Pair]) -> list[_Pair]:
    """The pair of each place, which is one name of a parameter.

    Raises:
        InputError: a place has two.
    """
    taken: dict[str, _Pair] = {}
    for pair in pairs:
        other = taken.setdefault(pair.place.name, pair)
        if other is not pair:
            raise InputError(
                f"Two tensors of {source.path} would go to {pair.place.name!r}.",
                given=f"{other.tensor!r} and {pair.tensor!r}",
                expected="one tensor for each parameter",
                mend="make a rename narrower, or skip one of the two by its name in the file",
            )
    return [*taken.values()]


def _check_fits(source: WeightSource, pair: _Pair, used: _Pair, found: Loaded | Mismatch) -> Loaded:
    """The second tensor of a tied parameter, which must fit as well as the first.

    Raises:
        CheckpointError: it does not.
    """
    if isinstance(found, Mismatch):
        raise two_values(source, pair.target, used.tensor, f"{pair.tensor!r}, which does not fit: {found.reason}")
    return found


def _by_reason(reasons: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[Left, ...]]:
    """The names without a reason, and those with one."""
    without = tuple(name for name, why in reasons.items() if not why)
    return without, tuple(Left(name, why) for name, why in reasons.items() if why)


def _why_lacking(name: str, mapping: WarmStart) -> str:
    """Why a parameter may be without a tensor; "" if it may not."""
    patterns = (*_MAY_LACK, *mapping.resolved_map.may_lack)
    return "not in such files" if any(re.search(pattern, name) for pattern in patterns) else ""


def _num_values(targets: Mapping[str, Target], names: Iterable[str]) -> int:
    return sum(math.prod(targets[name].shape) for name in names if targets[name].kind == "parameter")


def _names(places: Mapping[str, Sequence[Place]]) -> list[str]:
    return [place.name for each in places.values() for place in each]


def _matches_nothing(source: WeightSource, what: str, names: Iterable[str]) -> InputError:
    return InputError(
        f"{what} matches no tensor of {source.path}.",
        given=what,
        expected=f"what is found in one of {shortened(list(names)) or 'no names at all'}",
        mend="correct it, or leave it out",
    )


def _check(report: Report, mapping: WarmStart, guesses: Mapping[str, str], known: str | None) -> None:
    """Refuse a plan that would leave out what was not to be left out.

    Args:
        report: the plan.
        mapping: what was asked for.
        guesses: tensors that are not used, by the name they would have in the model.
        known: the name map that knows what is missing.

    Raises:
        CheckpointError: naming the parameters at fault.
    """
    missing = [] if mapping.ignore_missing else report.missing
    mismatched = report.mismatched if mapping.mismatch == "error" else []
    if missing or mismatched:
        given = [_missing_in_words(missing, guesses)] if missing else []
        given += [f"{each.source!r} does not fit {each.target!r}: {each.reason}" for each in mismatched[:_MOST_GUESSES]]
        given += [f"{len(mismatched) - _MOST_GUESSES:,} more do not fit"] if len(mismatched) > _MOST_GUESSES else []
        raise CheckpointError(
            f"The model does not get all it needs from {report.origin}.",
            given="; ".join(given),
            expected="a tensor that fits, for every parameter and buffer of the model",
            mend=f"give name_map={known!r}, which knows these names"
            if known
            else f"{'' if report.loaded else 'check that it is of this model; '}"
            "give rename=..., a name_map or system, skip=... what is to stay as it is, "
            "or ignore_missing=True, reshape=True or mismatch='skip'",
        )
    if not report.loaded or report.share < (mapping.require_loaded or 0):
        raise CheckpointError(
            f"Too little of the model would be loaded from {report.origin}.",
            given=f"{len(report.loaded):,} of {report.num_targets:,} tensors, {100 * report.share:.2f} % of the "
            f"parameters; {_missing_in_words(report.missing, guesses)}; "
            f"mismatched: {shortened([each.target for each in report.mismatched]) or 'none'}; "
            f"skipped: {shortened([each.name for each in report.skipped]) or 'none'}",
            expected=f"at least {100 * mapping.require_loaded:g} % (require_loaded={mapping.require_loaded:g})"
            if mapping.require_loaded
            else "at least one tensor",
            mend=f"give name_map={known!r}, which knows these names"
            if known
            else "correct the names with rename=..., prefixes or a name_map, or choose more",
        )


def _missing_in_words(missing: Sequence[str], guesses: Mapping[str, str]) -> str:
    """What is missing; the first few with the tensors that have the closest names, and of very many those alone."""
    words = []
    for index, name in enumerate(missing if len(missing) <= _MOST_NAMED else missing[:_MOST_GUESSES]):
        close = difflib.get_close_matches(name, guesses, n=1) if index < _MOST_GUESSES else []
        words.append(f"{name} (close to {guesses[close[0]]!r} in the file)" if close else name)
    more = [f"and {len(missing) - len(words):,} more"] if len(words) < len(missing) else []
    return f"missing: {', '.join(words + more) or 'nothing'}"
