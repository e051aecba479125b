"""Pairs of tensors and parameters: by which names they meet, whether they fit, and how one becomes the other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import CheckpointError, InputError
from lockstep.listing import shorten
from lockstep.weights.layouts import DENSE, Layout, Shape, flattened_layout, infer_layout
from lockstep.weights.names import Destination, Rename, apply_renames, find_prefixes
from lockstep.weights.source import TensorInfo, WeightSource
from lockstep.weights.warm_start import Flattening, Loaded, Mismatch, Target, WarmStart

_LENGTHS = {"depth": "D", "height": "H", "width": "W"}


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


def pairs_of(
    source: WeightSource, variables: Mapping[str, str], firsts: Mapping[str, str], mapping: WarmStart
) -> list[Pair]:
    """Pair every tensor that may be loaded with every name that it gets."""
    if mapping.strip_prefix and not any(name.startswith(mapping.strip_prefix) for name in variables):
        raise _matches_nothing(source, f"strip_prefix={mapping.strip_prefix!r}", variables)
    stripped = {name: [Destination(name.removeprefix(mapping.strip_prefix))] for name in variables}
    mapped, unmatched = apply_renames(stripped, mapping.resolved_map.renames)
    if mapping.name_map is not None and len(unmatched) == len(mapping.resolved_map.renames):
        called = f"name_map={mapping.name_map!r}" if isinstance(mapping.name_map, str) else "The name map"
        raise _matches_nothing(source, called, _names(stripped))
    places, unmatched = apply_renames(mapped, mapping.rename)
    if unmatched:
        raise _matches_nothing(source, ", ".join(map(repr, unmatched)), _names(mapped))
    prefixed = {
        name: [Destination(mapping.add_prefix + place.name, place.layout) for place in each]
        for name, each in places.items()
    }
    return [
        Pair(tensor, variable, place, firsts.get(place.name, place.name))
        for variable, tensor in variables.items()
        for place in prefixed[variable]
    ]


def one_each(source: WeightSource, pairs: Sequence[Pair]) -> list[Pair]:
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


def prefixes_that_find(
    missing: Sequence[str],
    found: Collection[str],
    unused: Sequence[Pair],
    mapping: WarmStart,
    pairs_by: Callable[[WarmStart], list[Pair]],
) -> str:
    """Find prefixes to strip or add, in words, so that half of the missing names are found and none of the found lost.

    Args:
        missing: names in the model.
        found: other names in the model.
        unused: tensors of the file without a place in the model.
        mapping: what was asked for.
        pairs_by: all pairs by another mapping.

    Returns:
        The hint of an error; "" if there are no such prefixes.
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


def match_tensor(pair: Pair, info: TensorInfo, target: Target, mapping: WarmStart) -> Loaded | Mismatch:
    """Decide how a tensor of a file becomes the parameter of the pair, or why it cannot."""
    system = mapping.system or mapping.resolved_map.system
    layout = pair.place.layout or (None if target.role == "table" else infer_layout(system, info.shape, target.shape))
    shape = layout.shape(info.shape) if layout else info.shape
    padded = shape is not None and _is_cut(pair.place.name, shape, target.shape, mapping)
    reshaped = shape != target.shape and not padded
    if not can_convert(info.dtype, target.dtype):
        return Mismatch(pair.target, pair.tensor, f"{info.dtype} in the file, {target.dtype} in the model")
    if layout is None and system == "tensorflow" and target.role == "kernel":
        return Mismatch(pair.target, pair.tensor, _no_kernel(info.shape, target.shape))
    doubt = None
    if layout is DENSE and not pair.place.layout and (flattening := target.flattening):
        rename = _rename(pair.place.name.removeprefix(mapping.add_prefix), flattening)  # which comes before the prefix
        if flattening.is_certain:
            return Mismatch(pair.target, pair.tensor, f"its layer takes {_flattened(flattening)}", rename)
        doubt = f"its layer may take {_flattened(flattening)}. If it does, {rename_hint([rename])}"
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


def rename_hint(renames: Sequence[str], *, more: bool = False) -> str:
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


def convert_tensor(tensor: Tensor, use: Loaded, target: Target, source: WeightSource) -> Tensor:
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


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same to the bit, NaN included."""
    return torch.equal(*(values.contiguous().reshape(-1).view(torch.uint8) for values in (one, other)))


def tied_conflict(source: WeightSource, target: str, used: str, other: str) -> CheckpointError:
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
    before, after = _comparable(before), _comparable(after)
    # Some dtypes take the largest value instead of infinity, so that what is finite may be lost too.
    lost = (before.abs() > torch.finfo(wanted).max) & (after != before)
    if lost.any():
        raise CheckpointError(
            f"{use.source!r} in {source.path} has values that are too large for {use.target!r}.",
            given=f"{before[lost][0].item():g} as {given}",
            expected=f"at most {torch.finfo(wanted).max:g}, for {wanted}",
            hint="leave this tensor out with skip=..., or train with a wider dtype",
        )


def _comparable(values: Tensor) -> Tensor:
    """Widen to the 32 bits that torch compares exactly."""
    return values.float() if values.itemsize < 4 else values


def _no_kernel(given: Shape, wanted: Shape) -> str:
    """Why a tensor from TensorFlow does not fit the kernel of a convolution or linear layer."""
    return (
        f"shape {given} in the file, {wanted} in the model, a kernel, which no layout of TensorFlow's becomes; "
        "a Rename can name its layout"
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
    """The rename for a layer behind a flattening, as Python code."""
    pattern = flattened_layout(flattening.num_places, flattening.num_dimensions)
    return f"Rename({'^' + re.escape(name) + '$'!r}, {name!r}, Layout({pattern!r}))"


def _other_shape(given: Shape, layout: Layout | None, wanted: Shape) -> str:
    """Why a shape does not fit."""
    moved = f" as {layout.pattern!r}" if layout else ""
    foreign = None if layout else infer_layout("tensorflow", given, wanted)
    hint = "; it would fit as TensorFlow lays it out: system='tensorflow'" if foreign else ""
    return f"shape {given}{moved} in the file, {wanted} in the model{hint}"
