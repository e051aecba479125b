"""Exchanges: how the towers' gradients become one update; transports move the bytes.

An exchange decides which gradients an update sees, and knows neither what the tensors mean nor the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch

from lockstep.checks import check_type, wrong_type
from lockstep.errors import InputError
from lockstep.exchange.tree import GradientHook, PartialSum, TreeSum, rows_of_workers
from lockstep.tensors import numbers_on, reading_waits

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.workers.rank import Worker

TransportName = Literal["shared_memory", "gloo", "nccl"]
Compression = Literal["bf16", "fp16"]
Counts = Mapping[str, "float | Tensor"]

_COUNTS_HINT = 'return {"name of a loss": how many things it is a sum over}'


class Connection(Protocol):
    """The connection of one worker with the others, for one list of tensors."""

    def total(self, sums: TreeSum) -> PartialSum:
        """The sum over all towers, from each worker's own; valid until the next call, to be changed only if `owned`."""
        ...

    def close(self) -> None:
        """Give back memory and connections."""
        ...


@runtime_checkable
class OverlappedConnection(Connection, Protocol):
    """A connection that sends gradients while the backward pass that computes them goes on."""

    def start(self, sums: TreeSum, last: int) -> Mapping[int, GradientHook]:
        """Begin the last tower of this worker, after the sums over the others: hooks for gradients, by their index.

        Where there are any, the tower is then put beside the sums, not added: `TreeSum.put`.
        """
        ...


class Exchange(Protocol):
    """How the towers' gradients become one update."""

    def connect(self, worker: Worker, num_towers: int) -> Connection:
        """Connect this worker with the others; all of them call it together."""
        ...


@dataclass(frozen=True)
class Alone:
    """One worker hosts all towers, and adds them up by itself."""

    def connect(self, worker: Worker, num_towers: int) -> Connection:
        """Connect nothing, and refuse other workers, whose towers would be left out."""
        if worker.num_workers > 1:
            raise InputError(
                "Alone leaves out the towers of the other workers.",
                given=f"Alone() with {worker.num_workers} workers",
                expected="one worker",
                hint="use AllReduce(), or start one worker",
            )
        return _NoTransport()


class _NoTransport:
    total = staticmethod(TreeSum.total)

    def close(self) -> None:
        return


@dataclass(frozen=True)
class AllReduce:
    """Every worker gets the sum over all towers and makes the same update.

    Over gloo and nccl, gradients are sent while the backward pass of a worker's last tower goes on, where they are more
    than 1 MB: in buckets of 1 MB, then 25 MB, in the reverse order of the parameters, the same on all workers. They are
    sent after it with `tower_gradient_transforms`, with synchronised batch norm, with reentrant checkpointing, and
    where a parameter has post-accumulate-grad hooks of the script's own. The bits are the same either way.
    """

    transport: TransportName | None = None
    """None: shared memory between workers of one CPU host, nccl between GPUs, gloo otherwise, and where workers share
    a GPU."""
    exact: bool = False
    """Add up by the fixed tree over any transport: the same bits for every number of workers, from one to one a tower.
    On GPUs torch computes with deterministic algorithms: `lockstep.towers.backends`."""
    compression: Compression | None = None
    """Over gloo and nccl: send float32 gradients, and add them up between workers, in bfloat16 or float16. Half the
    bytes, for slow networks, and a relative error of about 2**-9 or 2**-12 for each addition; beyond 65,504, float16 is
    infinite, and the attempt is refused as not finite. Sums over the towers of one worker, statistics and losses keep
    their bits."""

    def __post_init__(self) -> None:
        if self.compression not in (None, "bf16", "fp16"):
            raise InputError(
                "There is no such compression of gradients.",
                given=f"AllReduce(compression={self.compression!r})",
                expected="'bf16', 'fp16' or None",
                hint="choose 'bf16', which has the range of float32",
            )
        if self.compression and self.exact:
            raise InputError(
                "A sum of compressed gradients is not exact.",
                given=f"AllReduce(exact=True, compression={self.compression!r})",
                expected="one of the two",
                hint="leave exact=False, or leave the compression out",
            )

    def resolve(self, worker: Worker) -> TransportName:
        """Choose the transport for these workers."""
        if self.transport is not None:
            return self.transport
        if worker.device.type == "cpu" and worker.num_local_workers == worker.num_workers:
            return "shared_memory"
        return worker.backend

    def connect(self, worker: Worker, num_towers: int) -> Connection:
        """Connect this worker with the others; all of them call it together."""
        if worker.num_workers == 1:
            return _NoTransport()
        from lockstep.exchange.bucketed import BucketedTransport
        from lockstep.exchange.transports import SharedMemoryTransport, TreeTransport

        name = self.resolve(worker)
        if name == "shared_memory":
            self._check_one_cpu_host(worker)
            if self.compression:
                raise InputError(
                    "Nothing is compressed in shared memory.",
                    given=f"AllReduce(compression={self.compression!r}) with {worker.num_workers} workers on one host",
                    expected="workers that exchange over gloo or nccl",
                    hint="leave the compression out, or choose gloo: --set exchange.transport=gloo",
                )
            return SharedMemoryTransport(worker, num_towers)
        if name == "nccl" and worker.backend != "nccl":
            raise InputError(
                "NCCL needs an accelerator for each worker.",
                given=f"AllReduce(transport='nccl') on {worker.device}"
                + (", which workers share" if worker.shares_device else ""),
                expected="a transport that these workers can use",
                hint="leave the transport out to let Lockstep choose",
            )
        # Two terms have one sum, in whatever order all-reduce takes them.
        if self.exact and len(rows_of_workers(num_towers, worker.num_workers).additions) > 1:
            return TreeTransport(worker, name, num_towers)
        return BucketedTransport(worker, name, self.sent_dtype)

    @property
    def sent_dtype(self) -> torch.dtype | None:
        """The dtype in which float32 gradients travel over a network; None: their own."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}[self.compression] if self.compression else None

    def _check_one_cpu_host(self, worker: Worker) -> None:
        if worker.device.type != "cpu" or worker.num_local_workers != worker.num_workers:
            raise InputError(
                "Shared memory reaches only the workers of one CPU host.",
                given=f"device {worker.device}, {worker.num_local_workers} of {worker.num_workers} workers here",
                expected="all workers on the CPU of one host",
                hint="leave the transport out to let Lockstep choose",
            )


def is_exact(exchange: Exchange) -> bool:
    """Whether an exchange promises exact bits; one of a user's own does where it has a field `exact` that is true."""
    return bool(getattr(exchange, "exact", False))


