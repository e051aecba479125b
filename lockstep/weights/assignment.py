"""Assigns each tensor of a file to a parameter of a model, by names and shapes, before any is read."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import CheckpointError, InputError
from lockstep.listing import shorten
from lockstep.selection import selected
from lockstep.weights.layouts import DENSE, Layout, Shape, flattened_layout, infer_layout
from lockstep.weights.name_maps import AVERAGE, AVERAGED_PARTS, best_name_map, bookkeeping
from lockstep.weights.names import Destination, Rename, apply_renames, find_prefixes, swap_prefix
from lockstep.weights.source import TensorInfo, WeightSource
from lockstep.weights.warm_start import Flattening, Loaded, Mismatch, NotLoaded, Target, WarmStart, WarmStartReport

# Torch counts the batches that a batch norm has seen; no other system does, nor did torch before 0.4.1.
_MAY_LACK = (r"(^|\.)num_batches_tracked$",)
_MOST_GUESSES = 8
_MOST_NAMED = 40
_AVERAGE_IS_LOADED = "its moving average is loaded"
_LENGTHS = {"depth": "D", "height": "H", "width": "W"}
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
                value = _converted(tensor, each, self.targets[each.target], source)
                if each.subtracted is not None:
                    value = value - source.read(each.subtracted).to(value.dtype)
                self._check_tied(each, value, source)
                yield each.target, value

    def _check_tied(self, used: Loaded, value: Tensor, source: WeightSource) -> None:
        for tied in self.tied:
            if tied.target == used.target:
                other = _converted(source.read(tied.source), tied, self.targets[tied.target], source)
                if not _equal_bits(value, other):
                    raise _tied_conflict(source, used.target, used.source, f"{tied.source!r}, which has other values")


def assign_tensors(
    source: WeightSource, targets: Mapping[str, Target], mapping: WarmStart = _AS_THEY_ARE
) -> Assignment:
    """Decide which tensors of `source` go to which of the model's parameters and buffers, and read none.

    Raises:
        InputError: a pattern, a rename, a prefix or the name map matches nothing, or two tensors go to one place.
        CheckpointError: tensors are missing or do not fit, nothing is loaded, or less than what is required; a bias has
            another shape than the mean that it is subtracted from; or a tied parameter has tensors under two names of
            which one fits and one does not.
    """
    firsts = {other: name for name, target in targets.items() for other in target.other_names}
    variables, ignored = select_variables(source, prefer_average=mapping.prefer_average)
    why_not = _choice([*source.tensors, *variables, *targets, *firsts], mapping)
    pairs_by = partial(_pairs_of, source, variables, firsts)
    pairs = pairs_by(mapping)
    subtracted = {pair.target: pair.tensor for pair in pairs if pair.place.is_subtracted}
    refusals = _refusals([pair for pair in pairs if not pair.place.is_subtracted], why_not)
    chosen = _one_each(source, [pair for pair, why in refusals.items() if not why and pair.target in targets])
    taken = {pair.target: pair for pair in reversed(chosen)}
    fit_of = {pair: _match(pair, source.tensors[pair.tensor], targets[pair.target], mapping) for pair in chosen}
    fits = [fit_of[taken[name]] for name in targets if name in taken]
    others = [pair for pair in chosen if pair is not taken[pair.target]]
    tied = [_check_fits(source, each, taken[each.target], fit_of[each]) for each in others]
    reasons = refusals | {pair: f"another name of {pair.target}" for pair in others}
    loaded = tuple(replace(each, subtracted=subtracted.get(each.target)) for each in fits if isinstance(each, Loaded))
    _check_biases(source, loaded)
    biases = [NotLoaded(name, "subtracted from the mean of a norm") for name in dict.fromkeys(subtracted.values())]
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
        ignored=(*ignored, *biases, *refused_tensors),
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


def _check_biases(source: WeightSource, loaded: Iterable[Loaded]) -> None:
    """Refuse a bias of another shape than the mean it is subtracted from, over which torch could spread it."""
    for each in loaded:
        if each.subtracted is not None and source.tensors[each.subtracted].shape != source.tensors[each.source].shape:
            raise CheckpointError(
                f"The tensor {each.subtracted!r} of {source.path} cannot be subtracted from {each.source!r}.",
                given=f"a bias of the shape {source.tensors[each.subtracted].shape}",
                expected=f"one of the shape {source.tensors[each.source].shape}, a value for each channel",
                hint="take a checkpoint of this net, or copy it again",
            )


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
        raise _tied_conflict(source, pair.target, used.tensor, f"{pair.tensor!r}, which does not fit: {found.reason}")
    return found


def _by_reason(reasons: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[NotLoaded, ...]]:
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
        hints.append(_prefixes_that_find(report.missing, found, unused, mapping, pairs_by))
    if renames := [each.rename for each in report.mismatched if each.rename]:
        hints.append(_rename_hint(renames, more=bool(mapping.rename)))
    return "; ".join(filter(None, hints))


def _check(report: WarmStartReport, mapping: WarmStart, guesses: Mapping[str, str], hint: str) -> None:
    """Refuse a plan that leaves out more than `mapping` allows.

    `guesses` are the unused tensors by the names that they would have in the model.
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


