"""Lists of tensors, handled in few launches where a launch costs, and in one read where reading waits.

Torch's CUDA kernels take a list of one dtype as a whole, dozens of tensors a launch, and a list of several dtypes
tensor by tensor. On a CPU nothing would be gained: there torch takes every list tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

from lockstep import readback

if TYPE_CHECKING:
    from torch import Tensor


@cache
def addable() -> frozenset[torch.dtype]:
    """The dtypes that torch can add up, and has kernels for lists of: not float8, nor uint16 to uint64."""
    floats = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    return frozenset(floats | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def copy_all(to: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value to the tensor in its place."""
    if not to:
        return
    for some, theirs in _by_dtype(to, values):
        if some[0].dtype in addable():
            torch._foreach_copy_(some, theirs)
        else:
            for tensor, value in zip(some, theirs, strict=True):
                tensor.copy_(value)


def write_values(tensor: Tensor, values: Tensor) -> None:
    """Copy values to a tensor; to one that is expanded, which torch refuses to write, what it repeats."""
    repeats = zip(tensor.shape, tensor.stride(), strict=True)
    first = tuple(slice(1) if size > 1 and stride == 0 else slice(None) for size, stride in repeats)
    tensor[first].copy_(values[first])


def map_all(operation: Callable[..., Sequence[Tensor]], *lists: list[Tensor]) -> list[Tensor]:
    """The results of a foreach operation of torch that makes new tensors, in the order of the lists.

    Tensors in one place have one dtype; so have the results of all those of one dtype.
    """
    results = [(some[0].dtype, operation(some, *others)) for some, *others in _by_dtype(*lists)]
    if len(results) == 1:
        return list(results[0][1])
    made = {dtype: iter(tensors) for dtype, tensors in results}
    return [next(made[tensor.dtype]) for tensor in lists[0]]


def all_widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Float32 copies of the tensors of 16 bits, and the others themselves."""
    narrow = [tensor for tensor in tensors if tensor.itemsize < 4]
    wide = [torch.empty_like(tensor, dtype=torch.float32) for tensor in narrow]
    copy_all(wide, narrow)
    copies = iter(wide)
    return [next(copies) if tensor.itemsize < 4 else tensor for tensor in tensors]


def quotients(tensors: list[Tensor], divisor: float | Tensor) -> list[Tensor]:
    """Each tensor divided by a number, or by a tensor without dimensions."""
    if not isinstance(divisor, torch.Tensor):
        return map_all(lambda some: torch._foreach_div(some, divisor), tensors)
    # Torch casts it in any case, and takes one of another dtype tensor by tensor.
    return map_all(lambda some: torch._foreach_div(some, divisor.to(some[0].dtype)), tensors)


def add_all_(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Add to each tensor, in place, the other one in its place, of the same dtype, in `addable`."""
    for some, theirs in _by_dtype(tensors, others):
        torch._foreach_add_(some, theirs)


def are_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether all values of each tensor are finite; some may be sparse."""
    verdicts = [(t.coalesce().values() if t.is_sparse else t).isfinite().all() for t in tensors]
    if verdicts and readback.reading_waits(verdicts[0].device):
        read: list[bool] = torch.stack(verdicts).tolist()
        return read
    return [bool(verdict) for verdict in verdicts]


def with_strides_of(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor with the strides of another one of its shape: itself, a view if its memory lies alike, or a copy.

    What walks memory, as fused kernels do, needs all its tensors in one order. Torch leaves open which strides a
    dimension of size 1 has: a 1x1 kernel in channels_last is its own gradient's twin in memory, and may not be in
    strides.
    """
    if tensor.stride() == like.stride():
        return tensor
    sizes = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    if all(mine == theirs for size, mine, theirs in sizes if size > 1):
        return tensor.as_strided(like.shape, like.stride())
    return torch.empty_like(like).copy_(tensor)


def _by_dtype(*lists: list[Tensor]) -> Collection[tuple[list[Tensor], ...]]:
    """Split the lists alike, by the dtypes of the first one, where that makes fewer launches."""
    if not lists[0]:  # torch refuses empty lists
        return []
    if not readback.reading_waits(lists[0][0].device):
        return [lists]
    groups: dict[torch.dtype, tuple[list[Tensor], ...]] = {}
    for tensors in zip(*lists, strict=True):
        group = groups.setdefault(tensors[0].dtype, tuple([] for _ in lists))
        for some, tensor in zip(group, tensors, strict=True):
            some.append(tensor)
    return groups.values()
