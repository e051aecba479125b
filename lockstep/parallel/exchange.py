"""Exchanges: how the towers' gradients become one update. Here are the values; `transports` moves the bytes.

An exchange decides which gradients an update sees, and knows nothing else: not what the tensors mean, nor the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from lockstep.errors import InputError
from lockstep.parallel.collective import CollectiveTransport
from lockstep.parallel.shared_memory import SharedMemoryTransport
from lockstep.parallel.tree import Summand, TreeSum
from lockstep.workers.rank import Worker

TransportName = Literal["shared_memory", "gloo", "nccl"]


class Connection(Protocol):
    """An exchange between the workers of one run, for one list of tensors."""

    def total(self, sums: TreeSum) -> Summand:
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
    def total(self, sums: TreeSum) -> Summand:
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
