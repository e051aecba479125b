"""The parameter server: the chief publishes parameters by version, and takes the gradients that other workers compute.

The chief has a `Server`, each other worker a `Client`, which fetches parameters and leases, and sends gradients. A
thread of the server talks to each client: it takes gradients into memory, asks the rule for leases, and answers. None
of them touches the model: the main thread takes the gradients of an update, makes it, and publishes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lockstep.errors import LockstepError, WorkerError
from lockstep.exchange.transports import create_memory
from lockstep.exchange.tree import PartialSum
from lockstep.served import wire
from lockstep.served.leases import Leases, SliceLease
from lockstep.tensors import copy_all
from lockstep.workers.group import JSON
from lockstep.workers.rank import Worker

LINGER_SECONDS = 0.005
"""How long a paused server lets a worker wait for a lease before it tells it the newest version without one."""
COUNT_SECONDS = 0.05
"""How long a worker waits for what others count in their slices of its batch before it counts there itself."""
_LOOK_SECONDS = 0.05

Result = TypeVar("Result")


# The chief's side -----------------------------------------------------------------------------------------------------


class Arrival(NamedTuple):
    """The gradient of a slice, as a worker has computed it."""

    lease: SliceLease
    partial: PartialSum
    """Its tensors may be changed; they are valid until the next version is published."""
    message: JSON
    block: int
    """Where the tensors lie in the memory of the server."""


class _Newest(NamedTuple):
    message: JSON
    version: int
    block: int


@dataclass(eq=False)
class _Client:
    """A worker that computes, as the server knows it."""

    rank: int
    frames: wire.Frames
    is_here: bool
    """It maps the chief's memory."""
    version: int = -1
    reads: int | None = None
    """The block in which it may be reading what was published."""
    lease: SliceLease | None = None
    block: int = 0
    """The block for the gradient of its lease."""
    knows_end: bool = False


