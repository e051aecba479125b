"""Collective calls of torch.distributed: one process group a process and backend, and errors that say what they are.

gloo runs in threads of the host, which waits for it; NCCL runs on the device, and the host waits when it reads. Either
way the wait ends when another worker is found to be gone: the communicator is aborted, and PeerLostError names it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

# The stores are torch.distributed's, by the name under which they have types.
from torch._C._distributed_c10d import ErrorType, HashStore, PrefixStore

from lockstep.errors import InputError, PeerLostError, WorkerError
from lockstep.spans import Recorder, recording
from lockstep.workers.group import timeout_seconds
from lockstep.workers.limits import TIMEOUT_SECONDS
from lockstep.workers.peers import says_peer_is_lost
from lockstep.workers.rank import Worker

Backend = Literal["gloo", "nccl"]
Result = TypeVar("Result")

_LOOK_EVERY = timedelta(seconds=1)
_MAKING_SECONDS: Mapping[Backend, float] = {"gloo": 12.0, "nccl": TIMEOUT_SECONDS}
"""How long making a group may take, once all workers are there; gloo waits for a connection five times as long."""
_MAKING_AGAIN_SECONDS = 3.0
"""The same of gloo, where they try again in the next generation."""
_CLOSING_SECONDS = 2.0
"""How long a worker that fails waits until its group is closed; what still runs then ends with the process."""
_HINTS: Mapping[Backend, str] = {
    "gloo": "set GLOO_SOCKET_IFNAME to the network interface that leads to the other hosts, and let them connect to "
    "every port of each other",
    "nccl": "set NCCL_DEBUG=INFO to see what NCCL does, and NCCL_SOCKET_IFNAME to choose the network",
}
_NAN_BYTE = 0xFF
"""The byte that repeated makes a NaN of any float type."""
_open: dict[str, Collectives] = {}
"""The collective calls of this process, by backend."""


class Messages(NamedTuple):
    """Tensors for other workers, by rank, and tensors for what comes from them: those of a pair keep their order."""

    sends: Sequence[tuple[int, Tensor]]
    receives: Sequence[tuple[int, Tensor]]


def collectives(worker: Worker, backend: Backend) -> Collectives:
    """The collective calls of this process over a backend; all workers make the first call together."""
    if backend not in _open:
        _open[backend] = Collectives(worker, backend)
    return _open[backend]


class Collectives:
    """The collective calls of a worker over one backend; all workers make the same ones in the same order.

    All that a process exchanges over a backend shares one process group: under NCCL each is a communicator of its own,
    which takes seconds to make and hundreds of MB on the device. All workers make their groups together.

    Raises:
        InputError: two workers use the same GPU.
        WorkerError: the group cannot be made.
    """

    def __init__(self, worker: Worker, backend: Backend) -> None:
        self._worker, self._backend = worker, backend
        self._group: dist.ProcessGroup | None = None
        self._timeout = timedelta(seconds=timeout_seconds(worker.pulse))
        self._is_aborted = False
        self._begun: list[dist.Work | None] = []
        """Calls that nobody has waited for yet."""
        self._lock = threading.Lock()
        # Whoever is late is waited for here, by the store, which knows whether it lives.
        worker.group.barrier(f"a process group over {backend}")
        others = _sockets()
        group = self._group = self._call(self._make_group)
        self._sockets = {name: descriptor for name, descriptor in _sockets().items() if name not in others}
        worker.group.at_end(self.close)
        if worker.group.membership is not None:
            worker.group.membership.on_failure(self.abort)
        if backend == "nccl":
            # Not every backend of torch has it.
            self._noticed: Callable[[], ErrorType] | None = getattr(
                group._get_backend(worker.device), "get_error", None
            )
            worker.group.watch(self._check_enqueued)

    @property
    def are_enqueued(self) -> bool:
        """Whether calls only begin here: on the current stream of the device, as its kernels do."""
        return self._backend == "nccl"

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        """Sum each tensor over all workers, in place."""
        self._run(lambda each, asynchronous: dist.all_reduce(each, group=self._group, async_op=asynchronous), tensors)

    def begin_all_reduce(self, tensor: Tensor, number: int) -> None:
        """Begin to sum a bucket over all workers, in place, beside what this worker computes; `finish` ends it."""
        work = self._call(lambda: dist.all_reduce(tensor, group=self._group, async_op=True))
        self._begun.append(work)
        if (recorder := recording()) is not None and work is not None and not self.are_enqueued:
            _record(recorder, work, f"bucket {number}", tensor.nbytes)

    def finish(self) -> None:
        """Wait for calls that were begun; what is enqueued waits on the device."""
        with self._worker.pulse.waiting():
            self._call(lambda: self._wait(self._begun))
        self._begun = []

    def check_finished(self) -> None:
        """Refuse more calls where an error, which the script has caught, came between those begun and `finish`.

        Raises:
            WorkerError: the others still wait for calls of that step.
        """
        if self._begun:
            self._worker.group.check_peers()  # if one of them is lost, that is why
            raise WorkerError(
                "An error has cut the exchange of an earlier step short.",
                given=f"one more step on {self._worker.name}, after the error was caught",
                expected="an error in the backward pass to end the run",
                hint="let it end the script, and resume from the last checkpoint",
            )

    def all_gather(self, rows: Sequence[Tensor], mine: Tensor) -> None:
        """Fill the rows, one for each worker, with what each of them gives."""
        self._run(lambda each, asynchronous: dist.all_gather(list(rows), each, self._group, asynchronous), [mine])

    def exchange(self, messages: Messages) -> None:
        """Send and receive messages, all at once.

        What is only enqueued, and then does not come since a worker is lost, is NaN.
        """
        self.check_finished()
        begin = self._enqueue if self.are_enqueued else self._pass
        with self._worker.pulse.waiting():
            self._call(lambda: begin(messages))

    def abort(self) -> None:
        """End whatever waits in the group, here and at the other ends of its connections; from any thread."""
        with self._lock:
            if self._is_aborted or self._group is None:
                return
            self._is_aborted = True
            if self._backend == "nccl":
                self._group.abort()
                return
            # gloo has no abort, but a call ends when its connection does.
            for name, descriptor in _sockets().items():
                if self._sockets.get(name) == descriptor:
                    _shut_down(descriptor)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group: with the others, or at once where an error ends this worker."""
        _open.pop(self._backend, None)
        if error is not None:
            self.abort()
        # After an abort, too: torch would make the group of the next generation over the workers of this one.
        with self._lock:
            with suppress(ValueError):  # a script may have destroyed it already
                dist.destroy_process_group(self._group)
            # gloo closes its connections when nobody holds the group, and waits for the calls that run in it. It
            # forgets one whose write meets a connection that was just shut down: that lasts as long as its timeout.
            held = [self._begun, self._group]
            self._group, self._begun = None, []
        closing = threading.Thread(target=held.clear, name="lockstep-closing", daemon=True)
        closing.start()
        closing.join(_CLOSING_SECONDS if error is not None else None)

    def _make_group(self) -> dist.ProcessGroup:
        worker, timeout = self._worker, timedelta(seconds=_MAKING_SECONDS[self._backend])
        if worker.pulse.generations is not None and self._backend == "gloo":
            # For a worker that is lost meanwhile gloo waits all the time; the others go on after that.
            timeout = timedelta(seconds=_MAKING_AGAIN_SECONDS)
        device = worker.device if self._backend == "nccl" else None
        if device is not None:
            # Otherwise torch ends the process when NCCL notices an error, without a word of ours.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        if dist.is_initialized():
            group: dist.ProcessGroup | None = dist.new_group(backend=self._backend, timeout=timeout, device_id=device)
        else:
            try:
                dist.init_process_group(
                    self._backend,
                    store=PrefixStore("exchange", worker.group.store),
                    rank=worker.rank,
                    world_size=worker.num_workers,
                    timeout=timeout,
                    device_id=device,
                )
            finally:
                if not dist.is_initialized():
                    _number_groups_anew()
            group = dist.group.WORLD
        assert group is not None, "this worker is one of its members"
        group.set_timeout(self._timeout)
        return group

    def _run(self, begin: Callable[[Tensor, bool], dist.Work | None], tensors: Iterable[Tensor]) -> None:
        """Begin a call for each tensor, then wait for all of them."""
        self.check_finished()
        with self._worker.pulse.waiting():
            self._call(lambda: self._wait([begin(tensor, not self.are_enqueued) for tensor in tensors]))

    def _wait(self, works: Sequence[dist.Work | None]) -> None:
        """Wait for calls, and meanwhile see whether the others live; the host does not wait for what is enqueued."""
        for work in filter(None, works):
            if self._worker.group.membership is not None and not self.are_enqueued:
                while not _has_ended(work, _LOOK_EVERY):
                    self._worker.group.check_peers()
            work.wait()

    def _pass(self, messages: Messages) -> None:
        works = [dist.irecv(tensor, group=self._group, group_src=rank) for rank, tensor in messages.receives]
        works += [dist.isend(tensor, group=self._group, group_dst=rank) for rank, tensor in messages.sends]
        # In one wait each: gloo closes its connections when the wait for a message is over in vain. If a worker is lost
        # it ends all the same, since the thread that hears of it calls `abort`. What `set_timeout` sets does not hold
        # for messages.
        for work in filter(None, works):
            work.wait(self._timeout)

    def _enqueue(self, messages: Messages) -> None:
        for _, tensor in messages.receives:
            tensor.view(torch.uint8).fill_(_NAN_BYTE)
        calls = [
            dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=rank) for rank, tensor in messages.receives
        ]
        calls += [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=rank) for rank, tensor in messages.sends]
        for work in dist.batch_isend_irecv(calls):
            work.wait()  # on the device: what is enqueued next comes after it

    def _check_enqueued(self) -> None:
        """Raise what NCCL has noticed since its calls were enqueued."""
        error = ErrorType.SUCCESS if self._is_aborted or self._noticed is None else self._noticed()
        if error != ErrorType.SUCCESS:
            raise self._lost(f"NCCL reports {error.name}")

    def _call(self, function: Callable[[], Result]) -> Result:
        """Raise errors of torch.distributed as what they are, with the useful line of their text."""
        try:
            return function()
        except RuntimeError as error:
            # Its traceback would keep the calls alive, and with them connections by whose end others notice ours.
            cause = error.with_traceback(None)
        # Outside the except block, for the same reason.
        named = self._named(cause)
        if named is cause:
            raise cause
        raise named from cause

    def _named(self, error: RuntimeError) -> Exception:
        text = str(error)
        said = useful_line(text)
        if isinstance(error, torch.OutOfMemoryError):
            return error
        if "out of memory" in said:
            return torch.OutOfMemoryError(f"{self._worker.name}, in the exchange over {self._backend}: {said}")
        if "Duplicate GPU" in said:
            return InputError(
                "Two workers use the same GPU.",
                given=f"{self._worker.name} on {self._worker.device}: {said}",
                expected="a GPU of its own for each worker that exchanges over nccl",
                hint="start at most as many workers on a host as it has GPUs, or say how many share one: "
                "--workers-per-device, or workers_per_device of ls.join",
            )
        # While the group is made, the workers find each other's addresses in the store, or wait for them in vain.
        is_of_store = isinstance(error, (dist.DistStoreError, dist.DistNetworkError))
        if says_peer_is_lost(text) or is_of_store or self._is_aborted:
            return self._lost(said)
        if isinstance(error, dist.DistBackendError) or "connectFullMesh failed" in said:
            self._worker.group.check_peers()  # who could not connect may have said so
            return WorkerError(
                f"The exchange over {self._backend} has failed on {self._worker.name}.",
                given=said,
                expected="devices and a network that can be used",
                hint=_HINTS[self._backend],
            )
        return error

    def _lost(self, said: str) -> PeerLostError:
        self.abort()  # the neighbours, too, are to notice at once
        if self._worker.group.membership is not None:
            return self._worker.group.membership.connection_lost(said)
        return PeerLostError(
            f"{self._worker.name} lost another worker in the exchange.",
            given=said,
            expected="all workers to take part",
            hint="read what the other workers said last; their launcher reports the cause",
        )


