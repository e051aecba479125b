"""Tensors, handled in few launches where a launch costs, and in one read where reading waits; and accurate norms.

An accelerator works through what was enqueued; the host runs ahead of it, and waits only where it reads a result. Its
kernels take a list of one dtype as a whole, dozens of tensors a launch, and a list of several dtypes tensor by tensor.
On a CPU nothing would be gained: there torch takes every list tensor by tensor, and a read costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial, reduce
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

READ_AT_ONCE = frozenset({"cpu"})
"""Kinds of devices that the host reads without a wait. A test that empties it runs what an accelerator would."""
_PATIENCE_SECONDS, _POLL_SECONDS = 0.1, 0.02
_LARGE = 2**18
"""Larger tensors, in elements, are added up by parts."""
_PART = 2**11
"""Elements of a part: about the square root of a large parameter's."""


def reading_waits(device: torch.device) -> bool:
    """Whether the host waits to read a number from this device: always, but on a CPU. Nothing else may decide it."""
    return device.type not in READ_AT_ONCE


def numbers_on(device: torch.device, values: Sequence[float]) -> list[float] | Tensor:
    """Numbers of the host, to be computed with beside those of a device: sent there, without a wait, where it waits."""
    return tensor_on(device, values, torch.float64) if reading_waits(device) else list(values)