class Server:
    """The chief's end: publishes parameters, and takes gradients. The other workers make a `Client` at the same time.

    All of them are given tensors like those of a gradient, and like those that are published. The server asks the rule
    of leases in several threads; others look at it under `lock`.

    Raises:
        WorkerError: a worker has other tensors, or does not reach the chief.
    """

    def __init__(
        self, worker: Worker, gradients: Sequence[Tensor], published: Sequence[Tensor], leases: Leases
    ) -> None:
        self.lock = threading.RLock()
        self._worker, self._leases = worker, leases
        layouts = wire.agreed_layouts(worker, gradients, published)
        num_computing = worker.num_workers - 1
        # A worker reads one version at most, one is the newest, and one is being written. There are never more
        # gradients: late ones that workers compute, those begun for the next update, and those of the last one.
        plan = wire.MemoryPlan(*layouts, num_computing + 2, 2 * (num_computing + leases.required))
        descriptor = create_memory(plan.num_bytes)
        self._memory = plan.map(descriptor)
        self._published, self._gradients = wire.BlockUse(plan.num_published), wire.BlockUse(plan.num_gradients)
        self._arriving, self._answering = threading.Condition(self.lock), threading.Condition(self.lock)
        self._newest: _Newest | None = None
        self._held: dict[int, Arrival] = {}
        self._taken: list[Arrival] = []
        self._paused_at: float | None = None
        self._end: list[JSON] = []
        self._is_closed = False
        self._failed: LockstepError | None = None
        self._said = ""
        self._clients = self._connect(descriptor, plan)
        self._threads = [
            threading.Thread(target=self._serve, args=[client], name=f"lockstep-serve-{client.rank}", daemon=True)
            for client in self._clients.values()
        ]
        for thread in self._threads:
            thread.start()

    # The main thread --------------------------------------------------------------------------------------------------

    def publish(self, tensors: Sequence[Tensor], message: JSON) -> None:
        """Publish what workers compute with from now on: the version of the leases, and what each is told of it."""
        with self.lock:
            block = self._published.take()
        with torch.no_grad():
            copy_all(self._memory.published[block].tensors, list(tensors))
        with self.lock:
            if self._newest is not None:
                self._published.release(self._newest.block)
            self._newest = _Newest(message, self._leases.version, block)
            for arrival in self._taken:
                self._gradients.release(arrival.block)
            self._taken = []
            self._leases.publish()
            self._answering.notify_all()

    def next_update(self) -> list[Arrival]:
        """Wait for the gradients of the next update, and return them in the order of the stream.

        Raises:
            PeerLostError: a worker is known to be gone, or all of them are.
            WorkerError: a worker has sent what cannot be read.
        """
        with self._worker.pulse.waiting(), self.lock:
            while (taken := self._leases.take()) is None:
                if len(self._leases.held) >= self._leases.required:  # what is still missing may be leased once more
                    self._answering.notify_all()
                self._arriving.wait(_LOOK_SECONDS)
                self._check()
                if not self._leases.workers:
                    raise wire.lost(self._worker, "all workers that compute", self._said)
            self._taken = [self._held.pop(lease.slice) for lease in taken]
            for slice_ in self._held.keys() - self._leases.held.keys():  # they have become too old
                self._gradients.release(self._held.pop(slice_).block)
            staleness = self._leases.staleness
            self._memory.oldest.fill_(0 if staleness is None else self._leases.version - staleness)
            return self._taken

    def pause(self) -> None:
        """Tell workers that would wait for a lease the newest version without one: they may be needed elsewhere."""
        with self.lock:
            self._paused_at = time.monotonic()
            self._answering.notify_all()

    def resume(self) -> None:
        """Let workers wait for a lease again."""
        with self.lock:
            self._paused_at = None

    def end(self, message: JSON) -> None:
        """Lease nothing more; each worker that asks is told that this is the end, and the newest version."""
        with self.lock:
            self._end = [message]
            self._answering.notify_all()

    def wait_for_end(self) -> None:
        """Wait until each worker knows that this is the end, or is gone.

        Raises:
            PeerLostError: a worker is known to be gone.
        """
        with self.lock:
            while not all(client.knows_end for client in self._clients.values()):
                self._arriving.wait(_LOOK_SECONDS)
                self._check()

    def close(self) -> None:
        """End all connections; a worker that does not know the end takes the chief for lost."""
        with self.lock:
            self._is_closed = True
            self._answering.notify_all()
        for client in self._clients.values():
            client.frames.shut_down()
        for thread in self._threads:
            thread.join()
        for client in self._clients.values():
            client.frames.close()

    def _check(self) -> None:
        self._worker.group.check_peers()
        if self._failed is not None:
            raise self._failed

    def _connect(self, descriptor: int, plan: wire.MemoryPlan) -> dict[int, _Client]:
        worker = self._worker
        hosts: list[str] = worker.group.gather(worker.host)
        reception = wire.Reception(worker, hosts, descriptor)
        try:
            worker.group.broadcast({**reception.place, "blocks": [plan.num_published, plan.num_gradients]})
            wire.all_reached(worker, "")
            connections = reception.wait()
        finally:
            reception.close()
            os.close(descriptor)
        return {rank: _Client(rank, wire.Frames(each), hosts[rank] == hosts[0]) for rank, each in connections.items()}

    # A thread for each worker -----------------------------------------------------------------------------------------

    def _serve(self, client: _Client) -> None:
        try:
            while True:
                self._handle(client, client.frames.receive())
        except wire.NoMessageError as error:
            self._failed = WorkerError(
                f"What {self._worker.group.names[client.rank]} has sent to the chief cannot be read.",
                given=str(error),
                expected="what a worker that computes sends",
                hint="start all workers with the same version of Lockstep",
            )
        except OSError as error:
            self._said = f"{self._worker.group.names[client.rank]}: {str(error).lower()}"
        except LockstepError as error:  # of what is to be sent
            self._failed = error
        finally:
            self._leave(client)

    def _handle(self, client: _Client, request: Mapping[str, Any]) -> None:
        match request:
            case {"gradient": [int(slice_), int(version), list(numbers)], "message": message}:
                if client.lease != SliceLease(client.rank, slice_, version) or not all(map(_is_number, numbers)):
                    raise wire.NoMessageError(
                        f"a gradient of slice {slice_}, version {version}, which it has no lease of"
                    )
                self._take_gradient(client, client.lease, numbers, message)
            case {"fetch": True}:
                self._answer(client)
            case {"counts": list(counts), "batch": list(batch)} if _are_counts(counts, batch):
                client.frames.send(self._share_counts(client, dict(counts), batch))
            case {"oldest": True}:
                client.frames.send({"oldest": int(self._memory.oldest)})
            case _:
                raise wire.NoMessageError(f"{request}"[:80])

    def _take_gradient(self, client: _Client, lease: SliceLease, numbers: list[float], message: JSON) -> None:
        block = self._memory.gradients[client.block]
        if not client.is_here:
            client.frames.receive_into(block.bytes)
        with self.lock:
            client.lease = None
            if self._leases.arrive(*lease):
                partial = PartialSum([*block.tensors], numbers, owned=True)
                self._held[lease.slice] = Arrival(lease, partial, message, client.block)
                self._arriving.notify()
            else:
                self._gradients.release(client.block)
                self._answering.notify_all()  # its slice may be leased anew

    def _answer(self, client: _Client) -> None:
        """Send a worker the newest version, unless it has it, with a lease; it waits until there is one."""
        with self.lock:
            self._forget_blocks(client)
            newest, slice_ = self._wait_for_lease(client)
            answer: dict[str, JSON] = {"version": newest.version, "slice": slice_, "end": self._end}
            if slice_ is not None:
                client.lease, client.block = SliceLease(client.rank, slice_, newest.version), self._gradients.take()
                answer["gradient"] = client.block
            if client.version != newest.version:
                client.version, client.reads = newest.version, self._published.share(newest.block)
                answer |= {"published": newest.block, "message": newest.message}
        if client.is_here or client.reads is None:
            client.frames.send(answer)
        else:
            client.frames.send(answer, self._memory.published[client.reads].bytes)
            with self.lock:
                self._published.release(client.reads)
                client.reads = None
        if answer["end"]:
            with self.lock:
                client.knows_end = True
                self._arriving.notify()

    def _share_counts(
        self, client: _Client, counts: Mapping[int, Mapping[str, float]], batch: list[int]
    ) -> dict[str, JSON]:
        """Keep what a worker has counted; returns what is known of its batch, and the slices to count there itself.

        Those are the ones that it expects anyway, and in the end all that nobody else has counted: no worker waits
        long for another, and whoever counts a slice finds the same.
        """
        due = time.monotonic() + COUNT_SECONDS
        with self.lock:
            self._leases.counts |= counts
            self._answering.notify_all()
            while (missing := self._leases.uncounted(batch)) and not self._is_closed:
                patience = due - time.monotonic()
                if patience <= 0:
                    break
                if expected := self._leases.uncounted(batch, client.rank):
                    missing = expected
                    break
                self._answering.wait(patience)
            known = self._leases.counts
            return {"counts": [[start, known[start]] for start in batch if start in known], "missing": missing}

    def _wait_for_lease(self, client: _Client) -> tuple[_Newest, int | None]:
        """The newest version, and a slice; none at the end, or where the server pauses at a version that is news."""
        while not self._is_closed:
            patience = None
            if self._newest is not None:
                if self._end:
                    return self._newest, None
                slice_ = self._leases.begin(client.rank)
                if slice_ is not None:
                    return self._newest, slice_
                if self._paused_at is not None and client.version < self._newest.version:
                    patience = self._paused_at + LINGER_SECONDS - time.monotonic()
                    if patience <= 0:
                        return self._newest, None
            self._answering.wait(patience)
        raise ConnectionAbortedError("the chief has closed the connection")

    def _leave(self, client: _Client) -> None:
        """Take back what a worker has that is gone."""
        client.frames.shut_down()
        with self.lock:
            self._forget_blocks(client)
            self._leases.leave(client.rank)
            client.knows_end = True
            self._arriving.notify()
            self._answering.notify_all()

    def _forget_blocks(self, client: _Client) -> None:
        if client.lease is not None:
            self._gradients.release(client.block)
        if client.reads is not None:
            self._published.release(client.reads)
        client.lease = client.reads = None


