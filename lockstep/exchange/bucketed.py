"""Sums over all workers by all-reduce, in buckets that are sent while the backward pass goes on.

A backward pass goes from the last layer to the first. So the buckets hold the gradients in reverse order, and what is
known last (statistics, losses) lies in the last of them. A bucket is sent once it is complete and those before it are
sent: in the same order on all workers, whichever gradient comes first (Li et al.: PyTorch Distributed, 2020). From then
on large gradients are views of it, so that a worker holds them once and not twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import InputError
from lockstep.exchange.collectives import Backend, collectives
from lockstep.exchange.transports import FlatLayout, pack, unpack
from lockstep.exchange.tree import GradientHook, PartialSum, TreeSum
from lockstep.tensors import add_all_, copy_all
from lockstep.workers.rank import Worker

WORTH_FREEING_ELEMENTS = 2**14
"""Gradients from this size on are the most of a net's bytes, and few: freeing one takes a microsecond."""
BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is smaller, so that the network has work soon."""
SMALL_ELEMENTS = 2**14
"""Up to here all floating-point tensors travel as float64, in one call: beginning another one costs more than bytes."""


class BucketedTransport:
    """Sums over all towers by all-reduce: in tree order inside a worker, in the library's order between workers.

    With a `sent_dtype` of 16 bits, float32 gradients are sent, and added up between the workers, in it.
    """

    def __init__(self, worker: Worker, backend: Backend, sent_dtype: torch.dtype | None = None) -> None:
        self._worker, self._sent_dtype = worker, sent_dtype
        self._collectives = collectives(worker, backend)
        self._buckets: list[_Bucket] = []
        self._views: list[Tensor] = []
        """Each tensor of an operand, where it lies in its bucket."""
        self._hooks: dict[int, GradientHook] = {}
        self._before: list[list[Tensor]] = []
        """What is added to the tensors of the last tower, where its gradients come early."""
        self._num_sent = 0
        """Buckets of the present step that are sent."""
        self._zero, self._one = torch.arange(2, dtype=torch.float64, device=worker.device).unbind()

    def start(self, sums: TreeSum, last: int) -> Mapping[int, GradientHook]:
        """Begin the last tower of this worker: hooks for its gradients, by their index.

        Where there are any, the tower is then put beside the sums over those before it, not added: `TreeSum.put`. There
        are none in the first step, which lays the buckets out; nor where no bucket holds gradients alone, since all is
        sent at the end then.

        Raises:
            WorkerError: an error in a step of this state or another, which the script has caught, has left the others
                without some buckets.
        """
        self._collectives.check_finished()
        for bucket in self._buckets:
            bucket.arrived.clear()
        self._before = [self._packed(operand, self._zero) for operand in sums.before(last)] if self._hooks else []
        return self._hooks

    def total(self, sums: TreeSum) -> PartialSum:
        """Return the sum over all towers; valid until the next call.

        Where the host does not wait for it, the numbers are NaN if the sum was cut short, since a worker was lost.
        """
        tensors = self._packed(sums.nodes[-1][1] if self._num_sent else sums.total(), self._one)
        if not self._buckets:
            self._open(tensors, sums.num_gradients)
        if self._num_sent:
            for bucket in self._buckets[self._num_sent :]:
                self._send(bucket, tensors)
            self._collectives.finish()
            self._num_sent, self._before = 0, []
        else:
            for bucket in self._buckets:
                bucket.fill(tensors)
            self._collectives.all_reduce([bucket.flat for bucket in self._buckets])
        for bucket in self._buckets:
            bucket.receive()
        views = self._views
        if self._collectives.are_enqueued:
            *views, num_workers = views
            views[-1].masked_fill_(num_workers != self._worker.num_workers, math.nan)
        return unpack(views, owned=True)

    def close(self) -> None:
        """Give back the memory; the process group stays, since others use it, until the worker leaves its run."""
        self._buckets, self._views, self._hooks = [], [], {}

    def _packed(self, operand: PartialSum, num_workers: Tensor) -> list[Tensor]:
        tensors = pack(operand, self._worker.device)
        return [*tensors, num_workers] if self._collectives.are_enqueued else tensors

    def _arrived(self, number: int, index: int, gradient: Tensor) -> None:
        """Take a gradient of the last tower for the bucket of that number, and send what is complete with it."""
        if gradient.layout != torch.strided:
            return  # it travels dense, with marks of its rows, which are made at the end
        if number < self._num_sent:
            raise InputError(
                "The gradient of a parameter has come a second time in one backward pass, and the first was sent.",
                given="an autograd.Function whose backward runs a backward pass of its own",
                expected="one gradient for each parameter",
                hint="call torch.autograd.grad in it, not backward()",
            )
        self._buckets[number].arrived[index] = gradient
        while (bucket := self._buckets[self._num_sent]).is_complete:
            self._send(bucket, bucket.arrived)
            bucket.take_over()

    def _send(self, bucket: _Bucket, tensors: Mapping[int, Tensor] | Sequence[Tensor]) -> None:
        bucket.fill(tensors, self._before)
        self._collectives.begin_all_reduce(bucket.flat, self._num_sent)
        self._num_sent += 1

    def _open(self, tensors: Sequence[Tensor], num_gradients: int) -> None:
        wire, planned = plan_buckets(tensors, num_gradients, self._sent_dtype)
        order = [*chain(*planned)]
        layout = FlatLayout([wire[index] for index in order])
        self._worker.group.agree("the tensors to exchange", layout.describe())
        block = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self._worker.device)
        sent = dict(zip(order, layout.views(block), strict=True))
        self._views = [
            sent[index] if tensor.dtype == wire[index].dtype else torch.empty_like(sent[index], dtype=tensor.dtype)
            for index, tensor in enumerate(tensors)
        ]
        rest = {segment.dtype: segment.of(block) for segment in layout.segments}
        for indices in planned:
            dtype, num_elements = wire[indices[0]].dtype, sum(wire[index].numel() for index in indices)
            flat, rest[dtype] = rest[dtype][:num_elements], rest[dtype][num_elements:]
            self._buckets.append(_Bucket(indices, self._views, sent, flat))
        self._buckets.sort(key=lambda bucket: max(bucket.indices) >= num_gradients)  # those of gradients alone first
        for number, bucket in enumerate(self._buckets):
            if max(bucket.indices) < num_gradients:
                self._hooks |= {index: partial(self._arrived, number, index) for index in bucket.indices}


def plan_buckets(
    tensors: Sequence[Tensor], num_gradients: int, sent_dtype: torch.dtype | None = None
) -> tuple[list[Tensor], list[list[int]]]:
    """Plan which tensors of an operand, of which the first are gradients, are sent together.

    Returns:
        What is sent of each, as a tensor without data; and the indices of each bucket in order, those of one dtype
        after those of another.
    """
    dtypes = _dtypes_on_the_wire(tensors, num_gradients, sent_dtype)
    wire = [torch.empty_like(each, dtype=dtype, device="meta") for each, dtype in zip(tensors, dtypes, strict=True)]
    order = [*reversed(range(num_gradients)), *range(num_gradients, len(tensors))]
    planned: list[list[int]] = []
    for dtype in dict.fromkeys(dtypes[index] for index in order):
        planned += _cut([index for index in order if dtypes[index] == dtype], wire, is_first=not planned)
    return wire, planned


def _dtypes_on_the_wire(
    tensors: Sequence[Tensor], num_gradients: int, sent_dtype: torch.dtype | None
) -> list[torch.dtype]:
    if sent_dtype is not None:
        return [
            sent_dtype if tensor.dtype == torch.float32 and index < num_gradients else tensor.dtype
            for index, tensor in enumerate(tensors)
        ]
    if sum(tensor.numel() for tensor in tensors) <= SMALL_ELEMENTS:
        return [torch.float64 if tensor.is_floating_point() else tensor.dtype for tensor in tensors]
    return [tensor.dtype for tensor in tensors]


def _cut(indices: Iterable[int], tensors: Sequence[Tensor], *, is_first: bool) -> Iterator[list[int]]:
    """Cut tensors of one dtype into buckets: each is full with the tensor that reaches its size."""
    some: list[int] = []
    num_bytes, limit = 0, FIRST_BUCKET_BYTES if is_first else BUCKET_BYTES
    for index in indices:
        some.append(index)
        num_bytes += tensors[index].nbytes
        if num_bytes >= limit:
            yield some
            some, num_bytes, limit = [], 0, BUCKET_BYTES
    if some:
        yield some


class _Bucket:
    """Some tensors of an operand, which are sent together, as one of one dimension: `flat`.

    What is sent of each is the tensor's own memory, or a copy in another dtype.
    """

    def __init__(
        self, indices: Sequence[int], views: Sequence[Tensor], sent: Mapping[int, Tensor], flat: Tensor
    ) -> None:
        self.indices, self.flat = indices, flat
        self._views = [views[index] for index in indices]
        self._copied = [views[index] for index in indices if views[index] is not sent[index]]
        self._copies = [sent[index] for index in indices if views[index] is not sent[index]]
        self.arrived: dict[int, Tensor] = {}
        """The gradients that have come early, by their index."""

    @property
    def is_complete(self) -> bool:
        """Whether all it holds are gradients that have come."""
        return len(self.arrived) == len(self.indices)

    def fill(self, tensors: Mapping[int, Tensor] | Sequence[Tensor], before: Sequence[Sequence[Tensor]] = ()) -> None:
        """Write one operand, and add others to it in their order."""
        copy_all(self._views, [tensors[index] for index in self.indices])
        for others in before:
            add_all_(self._views, [others[index] for index in self.indices])
        copy_all(self._copies, self._copied)

    def take_over(self) -> None:
        """Free the memory of large gradients that have come early: they are views of the bucket, which has them."""
        for index, view in zip(self.indices, self._views, strict=True):
            if view.numel() >= WORTH_FREEING_ELEMENTS:
                gradient: Any = self.arrived[index]  # the method has no type for a tensor
                gradient.set_(view)
        self.arrived.clear()

    def receive(self) -> None:
        """Give the tensors the values that have come in another dtype."""
        copy_all(self._copied, self._copies)