def tensor_on(device: torch.device, values: Sequence[Any] | npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Make a tensor of numbers of the host, of lists of them or an array, on a device: sent there without a wait."""
    return sent_to(device, torch.tensor(values, dtype=dtype))


def sent_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Copy a tensor of the host to a device without a wait; on a CPU it is the tensor itself."""
    # Out of memory that is not pinned, a copy waits for all that the device has to do before.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Readback:
    """A copy of some numbers of a device, on its way to the host: float64 (n,), which may change once this is made."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.Event | None = None
        if numbers.device.type == "cpu":
            self._numbers = numbers.clone()
            return
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._event = torch.Event(numbers.device)
        self._event.record()

    def read(self, poll: Callable[[], None] | None = None) -> list[float]:
        """Wait until the copy has arrived, and return it.

        `poll` is called every 20 ms of a long wait, and at its end: what has ended it may have left other numbers than
        were to come. What it raises comes out of here.
        """
        if self._event is not None:
            if poll is None:
                self._event.synchronize()
            else:
                self._wait(self._event, poll)
        values: list[float] = self._numbers.tolist()
        return values

    @staticmethod
    def _wait(event: torch.Event, poll: Callable[[], None]) -> None:
        due = time.monotonic() + _PATIENCE_SECONDS
        while not event.query():
            if time.monotonic() > due:
                poll()
                due = time.monotonic() + _POLL_SECONDS
            time.sleep(2e-5)
        poll()


# Lists ----------------------------------------------------------------------------------------------------------------


@cache
def addable() -> frozenset[torch.dtype]:
    """The dtypes that torch can add up, and has kernels for lists of: not float8, nor uint16 to uint64."""
    floats = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    return frozenset(floats | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def copy_all(to: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value to the tensor in its place."""
    if not to:
        return
    for some, theirs in by_dtype(to, values):
        if some[0].dtype in addable():
            torch._foreach_copy_(some, theirs)
        else:
            for tensor, value in zip(some, theirs, strict=True):
                tensor.copy_(value)


def write_values(tensor: Tensor, values: Tensor) -> None:
    """Copy values to a tensor; to one that is expanded, which torch refuses to write, what it repeats."""
    if 0 not in tensor.stride():
        tensor.copy_(values)
        return
    repeats = zip(tensor.shape, tensor.stride(), strict=True)
    first = tuple(slice(1) if size > 1 and stride == 0 else slice(None) for size, stride in repeats)
    tensor[first].copy_(values[first])


def map_all(operation: Callable[..., Sequence[Tensor]], *lists: list[Tensor]) -> list[Tensor]:
    """The results of a foreach operation of torch that makes new tensors, in the order of the lists.

    Tensors in one place have one dtype; so have the results of all those of one dtype.
    """
    results = [(some[0].dtype, operation(some, *others)) for some, *others in by_dtype(*lists)]
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


def all_narrowed(tensors: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """Copies, of the dtypes of others, of the tensors that have another one, and the others themselves."""
    pairs = list(zip(tensors, like, strict=True))
    results = [tensor if tensor.dtype == other.dtype else torch.empty_like(other) for tensor, other in pairs]
    changed = [result is not tensor for result, tensor in zip(results, tensors, strict=True)]
    copy_all(list(compress(results, changed)), list(compress(tensors, changed)))
    return results


def quotients(tensors: list[Tensor], divisor: float | Tensor) -> list[Tensor]:
    """Each tensor divided by a number, or by a tensor without dimensions."""
    if not isinstance(divisor, torch.Tensor):
        return map_all(lambda some: torch._foreach_div(some, divisor), tensors)
    # Torch casts it in any case, and takes one of another dtype tensor by tensor. In 16 bits it might be infinite.
    found = map_all(lambda some: torch._foreach_div(some, divisor.to(some[0].dtype)), all_widened(tensors))
    return all_narrowed(found, tensors)


def add_all_(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Add to each tensor, in place, the other one in its place, of the same dtype, in `addable`."""
    for some, theirs in by_dtype(tensors, others):
        torch._foreach_add_(some, theirs)


def are_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether all values of each tensor are finite; some may be sparse."""
    verdicts = [(t.coalesce().values() if t.is_sparse else t).isfinite().all() for t in tensors]
    if verdicts and reading_waits(verdicts[0].device):
        read: list[bool] = torch.stack(verdicts).tolist()
        return read
    return [bool(verdict) for verdict in verdicts]


def to_channels_last(tensors: Iterable[Tensor]) -> None:
    """Convert those of four dimensions, such as convolution weights, to the channels_last memory format in place."""
    for tensor in tensors:
        if tensor.ndim == 4:
            # Not `contiguous`, which leaves a 1x1 kernel with other strides than its gradient has.
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


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


def by_dtype(*lists: list[Tensor]) -> Collection[tuple[list[Tensor], ...]]:
    """Split the lists alike, by the dtypes of the first one, where that makes fewer launches."""
    if not lists[0]:  # torch refuses empty lists
        return []
    if not reading_waits(lists[0][0].device):
        return [lists]
    dtypes = [tensor.dtype for tensor in lists[0]]
    kinds = dict.fromkeys(dtypes)
    if len(kinds) == 1:
        return [lists]
    chosen = [[dtype is kind for dtype in dtypes] for kind in kinds]
    return [tuple(list(compress(some, choice)) for some in lists) for choice in chosen]


# Norms: torch itself adds up the squares of a CPU tensor one by one, in the tensor's precision ------------------------


def norms_of(tensors: Sequence[Tensor | None], order: int = 2) -> list[float]:
    """The norm of each, of order 1 or 2, in float32 or wider; 0 for those that are None."""
    present = [t for t in tensors if t is not None]
    norms = _norms(present, order) if present else []
    if len(norms) == len(tensors):
        return norms
    values = iter(norms)
    return [0.0 if t is None else next(values) for t in tensors]


def norms_on_device(tensors: Sequence[Tensor], order: int = 2) -> Tensor:
    """The norm of each, as float64 on their device, which nobody waits for; shape (tensors,)."""
    of_one_dtype = partial(torch._foreach_norm, ord=order, dtype=_wide_dtype(tensors))
    return torch.stack(map_all(of_one_dtype, list(tensors))).double()


def _norms(tensors: list[Tensor], order: int) -> list[float]:
    if reading_waits(tensors[0].device):
        values: list[float] = norms_on_device(tensors, order).tolist()
        return values
    wide = _wide_dtype(tensors)
    parts = [_norms_of_parts(t, order, wide) if t.numel() > _LARGE else t for t in tensors]
    # Reading a number costs less here than one more operation.
    return [norm.item() for norm in torch._foreach_norm(parts, order, wide)]


def _wide_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype to compute norms in; None: that of each tensor. In 16 bits a norm has two or three digits."""
    dtypes = set(map(attrgetter("dtype"), tensors))
    return None if dtypes <= {torch.float32, torch.float64} else reduce(torch.promote_types, dtypes, torch.float32)


def _norms_of_parts(tensor: Tensor, order: int, dtype: torch.dtype | None) -> Tensor:
    """Return the norms of parts of a CPU tensor, in the order of its memory: their norm is the tensor's.

    Added up one by one, the norm of four million float32 numbers is off by 2e-3; by parts, by 1e-6.
    """
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    rest = tensor.numel() % _PART
    elements = tensor.reshape(-1)[rest:] if rest else tensor
    norms: Tensor = torch.linalg.vector_norm(elements.reshape(-1, _PART), order, 1, dtype=dtype)
    return torch.cat([tensor.reshape(-1)[:rest], norms]) if rest else norms