def _is_number(value: object) -> bool:
    return isinstance(value, float | int)


def _are_counts(counts: list[Any], batch: list[Any]) -> bool:
    """Whether these are pairs of a slice and what was counted there by name, and slices."""
    try:
        numbers = [*batch, *(number for start, counted in counts for number in (start, *counted.values()))]
    except (TypeError, ValueError, AttributeError):
        return False
    return all(map(_is_number, numbers))


# The workers' side ----------------------------------------------------------------------------------------------------


class Published(NamedTuple):
    """What a worker is told when it asks for work."""

    version: int
    tensors: Sequence[Tensor] | None
    """Its values, to be copied before the next `fetch`; None where the worker has had this version before."""
    message: JSON
    """What was published with a version that is new."""
    slice: int | None
    """The first position of the slice to compute; None where the worker is only told of a version, or the end."""
    is_over: bool
    end: JSON
    """What the chief says at the end."""


class Client:
    """A worker that computes for the chief; see `Server`.

    Its calls raise PeerLostError where the chief is gone, or a worker is known to be.

    Raises:
        WorkerError: this worker has other tensors than the chief, or a worker does not reach the chief.
    """

    def __init__(self, worker: Worker, gradients: Sequence[Tensor], published: Sequence[Tensor]) -> None:
        self._worker = worker
        layouts = wire.agreed_layouts(worker, gradients, published)
        worker.group.gather(worker.host)
        place = worker.group.broadcast(None)
        connection, descriptor = wire.reach(worker, place)
        self._frames = wire.Frames(connection, worker.group.check_peers)
        self._is_here = descriptor is not None
        """On the chief's host: tensors pass through its memory, else through memory of this worker alone."""
        if descriptor is None:
            self._memory = wire.ServedMemory(torch.zeros(1), *([wire.Block.alone(layout)] for layout in layouts))
        else:
            self._memory = wire.MemoryPlan(*layouts, *place["blocks"]).map(descriptor)
            os.close(descriptor)
        self._room = 0
        """The block for the gradient of the last lease."""

    def fetch(self) -> Published:
        """Wait for a lease, and for the newest version."""
        with self._worker.pulse.waiting():
            return self._call(self._fetch)

    def send(self, slice_: int, version: int, partial: PartialSum, message: JSON = None) -> None:
        """Send the gradient of a slice that was leased, and a message with it."""
        numbers = partial.numbers if isinstance(partial.numbers, list) else partial.numbers.tolist()
        block = self._memory.gradients[self._room]
        with torch.no_grad():
            copy_all(block.tensors, partial.tensors)
        request = {"gradient": [slice_, version, numbers], "message": message}
        self._call(lambda: self._frames.send(request, None if self._is_here else block.bytes))

    def is_late(self, version: int) -> bool:
        """Whether a gradient on the parameters of a version would be dropped; a round trip from another host."""
        oldest = self._memory.oldest if self._is_here else self._call(lambda: self._ask({"oldest": True}))["oldest"]
        return version < int(oldest)

    def share_counts(
        self, counts: Mapping[int, Mapping[str, float]], batch: Sequence[int]
    ) -> tuple[dict[int, Mapping[str, float]], list[int]]:
        """Tell what this worker has counted in slices, by name; returns what is known of a batch's slices.

        And those that this worker has to count itself; none, and all are known.
        """
        answer = self._call(lambda: self._ask({"counts": [*counts.items()], "batch": [*batch]}))
        return dict(answer["counts"]), answer["missing"]

    def close(self) -> None:
        """End the connection; a slice that this worker still has goes to others."""
        self._frames.shut_down()
        self._frames.close()

    def _fetch(self) -> Published:
        self._frames.send({"fetch": True})
        answer = self._frames.receive()
        end = answer["end"]
        tensors = None
        if "published" in answer:
            block = self._memory.published[answer["published"] if self._is_here else 0]
            if not self._is_here:
                self._frames.receive_into(block.bytes)
            tensors = block.tensors
        if self._is_here:
            self._room = answer.get("gradient", 0)
        last = end[0] if end else None
        return Published(answer["version"], tensors, answer.get("message"), answer["slice"], bool(end), last)

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._frames.send(request)
        return self._frames.receive()

    def _call(self, function: Callable[[], Result]) -> Result:
        """Raise the end of the connection as what it is, once the cause is known."""
        try:
            return function()
        except ConnectionError as error:
            said = str(error).lower()
        raise wire.lost(self._worker, "the chief", said)