# Pairs: by which names tensors and parameters meet, whether they fit, and how one becomes the other -------------------


class Pair(NamedTuple):
    """A tensor of the file, and the place in the model that it would go to."""

    tensor: str
    variable: str
    """The variable that the tensor holds, or holds the average of."""
    place: Destination
    target: str
    """The parameter of that name; the first name of a tied one."""

    @property
    def names(self) -> tuple[str, str, str]:
        """The names by which patterns choose the pair."""
        return self.tensor, self.variable, self.place.name

    @property
    def is_average(self) -> bool:
        """Whether the tensor is a moving average."""
        return self.tensor != self.variable


def _pairs_of(
    source: WeightSource, variables: Mapping[str, str], firsts: Mapping[str, str], mapping: WarmStart
) -> list[Pair]:
    """Pair every tensor that may be loaded with every name that it gets."""
    if mapping.strip_prefix and not any(name.startswith(mapping.strip_prefix) for name in variables):
        raise _matches_nothing(source, f"strip_prefix={mapping.strip_prefix!r}", variables)
    stripped = [name.removeprefix(mapping.strip_prefix) for name in variables]
    found, unmatched = mapping.resolved_map.apply(stripped)
    if mapping.name_map is not None and len(unmatched) == len(mapping.resolved_map.renames):
        called = f"name_map={mapping.name_map!r}" if isinstance(mapping.name_map, str) else "The name map"
        raise _matches_nothing(source, called, stripped)
    mapped = {name: found[name.removeprefix(mapping.strip_prefix)] for name in variables}
    places, unmatched = apply_renames(mapped, mapping.rename)
    if unmatched:
        raise _matches_nothing(source, ", ".join(map(repr, unmatched)), _names(mapped))
    prefixed = {
        name: [place._replace(name=mapping.add_prefix + place.name) for place in each] for name, each in places.items()
    }
    return [
        Pair(tensor, variable, place, firsts.get(place.name, place.name))
        for variable, tensor in variables.items()
        for place in prefixed[variable]
    ]