def _record(recorder: Recorder, work: dist.Work, name: str, num_bytes: int) -> None:
    """Record a call from now until it is done, of which a thread of gloo tells."""
    began = perf_counter()
    work.get_future().add_done_callback(
        lambda _: recorder.add((name, 0), name, began, perf_counter(), {"bytes": num_bytes})
    )


def _number_groups_anew() -> None:
    """Have torch number the groups of this process from 0 again, as it does when one is destroyed.

    It does not where it has failed to make one, since a worker was lost meanwhile; but those with which this one will
    make the next are to give it the same number, by which they find each other in the store.
    """
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def _has_ended(work: dist.Work, timeout: timedelta) -> bool:
    with suppress(RuntimeError):  # either the time is over, or the call has failed: then it says so again
        work.wait(timeout)
    return work.is_completed()


def useful_line(text: str) -> str:
    """The line that says most in what torch.distributed says: NCCL's last error, else its result, else the first."""
    lines = [line.strip() for line in text.splitlines()]
    last = [line for before, line in pairwise(lines) if before == "Last error:" and not line.startswith("Exception ")]
    results = [line for line in lines if line.startswith("nccl")]
    return next(filter(None, [*last, *results, *lines]), "")


def _sockets() -> dict[str, int]:
    """The sockets of this process: their descriptors, by a name that belongs to one socket alone."""
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed since
            name = str(descriptor.readlink())
            if name.startswith("socket:"):
                found[name] = int(descriptor.name)
    return found


def _shut_down(descriptor: int) -> None:
    """Shut down a connection to another process; not a socket that listens, whose end gloo takes for a bug."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        is_network = connection.family in (socket.AF_INET, socket.AF_INET6)
        if is_network and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)