class Reducer:
    """The connections of a training step: one for the gradients, one for counts, made when needed.

    All workers make the same calls. Leaves of the tree are towers, or workers that run all their towers at once; some
    are this worker's own.
    """

    def __init__(self, exchange: Exchange, worker: Worker, num_leaves: int, own: Sequence[int]) -> None:
        self.num_leaves = num_leaves
        self._exchange, self._worker, self._own = exchange, worker, own
        self._gradients = exchange.connect(worker, num_leaves)
        self.total = self._gradients.total
        """`total(sums)` sums over all towers; valid until the next call, to be changed only if `owned`."""
        self.overlapped = self._gradients if isinstance(self._gradients, OverlappedConnection) else None
        """The connection for the gradients, where it takes them as they come."""
        self._counts: Connection | None = None
        self._counted: tuple[str, ...] = ()

    def counted(self, of_each: Sequence[Counts]) -> dict[str, float | Tensor]:
        """Sum over all leaves the counts by name of each of this worker's leaves: the same names each time.

        On a device that the host would wait for, what is counted there stays there: scalars (float64), NaN where a
        count cannot be one.
        """
        for counts in of_each:
            check_type("what counts(batch) returns", counts, Mapping, expected="a dict", hint=_COUNTS_HINT)
        names = tuple(sorted(of_each[0]))
        if self._counts is None:
            self._worker.group.agree("what is counted", list(names))
            self._counted, self._counts = names, self._exchange.connect(self._worker, self.num_leaves)
        for counts in of_each:
            if tuple(sorted(counts)) != self._counted:
                raise InputError(
                    "The count function returned other names than before.",
                    given=f"counts of {tuple(counts)}",
                    expected=f"counts of {self._counted}, as at the start",
                    hint="return the same names for every batch, with 0 where there is nothing to count",
                )
        if not names:
            return {}
        values = [[_count(name, counts[name]) for name in names] for counts in of_each]
        sums = TreeSum()
        for leaf, numbers in zip(self._own, self._numbers(values), strict=True):
            sums.add(leaf, PartialSum([], numbers))
        total: Any = self._counts.total(sums).numbers
        return dict(zip(names, total.clone() if hasattr(total, "clone") else total, strict=True))

    def _numbers(self, values: list[list[float | Tensor]]) -> list[Any]:
        """The counts of each leaf: as plain numbers where nobody need wait for them, else as a tensor."""
        device = self._worker.device
        if all(isinstance(value, float) for counts in values for value in counts):
            is_sent = self._worker.num_workers > 1
            return [numbers_on(device, counts) if is_sent else counts for counts in values]  # type: ignore[arg-type]
        return [_on_device(counts, device) for counts in values]


def plain_counts(counts: Counts) -> dict[str, float]:
    """What a count function has returned, as numbers, for which the host waits; raises InputError as `Reducer` does."""
    check_type("what counts(batch) returns", counts, Mapping, expected="a dict", hint=_COUNTS_HINT)
    return {name: float(_count(name, value)) for name, value in counts.items()}


def _on_device(counts: Sequence[float | Tensor], device: torch.device) -> Tensor:
    each = [torch.full((), c, device=device) if isinstance(c, float) else c.detach().reshape(()) for c in counts]
    stacked = torch.stack([count.double() for count in each])
    return torch.where((stacked >= 0) & (stacked < math.inf), stacked, math.nan)


def _count(name: str, count: float | Tensor) -> float | Tensor:
    if not isinstance(count, int | float) and (not hasattr(count, "item") or count.numel() != 1):
        raise wrong_type(f"the count of {name!r}", count, expected="a number, or a tensor of one", hint=_COUNTS_HINT)
    if not isinstance(count, int | float) and reading_waits(count.device):
        return count
    value = float(count if isinstance(count, int | float) else count.item())
    if not 0 <= value < math.inf:
        raise no_count(name, value)
    return value


def no_count(name: str, value: float) -> InputError:
    """Make the error for something that cannot be a count."""
    return InputError(
        f"The count of {name!r} is {value}.",
        given=f"counts(batch)[{name!r}] = {value}",
        expected="a finite number, 0 or more",
        hint="count the things that the loss is a sum over",
    )