def _one_each(source: WeightSource, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs, of which no two may have the same place."""
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


def _prefixes_that_find(
    missing: Sequence[str],
    found: Collection[str],
    unused: Sequence[Pair],
    mapping: WarmStart,
    pairs_by: Callable[[WarmStart], list[Pair]],
) -> str:
    """Find prefixes to strip or add, in words, so that half of the missing names are found and none of the found lost.

    "" if there are none. `unused` are the tensors of the file without a place in the model; `pairs_by` gives all pairs
    by another mapping.
    """
    strip, add = find_prefixes([pair.place.name.removeprefix(mapping.add_prefix) for pair in unused], missing)
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


def _names(places: Mapping[str, Sequence[Destination]]) -> list[str]:
    return [place.name for each in places.values() for place in each]


def _matches_nothing(source: WeightSource, what: str, names: Iterable[str]) -> InputError:
    return InputError(
        f"{what} matches no tensor of {source.path}.",
        given=what,
        expected=f"what is found in one of {shorten(list(names)) or 'no names at all'}",
        hint="correct it, or leave it out",
    )


def _match(pair: Pair, info: TensorInfo, target: Target, mapping: WarmStart) -> Loaded | Mismatch:
    """Decide how a tensor of a file becomes the parameter of the pair, or why it cannot."""
    system = mapping.system or mapping.resolved_map.system
    layout = pair.place.layout or (None if target.role == "table" else infer_layout(system, info.shape, target.shape))
    shape = layout.shape(info.shape) if layout else info.shape
    padded = shape is not None and _is_cut(pair.place.name, shape, target.shape, mapping)
    reshaped = shape != target.shape and not padded
    if not can_convert(info.dtype, target.dtype):
        return Mismatch(pair.target, pair.tensor, f"{info.dtype} in the file, {target.dtype} in the model")
    if layout is None and system == "tensorflow" and target.role == "kernel":
        shapes = f"shape {info.shape} in the file, {target.shape} in the model"
        why = "a kernel, which no layout of TensorFlow's becomes; a Rename can name its layout"
        return Mismatch(pair.target, pair.tensor, f"{shapes}, {why}")
    doubt = None
    if layout is DENSE and not pair.place.layout and (flattening := target.flattening):
        rename = _rename(pair.place.name.removeprefix(mapping.add_prefix), flattening)  # which comes before the prefix
        if flattening.is_certain:
            return Mismatch(pair.target, pair.tensor, f"its layer takes {_flattened(flattening)}", rename)
        doubt = f"its layer may take {_flattened(flattening)}. If it does, {_rename_hint([rename])}"
    if shape is None or (reshaped and not (mapping.reshape and math.prod(shape) == math.prod(target.shape))):
        return Mismatch(pair.target, pair.tensor, _other_shape(info.shape, layout, target.shape))
    return Loaded(
        target=pair.target,
        source=pair.tensor,
        shape=info.shape,
        layout=layout.pattern if layout else None,
        reshaped=reshaped,
        converted=f"{info.dtype} -> {target.dtype}" if info.dtype != target.dtype else None,
        averaged=pair.is_average,
        padded=padded,
        doubt=doubt,
    )


def _rename_hint(renames: Sequence[str], *, more: bool = False) -> str:
    """The hint that loads layers behind a flattening; `more` if there are other renames."""
    text = ", ".join(renames)
    lengths = [f"{what} for {axis}" for what, axis in _LENGTHS.items() if f"={axis}" in text]
    fill_in = f", with the features' {' and '.join(lengths)}" if lengths else ""
    return (
        f"give rename=({'..., ' if more else ''}{text},){fill_in}; "
        f"the same with Layout({DENSE.pattern!r}) takes the weights as they are"
    )


def can_convert(given: str, wanted: str) -> bool:
    """Whether values of one dtype are taken for another, both by torch's names.

    Floating point converts to any floating point, integers to any integers that hold them all; neither to the other.
    """
    kinds = [kind for name in (given, wanted) if isinstance(kind := getattr(torch, name, None), torch.dtype)]
    if len(kinds) < 2 or given == wanted:
        return len(kinds) == 2
    if all(kind.is_floating_point for kind in kinds):
        return True
    if any(kind.is_floating_point or kind.is_complex or kind == torch.bool for kind in kinds):
        return False
    narrow, wide = torch.iinfo(kinds[0]), torch.iinfo(kinds[1])
    return wide.min <= narrow.min and narrow.max <= wide.max


def _converted(tensor: Tensor, use: Loaded, target: Target, source: WeightSource) -> Tensor:
    """Bring a tensor of the file into the layout, shape and dtype of a parameter."""
    dtype = getattr(torch, target.dtype)
    if tuple(tensor.shape) != use.shape:
        raise CheckpointError(
            f"{use.source!r} in {source.path} is not what it was.",
            given=f"shape {tuple(tensor.shape)}",
            expected=f"shape {use.shape}, as when the warm start was planned",
            hint="do not write to the file while it is used, and plan with the source that is read",
        )
    laid_out = Layout(use.layout).apply(tensor) if use.layout else tensor
    shaped = _in_zeros(laid_out, target.shape) if use.padded else laid_out.reshape(target.shape)
    value = shaped.to(dtype)
    if value.is_floating_point() and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        _check_range(shaped, value, use, source)
    return value


def _equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same to the bit, NaN included."""
    return torch.equal(*(values.contiguous().reshape(-1).view(torch.uint8) for values in (one, other)))


def _tied_conflict(source: WeightSource, target: str, used: str, other: str) -> CheckpointError:
    """The error for a tied parameter with two tensors: `used`, and one that `other` describes with its fault."""
    return CheckpointError(
        f"The tied parameter {target!r} would get two values from {source.path}.",
        given=f"{used!r}, and {other}",
        expected="the same values under all of its names",
        hint="skip one of the two by its name, or untie the parameters of the model",
    )


def _is_cut(name: str, given: Shape, wanted: Shape, mapping: WarmStart) -> bool:
    """Whether a kernel, in torch's layout, may be smaller than the model's, and is so in height or width alone."""
    if given == wanted or len(given) != len(wanted) or given[:2] != wanted[:2]:
        return False
    is_smaller = all(0 < one <= other for one, other in zip(given, wanted, strict=True))
    return is_smaller and any(re.search(pattern, name) for pattern in mapping.resolved_map.may_be_cut)


def _in_zeros(kernel: Tensor, shape: Shape) -> Tensor:
    """Put a kernel in the middle of zeros; of an odd number of rows or columns the last ones are more.

    A convolution over a map of the kernel's size, filled up with zeros in the same way, gives what the kernel gives.
    """
    filled = kernel.new_zeros(shape)
    place = [
        slice((whole - own) // 2, (whole - own) // 2 + own) for own, whole in zip(kernel.shape, shape, strict=True)
    ]
    filled[tuple(place)] = kernel
    return filled


def _check_range(before: Tensor, after: Tensor, use: Loaded, source: WeightSource) -> None:
    given, wanted = before.dtype, after.dtype
    # Torch compares exactly from 32 bits on.
    before, after = (values.float() if values.itemsize < 4 else values for values in (before, after))
    # Some dtypes take the largest value instead of infinity, so that what is finite may be lost too.
    lost = (before.abs() > torch.finfo(wanted).max) & (after != before)
    if lost.any():
        raise CheckpointError(
            f"{use.source!r} in {source.path} has values that are too large for {use.target!r}.",
            given=f"{before[lost][0].item():g} as {given}",
            expected=f"at most {torch.finfo(wanted).max:g}, for {wanted}",
            hint="leave this tensor out with skip=..., or train with a wider dtype",
        )


def _flattened(flattening: Flattening) -> str:
    """The features that a layer takes, in words, with letters for the lengths that the user has to give."""
    lengths = re.findall("=([DHW])", flattened_layout(flattening.num_places, flattening.num_dimensions))
    num_places = " = ".join(filter(None, (" x ".join(lengths), str(flattening.num_places))))
    return (
        f"{flattening.num_channels} channels of {num_places} places, flattened, "
        "with the channels last in TensorFlow and first in torch"
    )


def _rename(name: str, flattening: Flattening) -> str:
    pattern = flattened_layout(flattening.num_places, flattening.num_dimensions)
    return f"Rename({'^' + re.escape(name) + '$'!r}, {name!r}, Layout({pattern!r}))"


def _other_shape(given: Shape, layout: Layout | None, wanted: Shape) -> str:
    moved = f" as {layout.pattern!r}" if layout else ""
    foreign = None if layout else infer_layout("tensorflow", given, wanted)
    hint = "; it would fit as TensorFlow lays it out: system='tensorflow'" if foreign else ""
    return f"shape {given}{moved} in the file, {wanted} in the model{hint}"


# Averages, and what else is no weight ---------------------------------------------------------------------------------

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
