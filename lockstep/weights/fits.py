"""Whether a tensor of a file fits a parameter, and how it becomes its value."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.weights.layouts import Layout, Shape, fitting
from lockstep.weights.name_maps import AVERAGE
from lockstep.weights.names import Place
from lockstep.weights.report import Loaded, Mismatch
from lockstep.weights.source import TensorInfo, WeightSource
from lockstep.weights.warm_start import Target, WarmStart


def fit(place: Place, source: str, info: TensorInfo, target: Target, mapping: WarmStart) -> Loaded | Mismatch:
    """How the tensor `source` becomes the parameter at `place`, or why it cannot."""
    system = mapping.system or mapping.resolved_map.system
    layout = place.layout or fitting(system, info.shape, target.shape)
    shape = layout.shape(info.shape) if layout else info.shape
    reshaped = shape != target.shape
    if not converts(info.dtype, target.dtype):
        return Mismatch(place.name, source, f"{info.dtype} in the file, {target.dtype} in the model")
    if shape is None or (reshaped and not (mapping.reshape and math.prod(shape) == math.prod(target.shape))):
        return Mismatch(place.name, source, _other_shape(info.shape, layout, target.shape))
    return Loaded(
        target=place.name,
        source=source,
        shape=info.shape,
        layout=layout.pattern if layout else None,
        reshaped=reshaped,
        converted=f"{info.dtype} -> {target.dtype}" if info.dtype != target.dtype else None,
        averaged=source.endswith(AVERAGE),
    )


def converts(given: str, wanted: str) -> bool:
    """Whether values of one dtype are taken for another, both as torch calls them.

    Floating point becomes any floating point, whole numbers what holds them all; never one of these the other.
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


def arranged(tensor: Tensor, use: Loaded, target: Target, source: WeightSource) -> Tensor:
    """A tensor of the file as the value of a parameter: in its layout, shape and dtype.

    Raises:
        CheckpointError: the tensor is not what the plan was made for, or a value is too large for the dtype.
    """
    dtype = getattr(torch, target.dtype)
    if tuple(tensor.shape) != use.shape:
        raise CheckpointError(
            f"{use.source!r} in {source.path} is not what it was.",
            given=f"shape {tuple(tensor.shape)}",
            expected=f"shape {use.shape}, as when the warm start was planned",
            mend="do not write to the file while it is used, and plan with the source that is read",
        )
    laid_out = Layout(use.layout).apply(tensor) if use.layout else tensor
    value = laid_out.reshape(target.shape).to(dtype)
    if value.is_floating_point() and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        _check_range(laid_out.reshape(target.shape), value, use, source)
    return value


def _check_range(before: Tensor, after: Tensor, use: Loaded, source: WeightSource) -> None:
    lost = before.isfinite() & ~after.isfinite()
    if lost.any():
        raise CheckpointError(
            f"{use.source!r} in {source.path} has values that are too large for {use.target!r}.",
            given=f"{before[lost][0].item():g} as {before.dtype}",
            expected=f"at most {torch.finfo(after.dtype).max:g}, for {after.dtype}",
            mend="leave this tensor out with skip=..., or train with a wider dtype",
        )


def _other_shape(given: Shape, layout: Layout | None, wanted: Shape) -> str:
    """Why a shape does not fit."""
    moved = f" as {layout.pattern!r}" if layout else ""
    foreign = None if layout else fitting("tensorflow", given, wanted)
    hint = "; it would fit as TensorFlow lays it out: system='tensorflow'" if foreign else ""
    return f"shape {given}{moved} in the file, {wanted} in the model{hint}"
