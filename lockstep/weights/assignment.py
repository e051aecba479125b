"""Assigns each tensor of a file to a parameter of a model, by names and shapes, before any is read."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from lockstep.errors import CheckpointError, InputError
from lockstep.listing import shorten
from lockstep.selection import selected
from lockstep.weights.name_maps import AVERAGE, AVERAGED_PARTS, best_name_map, bookkeeping
from lockstep.weights.names import find_prefixes, swap_prefix
from lockstep.weights.pairing import (
    Pair,
    convert_tensor,
    equal_bits,
    match_tensor,
    one_each,
    pairs_of,
    prefixes_that_find,
    rename_hint,
    tied_conflict,
)
from lockstep.weights.source import WeightSource
from lockstep.weights.warm_start import Loaded, Mismatch, NotLoaded, Target, WarmStart, WarmStartReport

# Torch counts the batches that a batch norm has seen; no other system does, nor did torch before 0.4.1.
_MAY_LACK = (r"(^|\.)num_batches_tracked$",)
_MOST_GUESSES = 8
_MOST_NAMED = 40
_AVERAGE_IS_LOADED = "its moving average is loaded"
_AS_THEY_ARE = WarmStart()


@dataclass(frozen=True)
class Assignment:
    """The plan of a warm start: which tensors are read, and for which parameters and buffers."""

    report: WarmStartReport
    targets: Mapping[str, Target] = field(repr=False)
    tied: tuple[Loaded, ...] = field(default=(), repr=False)
    """Tensors under further names of tied parameters; they must have the same values as those that are loaded."""

    def tensors(self, source: WeightSource) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter and buffer that is loaded, with its tensor in the model's layout, shape and dtype.

        Each tensor of the file is read once; parameters that get the same one may share memory.

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
                value = convert_tensor(tensor, each, self.targets[each.target], source)
                self._check_tied(each, value, source)
                yield each.target, value

    def _check_tied(self, used: Loaded, value: Tensor, source: WeightSource) -> None:
        for tied in self.tied:
            if tied.target == used.target:
                other = convert_tensor(source.read(tied.source), tied, self.targets[tied.target], source)
                if not equal_bits(value, other):
                    raise tied_conflict(source, used.target, used.source, f"{tied.source!r}, which has other values")


def assign_tensors(
    source: WeightSource, targets: Mapping[str, Target], mapping: WarmStart = _AS_THEY_ARE
) -> Assignment:
    """Decide which tensors of `source` go to which of the model's parameters and buffers, and read none.

    Raises:
        InputError: a pattern, a rename, a prefix or the name map matches nothing, or two tensors go to one place.
        CheckpointError: tensors are missing or do not fit, nothing is loaded, or less than what is required; or a tied
            parameter has tensors under two names of which one fits and one does not.
    """
    firsts = {other: name for name, target in targets.items() for other in target.other_names}
    variables, ignored = select_variables(source, prefer_average=mapping.prefer_average)
    why_not = _choice([*source.tensors, *variables, *targets, *firsts], mapping)
    pairs_by = partial(pairs_of, source, variables, firsts)
    refusals = _refusals(pairs_by(mapping), why_not)
    chosen = one_each(source, [pair for pair, why in refusals.items() if not why and pair.target in targets])
    taken = {pair.target: pair for pair in reversed(chosen)}
    fit_of = {pair: match_tensor(pair, source.tensors[pair.tensor], targets[pair.target], mapping) for pair in chosen}
    fits = [fit_of[taken[name]] for name in targets if name in taken]
    others = [pair for pair in chosen if pair is not taken[pair.target]]
    tied = [_check_fits(source, each, taken[each.target], fit_of[each]) for each in others]
    reasons = refusals | {pair: f"another name of {pair.target}" for pair in others}
    loaded = tuple(each for each in fits if isinstance(each, Loaded))
    refused = {pair.target: why for pair, why in reasons.items() if why}
    rest = [name for name in targets if name not in taken]
    missing, skipped = _by_reason({n: why_not(n) or refused.get(n) or _why_lacking(n, mapping) for n in rest})
    used = {pair.tensor for pair in taken.values()}
    unexpected, refused_tensors = _by_reason({p.tensor: why for p, why in reasons.items() if p.tensor not in used})
    raw = [each.target for each in loaded if not each.averaged and targets[each.target].kind == "parameter"]
    report = WarmStartReport(
        origin=f"{source.path} ({source.kind})",
        loaded=loaded,
        missing=missing,
        skipped=skipped,
        mismatched=tuple(each for each in fits if isinstance(each, Mismatch)),
        unexpected=unexpected,
        ignored=(*ignored, *refused_tensors),
        num_values=_num_values(targets, targets),
        num_values_loaded=_num_values(targets, [each.target for each in loaded]),
        not_averaged=tuple(raw) if any(each.averaged for each in loaded) else (),
    )
    unused_tensors = {*unexpected}
    unused = [pair for pair in reasons if pair.tensor in unused_tensors]
    if mapping.prefer_average:
        _check_averages(source, report, [pair.tensor for pair in unused if pair.is_average])
    hint = _hint(variables, report, taken, unused, mapping, pairs_by)
    _check(report, mapping, {pair.place.name: pair.tensor for pair in unused}, hint)
    return Assignment(report, dict(targets), tuple(tied))


def _choice(names: Sequence[str], mapping: WarmStart) -> Callable[..., str]:
    """A function that returns why something with given names is not loaded; "" if it is."""
    include = {*selected("include", mapping.include, names)} if mapping.include else None
    skip = {*selected("skip", mapping.skip, names)} if mapping.skip else set()

    def reason(*own: str) -> str:
        if not skip.isdisjoint(own):
            return "skip"
        return "not in include" if include is not None and include.isdisjoint(own) else ""

    return reason


def _refusals(pairs: Iterable[Pair], why_not: Callable[..., str]) -> dict[Pair, str]:
    """Why each pair is not loaded: its names say so, or the average of its variable is loaded; "" if it is."""
    by_names = {pair: why_not(*pair.names) for pair in pairs}
    averaged = {pair.place.name for pair, why in by_names.items() if pair.is_average and not why}
    return {
        pair: _AVERAGE_IS_LOADED if not pair.is_average and pair.place.name in averaged else why
        for pair, why in by_names.items()
    }


def _check_fits(source: WeightSource, pair: Pair, used: Pair, found: Loaded | Mismatch) -> Loaded:
    """Refuse a second tensor of a tied parameter that does not fit as the first does."""
    if isinstance(found, Mismatch):
        raise tied_conflict(source, pair.target, used.tensor, f"{pair.tensor!r}, which does not fit: {found.reason}")
    return found


def _by_reason(reasons: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[NotLoaded, ...]]:
    """The names without a reason, and those with one."""
    without = tuple(name for name, why in reasons.items() if not why)
    return without, tuple(NotLoaded(name, why) for name, why in reasons.items() if why)


def _why_lacking(name: str, mapping: WarmStart) -> str:
    """Why a parameter needs no tensor; "" if it needs one."""
    patterns = (*_MAY_LACK, *mapping.resolved_map.may_lack)
    return "not in such files" if any(re.search(pattern, name) for pattern in patterns) else ""


def _num_values(targets: Mapping[str, Target], names: Iterable[str]) -> int:
    return sum(math.prod(targets[name].shape) for name in names if targets[name].kind == "parameter")


def _check_averages(source: WeightSource, report: WarmStartReport, unused: Sequence[str]) -> None:
    """Refuse to load raw weights alone where averages are preferred and the file has some, under other names."""
    if unused and report.loaded and not any(each.averaged for each in report.loaded):
        raise CheckpointError(
            f"The moving averages of {source.path} have other names than its weights, which would be loaded instead.",
            given=f"prefer_average=True; averages {shorten(unused)}",
            expected=f"averages of what is loaded: {shorten([each.source for each in report.loaded])}",
            hint="correct their names with rename=..., or leave prefer_average out to load the raw weights",
        )


def _hint(
    variables: Iterable[str],
    report: WarmStartReport,
    found: Collection[str],
    unused: Sequence[Pair],
    mapping: WarmStart,
    pairs_by: Callable[[WarmStart], list[Pair]],
) -> str:
    """What to change so that missing tensors are found and the others fit, in words; "" if nothing is known."""
    hints = []
    if report.missing and mapping.name_map is None and (known := best_name_map(variables, report.missing)):
        hints.append(f"give name_map={known!r}, which knows these names")
    elif report.missing:
        hints.append(prefixes_that_find(report.missing, found, unused, mapping, pairs_by))
    if renames := [each.rename for each in report.mismatched if each.rename]:
        hints.append(rename_hint(renames, more=bool(mapping.rename)))
    return "; ".join(filter(None, hints))


def _check(report: WarmStartReport, mapping: WarmStart, guesses: Mapping[str, str], hint: str) -> None:
    """Refuse a plan that leaves out more than `mapping` allows.

    Args:
        report: the plan.
        mapping: what was asked for.
        guesses: unused tensors, by the name they would have in the model.
        hint: from `_hint`.
    """
    missing = [] if mapping.ignore_missing else report.missing
    mismatched = report.mismatched if mapping.mismatch == "error" else []
    if missing or mismatched:
        given = [_missing_in_words(missing, guesses)] if missing else []
        misfits = [f"{each.source!r} does not fit {each.target!r}: {each.reason}" for each in mismatched]
        given += [shorten(misfits, _MOST_GUESSES, separator="; ")] if misfits else []
        raise CheckpointError(
            f"The model does not get all it needs from {report.origin}.",
            given="; ".join(given),
            expected="a tensor that fits, for every parameter and buffer of the model",
            hint=hint
            or f"{'' if report.loaded else 'check that it is of this model; '}"
            "give rename=..., a name_map or system, skip=... what is to stay as it is, "
            "or ignore_missing=True, reshape=True or mismatch='skip'",
        )
    if not report.loaded or report.share < (mapping.require_loaded or 0):
        raise CheckpointError(
            f"Too little of the model would be loaded from {report.origin}.",
            given=f"{len(report.loaded):,} of {report.num_targets:,} tensors, {100 * report.share:.2f} % of the "
            f"parameters; {_missing_in_words(report.missing, guesses)}; "
            f"mismatched: {shorten([each.target for each in report.mismatched]) or 'none'}; "
            f"skipped: {shorten([each.name for each in report.skipped]) or 'none'}",
            expected=f"at least {100 * mapping.require_loaded:g} % (require_loaded={mapping.require_loaded:g})"
            if mapping.require_loaded
            else "at least one tensor",
            hint=hint or "correct the names with rename=..., prefixes or a name_map, or choose more",
        )


def _missing_in_words(missing: Sequence[str], guesses: Mapping[str, str]) -> str:
    """The missing names, the first few with the closest names of tensors; of very many only those few."""
    words = [*missing]
    for index, name in enumerate(missing[:_MOST_GUESSES]):
        if close := difflib.get_close_matches(name, guesses, n=1):
            words[index] = f"{name} (close to {guesses[close[0]]!r} in the file)"
    return f"missing: {shorten(words, len(words) if len(words) <= _MOST_NAMED else _MOST_GUESSES) or 'nothing'}"


_BELOW_A_PART = re.compile(rf"(?:(?:module|_orig_mod)\.)*(?:{'|'.join(AVERAGED_PARTS)})\.")
# torch.optim.swa_utils.AveragedModel has this buffer beside its "module".
_COUNT = re.compile(r"(.*\.)?n_averaged")


def select_variables(source: WeightSource, *, prefer_average: bool) -> tuple[dict[str, str], list[NotLoaded]]:
    """The tensor to load for each variable of the file, and the tensors that are not loaded.

    A preferred average gets the name of its weight, even where a wrapper's prefix stands before one of the two.
    """
    own = bookkeeping(source.tensors)
    names = [name for name in source.tensors if name not in own]
    ways = _WAYS if prefer_average else (_by_ending,)
    averages = next(filter(None, (find(names) for find in ways)), {})
    if prefer_average and not averages:
        raise InputError(
            f"{source.path} holds no moving averages.",
            given="prefer_average=True",
            expected=f"names that end with {AVERAGE}, names that begin with {', '.join(AVERAGED_PARTS)} and a dot, "
            "or the n_averaged and module of an AveragedModel",
            hint="leave prefer_average out to load the raw weights",
        )
    averaged = {*averages.values()}
    raw = {name: name for name in names if name not in averaged}
    if not prefer_average:
        left = dict.fromkeys(averages.values(), "moving average")
        return raw, [NotLoaded(*each) for each in (own | left).items()]
    left = {tensor: "count of averaged models" for name, tensor in averages.items() if _COUNT.fullmatch(name)}
    strip, add = find_prefixes(averages, raw)
    averages = {swap_prefix(name, strip, add): tensor for name, tensor in averages.items() if tensor not in left}
    left |= {name: _AVERAGE_IS_LOADED for name in raw if name in averages}
    return raw | averages, [NotLoaded(*each) for each in (own | left).items()]


def _by_ending(names: Sequence[str]) -> dict[str, str]:
    """The averages of TensorFlow and of Lockstep's runs, by the names of their weights."""
    return {name.removesuffix(AVERAGE): name for name in names if name.endswith(AVERAGE)}


def _by_part(names: Sequence[str]) -> dict[str, str]:
    """The tensors of a module with the name of an averaged model, by their names in it."""
    parts = {name: _BELOW_A_PART.match(name) for name in names}
    return {name[part.end() :]: name for name, part in parts.items() if part}


def _by_count(names: Sequence[str]) -> dict[str, str]:
    """The tensors of torch's AveragedModels, by their names in the averaged model."""
    averages = {}
    for wrapper in [name.removesuffix("n_averaged") for name in names if _COUNT.fullmatch(name)]:
        for name in names:
            if name.startswith(f"{wrapper}module."):
                averages[wrapper + name.removeprefix(f"{wrapper}module.")] = name
            elif name == f"{wrapper}n_averaged":
                averages[name] = name
    return averages


_WAYS: tuple[Callable[[Sequence[str]], dict[str, str]], ...] = (_by_ending, _by_part, _by_count)
"""Ways to find averages; the first that finds any counts."""
