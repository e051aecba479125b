"""What `lockstep inspect --diff` says: in which names, shapes, kinds and values two sets of weights differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.cli.inspect_weights import plain
from lockstep.weights.source import TensorInfo, WeightSource


@dataclass(frozen=True)
class Change:
    """A tensor that is in both with other values."""

    name: str
    largest_absolute: float
    """Infinite where one of two values is not a number, or infinite."""
    largest_relative: float
    """As a share of the larger of two values."""
    num_different: int
    num_values: int


@dataclass(frozen=True)
class Difference:
    """In what two sets of weights differ."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    other_kind: tuple[tuple[str, TensorInfo, TensorInfo], ...]
    """Tensors of another shape or dtype."""
    changes: tuple[Change, ...]
    unreadable: tuple[str, ...]
    """Tensors of both that are no numbers, and were not compared."""
    num_equal: int

    @property
    def is_none(self) -> bool:
        """Whether all that can be compared is equal."""
        return not (self.only_first or self.only_second or self.other_kind or self.changes)


def difference(first: WeightSource, second: WeightSource) -> Difference:
    """Compare two sets of weights, tensor by tensor. What is not a number in both is equal.

    Raises:
        CheckpointError: a tensor that both have is damaged.
    """
    both = [name for name in first.tensors if name in second.tensors]
    infos = {name: (first.tensors[name], second.tensors[name]) for name in both}
    alike = [name for name, (one, other) in infos.items() if (one.shape, one.dtype) == (other.shape, other.dtype)]
    numbers = [name for name in alike if isinstance(getattr(torch, infos[name][0].dtype, None), torch.dtype)]
    changes = [_change(name, first.read(name), second.read(name)) for name in numbers]
    return Difference(
        tuple(name for name in first.tensors if name not in infos),
        tuple(name for name in second.tensors if name not in infos),
        tuple((name, *infos[name]) for name in both if name not in alike),
        tuple(change for change in changes if change.num_different),
        tuple(name for name in alike if name not in numbers),
        sum(not change.num_different for change in changes),
    )


def _change(name: str, first: Tensor, second: Tensor) -> Change:
    if torch.equal(first, second):
        return Change(name, 0.0, 0.0, 0, first.numel())
    one, other = plain(first), plain(second)
    same = (one == other) | (one.isnan() & other.isnan())
    # Integers above 2**53 may be apart, and the same as float64.
    if not (first.is_floating_point() or first.is_complex()):
        same = first == second
    apart = (one - other).abs().nan_to_num(torch.inf, torch.inf)
    apart[same] = 0.0
    largest = torch.maximum(one.abs(), other.abs()).nan_to_num(torch.inf, torch.inf)
    relative = torch.where(apart.isfinite(), apart / largest, apart)
    relative[same] = 0.0
    num_different = int((~same).any(-1).sum() if first.is_complex() else (~same).sum())
    return Change(name, apart.max().item(), relative.max().item(), num_different, first.numel())


def in_words(found: Difference, first: str, second: str) -> Iterator[str]:
    """The lines of the report."""
    for path, names in ((first, found.only_first), (second, found.only_second)):
        if names:
            yield f"only in {path}:"
            yield from (f"  {name}" for name in names)
    if found.other_kind:
        yield "of another shape or dtype:"
        for name, one, other in found.other_kind:
            yield f"  {name}: {one.shape} {one.dtype}, {other.shape} {other.dtype}"
    if found.changes:
        yield "with other values (largest difference, absolute and relative):"
        width = max(len(change.name) for change in found.changes)
        for change in found.changes:
            count = f"{change.num_different:,} of {change.num_values:,} values"
            apart = f"{change.largest_absolute:.3g}  {change.largest_relative:.3g}"
            yield f"  {change.name.ljust(width)}  {apart}  {count}"
    if found.unreadable:
        yield "not compared, for they are no numbers:"
        yield from (f"  {name}" for name in found.unreadable)
    yield f"{found.num_equal:,} tensors are equal, {len(found.changes):,} have other values"
