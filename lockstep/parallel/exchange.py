"""Exchanges: how the towers' gradients become one update. Here are the values; `transports` moves the bytes.

An exchange decides which gradients an update sees, and knows nothing else: not what the tensors mean, nor the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from lockstep.checks import check_type, wrong_type
from lockstep.errors import InputError
from lockstep.parallel.transports import CollectiveTransport, SharedMemoryTransport
from lockstep.parallel.tree import PartialSum, TreeSum
from lockstep.workers.rank import Worker

if TYPE_CHECKING:
    from torch import Tensor


TransportName = Literal["shared_memory", "gloo", "nccl"]


class Connection(Protocol):
    """An exchange between the workers of one run, for one list of tensors."""

    def total(self, sums: TreeSum) -> PartialSum:
        """The sum over all towers of what each worker added up; valid until the next call.

        It is never to be changed, but where it says that it is `owned`.

        Raises:
            PeerLostError: another worker is gone.
        """
        ...

    def close(self) -> None:
        """Give back memory and connections."""
        ...


class Exchange(Protocol):
    """How the towers' gradients become one update."""

    def connect(self, worker: Worker, num_towers: int) -> Connection:
        """Connect this worker with the others; all of them call it together."""
        ...


@dataclass(frozen=True)
class Alone:
    """One worker hosts all towers: the tree is finished where it stands."""

    def connect(self, worker: Worker, num_towers: int) -> Connection:
        """Nothing to connect.

        Raises:
            InputError: there are other workers, and their towers would be left out.
        """
        if worker.num_workers > 1:
            raise InputError(
                "Alone leaves out the towers of the other workers.",
                given=f"Alone() with {worker.num_workers} workers",
                expected="one worker",
                hint="use AllReduce(), or start one worker",
            )
        return _NoTransport()


class _NoTransport:
    def total(self, sums: TreeSum) -> PartialSum:
        return sums.total()

    def close(self) -> None:
        return


@dataclass(frozen=True)
class AllReduce:
    """Every worker gets the sum over all towers and makes the same update."""

    transport: TransportName | None = None
    """None: shared memory between workers of one CPU host, nccl between GPUs, gloo otherwise."""
    exact: bool = False
    """Insist on the fixed tree: the same bits for every number of workers."""

    def resolve(self, worker: Worker) -> TransportName:
        """The transport for these workers."""
        if self.transport is not None:
            return self.transport
        if worker.device.type != "cpu":
            return "nccl"
        return "shared_memory" if worker.num_local_workers == worker.num_workers else "gloo"

    def connect(self, worker: Worker, num_towers: int) -> Connection:
        """Connect this worker with the others; all of them call it together.

        Raises:
            InputError: the transport cannot work between these workers.
        """
        if worker.num_workers == 1:
            return _NoTransport()
        name = self.resolve(worker)
        if name == "shared_memory":
            self._check_one_cpu_host(worker)
            return SharedMemoryTransport(worker, num_towers)
        if self.exact:
            raise InputError(
                f"The exact sum is not to be had over {name}.",
                given=f"AllReduce(transport={name!r}, exact=True) with {worker.num_workers} workers",
                expected="one worker, or workers of one CPU host that exchange through shared memory",
                hint="leave exact=False, or train on the workers of one CPU host",
            )
        return CollectiveTransport(worker, name)

    def _check_one_cpu_host(self, worker: Worker) -> None:
        if worker.device.type != "cpu" or worker.num_local_workers != worker.num_workers:
            raise InputError(
                "Shared memory reaches only the workers of one CPU host.",
                given=f"device {worker.device}, {worker.num_local_workers} of {worker.num_workers} workers here",
                expected="all workers on the CPU of one host",
                hint="leave the transport out to let Lockstep choose",
            )


_HINT = 'return {"name of a loss": how many things it is a sum over}'
Counts = Mapping[str, "float | Tensor"]


class Reducer:
    """The connections that one step has with the other workers; those for numbers alone are made when first used."""

    def __init__(self, exchange: Exchange, worker: Worker, num_leaves: int, mine: Sequence[int]) -> None:
        self.num_leaves = num_leaves
        """Leaves of the tree: towers, or workers that run theirs as one."""
        self._exchange = exchange
        self._worker = worker
        self._mine = mine
        self._gradients = exchange.connect(worker, num_leaves)
        self._numbers: dict[int, Connection] = {}
        self._counted: tuple[str, ...] | None = None

    def total(self, sums: TreeSum) -> PartialSum:
        """The sum over all towers; valid until the next call, to be changed only where it is owned."""
        return self._gradients.total(sums)

    def numbers(self, of_each: Sequence[list[float]]) -> list[float]:
        """Numbers of each of this worker's leaves summed over all; all workers call it together, with as many."""
        count = len(of_each[0])
        if count not in self._numbers:
            self._numbers[count] = self._exchange.connect(self._worker, self.num_leaves)
        sums = TreeSum()
        for place, numbers in zip(self._mine, of_each, strict=True):
            sums.add(place, PartialSum([], numbers))
        return self._numbers[count].total(sums).numbers

    def counted(self, of_each: Sequence[Counts]) -> dict[str, float]:
        """Counts by name, of each of this worker's leaves, summed over all.

        Raises:
            InputError: a count is negative or not finite, or the names are not those of the first time.
            WorkerError: the workers count different things.
        """
        for counts in of_each:
            check_type("what counts(batch) returns", counts, Mapping, expected="a dict", hint=_HINT)
        names = tuple(sorted(of_each[0]))
        if self._counted is None:
            self._worker.group.agree("what is counted", list(names))
            self._counted = names
        for counts in of_each:
            if tuple(sorted(counts)) != self._counted:
                raise _unlike(counts, self._counted)
        values = [[_count(name, counts[name]) for name in names] for counts in of_each]
        return dict(zip(names, self.numbers(values), strict=True)) if names else {}


def _count(name: str, count: float | Tensor) -> float:
    if not isinstance(count, int | float) and (not hasattr(count, "item") or count.numel() != 1):
        raise wrong_type(f"the count of {name!r}", count, expected="a number, or a tensor of one", hint=_HINT)
    value = float(count if isinstance(count, int | float) else count.item())
    if not 0 <= value < math.inf:
        raise InputError(
            f"The count of {name!r} is {value}.",
            given=f"counts(batch)[{name!r}] = {value}",
            expected="a finite number, 0 or more",
            hint="count the things that the loss is a sum over",
        )
    return value


def _unlike(counts: Counts, names: tuple[str, ...]) -> InputError:
    return InputError(
        "The count function returned other names than before.",
        given=f"counts of {tuple(counts)}",
        expected=f"counts of {names}, as at the start",
        hint="return the same names for every batch, with 0 where there is nothing to count",
    )
