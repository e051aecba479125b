"""The rank of this process among the workers of a run: how it joins them, by the environment."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal, TypeVar

import torch

# The stores are torch.distributed's, by the name under which they have types.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lockstep.checks import PositiveInt, check_value
from lockstep.errors import InputError, LockstepError, PeerLostError, WorkerError
from lockstep.screen import log
from lockstep.workers import pulse as pulses
from lockstep.workers.cluster import WorkerEnvironment
from lockstep.workers.connections import address_towards, resolve_name
from lockstep.workers.devices import check_devices, choose_device, identity
from lockstep.workers.discovery import Location, discover
from lockstep.workers.group import Group, timeout_seconds
from lockstep.workers.limits import RESOLVE_SECONDS, STORE_ANSWER_SECONDS, TIMEOUT_SECONDS
from lockstep.workers.membership import Generation, Generations
from lockstep.workers.network import choose_network
from lockstep.workers.peers import have_watched
from lockstep.workers.pulse import Pulse
from lockstep.workers.socket_store import SocketStore
from lockstep.workers.store_server import LAUNCHED, inherited

_T = TypeVar("_T")


@dataclass(eq=False)
class Worker:
    """One process that drives one device. Rank, number of workers and group are others after `regroup`."""

    rank: int
    num_workers: int
    local_rank: int
    """Among the workers of the same host."""
    num_local_workers: int
    device: torch.device
    group: Group
    pulse: Pulse
    workers_per_device: int = 1
    """How many workers may share an accelerator."""
    chief_serves: bool = False
    """Whether worker 0 computes no towers, and shares the device of another worker."""
    shares_device: bool = False
    """Whether workers of this run, these or others, do share one."""
    host: str = ""
    """The name of its host; with a number where several hosts of the run have the same name."""
    is_newcomer: bool = False
    """It has been started in the place of a lost worker, and is in a group of its own until it regroups: not the chief,
    and one of as many workers as there were at the start."""

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        """The backend of torch.distributed for tensors on the device: NCCL needs an accelerator for each worker."""
        return "gloo" if self.device.type == "cpu" or self.shares_device else "nccl"

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes the checkpoints and summaries."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """The name in messages: "worker 3", or "worker 3 on node2" where the run has several hosts."""
        return self.group.names[self.rank]

    @property
    def num_started(self) -> int:
        """How many workers the run began with; fewer may be left, where they go on without those that are lost."""
        generations = self.pulse.generations
        return len(generations.places) if generations and generations.places else self.num_workers


_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_joined: Worker | None = None


def join(device: str | None = None, *, workers_per_device: int | None = None, chief_serves: bool = False) -> Worker:
    """Join the workers of this process's run; it is alone unless a launcher has started it among others.

    The first call waits for the others; later ones return the same worker.

    Args:
        device: "cpu" forces the CPU; by default each worker gets the accelerator of its local rank, where there is one:
            a CUDA device, as all others are left alone.
        workers_per_device: how many workers may share an accelerator, 1 by default. Those that do exchange over gloo,
            through the memory of the host; the bits are those of as many workers with a device each over gloo.
        chief_serves: with `Backups` and `Asynchronous` worker 0 computes no towers: it shares the device of the first
            worker that does, so that N accelerators have N workers that compute. The first call decides it: for a
            script that `lockstep run` starts, its flag --chief-serves.

    Raises:
        InputError: the environment is incomplete, there are fewer devices than workers on this host, several workers
            have the same one, or the process has joined with another device.
        WorkerError: the other workers cannot be reached.
    """
    global _joined
    if _joined is None:
        check_value("workers_per_device", workers_per_device, PositiveInt | None)
        _joined = _join(device, workers_per_device or 1, os.environ, chief_serves=chief_serves)
        if _joined.num_workers > 1:
            atexit.register(leave)
    joined = {"device": _joined.device.type, "workers_per_device": _joined.workers_per_device}
    for name, wish in {"device": device, "workers_per_device": workers_per_device}.items():
        if wish not in (None, joined[name]):
            raise InputError(
                f"This process has joined its run with another {name}.",
                given=f"{name}={wish!r} after {joined[name]!r}",
                expected=f"one {name} for the life of the process",
                hint=f"give the {name} in the first call of join, before anything that needs a worker",
            )
    return _joined


def regroup() -> Worker:
    """Join the workers that go on after a failure, or with which newcomers are to go on; returns this worker.

    Survivors call it once PeerLostError has named who is lost, outside of the `except` block, whose traceback would
    keep the old connections open; or all of them after the same step, when the pulse of one says `regroup_requested`.
    A newcomer calls it when it has built all that it needs. The group of before, and what was connected by it, ends
    here. The worker is the object that `join` has returned: its rank, and the number of workers, may be others now; its
    device and its name stay. If more are lost meanwhile, it joins those that are left then.

    Raises:
        InputError: the workers do not go on without one that is lost: nobody starts newcomers, or says who is left.
        PeerLostError: the others do not go on: the launcher ends them, perhaps to start all again.
    """
    worker = join()
    generations = generations_of(worker)
    worker.pulse.at(worker.pulse.step, "regroup")
    left, now = generations.joined, None
    worker.group.leave(generations.failure())
    while now is None:
        with worker.pulse.waiting():
            generation = generations.next()
        with suppress(PeerLostError):  # one more is lost: the launcher says who is left now
            now = _take_part(worker, generations, generation)
    vars(worker).update(vars(now))  # a script may have kept what `join` has returned
    if worker.is_chief:
        generations.forget_since(left)
    generations.confirm()
    log.speak_as(None if worker.is_chief else worker.name)
    return worker


def repeated(call: Callable[[], _T]) -> _T:
    """Return what a call returns that all workers make together; made again where the others go on without the lost.

    That is so in the body of a loop that goes on (`lockstep.training.regrouping`); elsewhere PeerLostError is raised.
    """
    while True:
        try:
            return call()
        except PeerLostError as error:
            generations = join().pulse.generations
            if generations is None or generations.recover is None:
                raise
            lost = str(error.given)
        # Outside of the except block, whose traceback would keep connections open.
        generations.recover(lost)


def generations_of(worker: Worker) -> Generations:
    """What tells this worker who takes part, where it goes on when others are lost.

    Raises:
        InputError: it ends with those that are lost, as its launcher neither says who is left nor starts newcomers.
    """
    if worker.pulse.generations is None:
        raise InputError(
            "The workers of this run cannot go on when one is lost.",
            given='watch.on_failure="continue", and '
            + ("`lockstep run` without --on-failure" if worker.pulse.launched else "workers of another launcher"),
            expected="Lockstep's own launcher, which says who is left, and starts others in the place of the lost",
            hint="use `lockstep train`, or `lockstep run --on-failure continue`; or --set watch.on_failure=restart",
        )
    return worker.pulse.generations


def _take_part(before: Worker, generations: Generations, generation: Generation) -> Worker:
    """Meet the other members of a generation; returns what this worker is among them."""
    rank, num_workers = generation.members.index(generations.number), len(generation.members)
    group = Group(generations.meet(), rank, num_workers, timeout_seconds(before.pulse), generations, before.pulse)
    gathered = group.gather([generations.places, identity(before.device)])
    # Newcomers do not know the others yet, and are never the first.
    generations.places = [(name, host) for name, host in gathered[0][0]]
    group.names = [generations.places[number][0] for number in generation.members]
    hosts = [generations.places[number][1] for number in generation.members]
    local = [each for each, host in enumerate(hosts) if host == hosts[rank]]
    return replace(
        before,
        rank=rank,
        num_workers=num_workers,
        local_rank=local.index(rank),
        num_local_workers=len(local),
        group=group,
        # The chief of before may have been another one, beside whom the one that is left computes.
        shares_device=check_devices(
            [device for _, device in gathered], before.workers_per_device + before.chief_serves
        ),
        host=hosts[rank],
        is_newcomer=False,
    )


def leave() -> None:
    """Leave the run that this process has joined, as its end does; a test can then join another one.

    Connections are closed, and the other workers are told why where an error is what ends the process.
    """
    global _joined
    worker, _joined = _joined, None
    if worker is not None:
        error = getattr(sys, "last_value", None)
        worker.group.leave(error)
        if error is not None and worker.group.membership is not None:
            _record_for_torchrun(error)


def _record_for_torchrun(error: BaseException) -> None:
    """Write what ends this worker into the file that torchrun shows of the first one to fail on its host.

    The file comes whole or not at all: torchrun ends on a half-written one, in place of starting its workers again, and
    it sends SIGTERM to this worker as soon as another one has failed.
    """
    if path := os.environ.get(_ERROR_FILE):
        os.environ[_ERROR_FILE] = partial = f"{path}.{os.getpid()}.partial"
        try:
            raise error
        except BaseException as raised:
            get_error_handler().record_exception(raised)
        finally:
            os.environ[_ERROR_FILE] = path
        Path(partial).replace(path)


def _join(
    device: str | None, workers_per_device: int, environment: Mapping[str, str], *, chief_serves: bool = False
) -> Worker:
    pulse = pulses.of_this_process()
    env = WorkerEnvironment.read(environment)
    if env is None:
        chosen, here = choose_device(device, 0, 1), socket.gethostname()
        return Worker(0, 1, 0, 1, chosen, Group.alone(), pulse, workers_per_device, host=here)
    if pulse.generations is not None and pulse.generations.is_newcomer:
        return _newcomer(env, pulse, device, workers_per_device, chief_serves=chief_serves)
    group = Group.alone()
    if env.num_workers > 1:
        group = _group_of_launcher(env, pulse) if env.launched else _group_of_others(env, pulse)
    try:
        local_rank, num_local = env.local or _count_hosts(group, env.rank)
        num_serving = int(chief_serves and env.rank == local_rank)  # the chief, if it is here
        chosen = choose_device(device, local_rank, num_local, workers_per_device, num_serving)
        gathered = group.gather([socket.gethostname(), local_rank, identity(chosen)])
        hosts = host_names([(name, each) for name, each, _ in gathered])
        if len(set(hosts)) > 1:
            group.names = [f"worker {rank} on {host}" for rank, host in enumerate(hosts)]
            network = choose_network(group, env.rank, None if env.launched else (env.address, env.port))
            if network and local_rank == 0:
                log.info("%s exchanges with the other hosts over %s", hosts[env.rank], network)
        shares = check_devices([name for *_, name in gathered], workers_per_device, chief_serves=chief_serves)
        if pulse.generations is not None:
            pulse.generations.places = list(zip(group.names, hosts, strict=True))
    except LockstepError as error:
        group.leave(error)
        raise
    return Worker(
        env.rank,
        env.num_workers,
        local_rank,
        num_local,
        chosen,
        group,
        pulse,
        workers_per_device,
        chief_serves,
        shares,
        hosts[env.rank],
    )


def host_names(gathered: Sequence[tuple[str, int]]) -> list[str]:
    """Name the host of each worker, from what each has told by rank: the name of its host, and its local rank.

    Hosts may have the same name, as containers have: then each has a number, too, in the order of their workers.
    """
    num_hosts = sum(local_rank == 0 for _, local_rank in gathered)
    if num_hosts == len({name for name, _ in gathered}):
        return [name for name, _ in gathered]
    numbers = accumulate(int(local_rank == 0) for _, local_rank in gathered)
    return [f"{name} (host {number - 1})" for (name, _), number in zip(gathered, numbers, strict=True)]


def _count_hosts(group: Group, rank: int) -> tuple[int, int]:
    """Return local rank and number of local workers, from the host names of all."""
    hosts = group.gather(socket.gethostname())
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def _newcomer(
    env: WorkerEnvironment, pulse: Pulse, device: str | None, workers_per_device: int, *, chief_serves: bool
) -> Worker:
    """A worker in the place of a lost one, before it knows the others: never the chief, who would write."""
    assert pulse.generations is not None, "it is a newcomer"
    assert env.local is not None, "our launcher has started it"
    pulse.generations.store = _store_of_launcher(env)
    num_serving = int(chief_serves and env.rank == env.local[0])
    chosen = choose_device(device, *env.local, workers_per_device, num_serving)
    group, rank = Group.alone(), max(env.rank, 1)
    group.names = [f"worker {env.rank if each == rank else each}" for each in range(env.num_workers)]
    host = socket.gethostname()
    return Worker(
        rank,
        env.num_workers,
        *env.local,
        chosen,
        group,
        pulse,
        workers_per_device,
        chief_serves,
        host=host,
        is_newcomer=True,
    )


def _group_of_launcher(env: WorkerEnvironment, pulse: Pulse) -> Group:
    """The workers that our launcher has started, in its store: the first generation, where others may follow."""
    store, generations = _store_of_launcher(env), pulse.generations
    if generations is not None:
        generations.store = store
        store = generations.meet()
    return Group(store, env.rank, env.num_workers, timeout_seconds(pulse), generations, pulse)


def _store_of_launcher(env: WorkerEnvironment) -> SocketStore:
    connection = inherited()
    if connection is None:
        raise InputError(
            "This process has the environment of a worker, but the launcher has not started it.",
            given=f"RANK={env.rank}, WORLD_SIZE={env.num_workers} and {LAUNCHED}",
            expected="only the workers themselves to join the run, not what they start",
            hint=f"unset RANK, WORLD_SIZE and {LAUNCHED} in what a worker starts: it is then alone",
        )
    return SocketStore(connection)


def _group_of_others(env: WorkerEnvironment, pulse: Pulse) -> Group:
    """The workers that another launcher has started, once they have found each other, in a store of them alone."""
    store = _connect(env)
    address = address_towards(env.address, env.port)
    found = discover(store, env.rank, env.num_workers, Location.here(address))
    store = PrefixStore(found.start, store)
    peers = have_watched(store, env.rank, found, pulse, holds_store=env.rank == env.store_rank)
    group = Group(store, env.rank, env.num_workers, timeout_seconds(pulse), peers, pulse)
    group.say_farewell_by(peers.leave)
    return group


def _connect(env: WorkerEnvironment) -> Store:
    try:  # TCPStore would try again for two minutes, and log each time
        resolve_name(env.address, env.port, RESOLVE_SECONDS)
    except (OSError, UnicodeError) as error:
        raise InputError(
            "The name of the chief's host does not resolve.",
            given=f"{env.address!r}, by {env.source}: {error}",
            expected="a name or an address that this host knows",
            hint=f"set MASTER_ADDR to an address of the host of worker {env.store_rank or 0}",
        ) from None
    made: SimpleQueue[TCPStore | RuntimeError] = SimpleQueue()
    # In a thread: what listens there may be another program, for whose answer TCPStore waits without end.
    threading.Thread(target=lambda: made.put(_store(env)), name="lockstep-connect", daemon=True).start()
    try:
        store = made.get(timeout=TIMEOUT_SECONDS + STORE_ANSWER_SECONDS)
    except Empty:
        store = RuntimeError("what listens there does not answer as a store of torch.distributed does")
    if isinstance(store, TCPStore):
        return PrefixStore(env.prefix, store)
    reason = str(store).splitlines()[0]
    if "EADDRINUSE" in reason:
        raise WorkerError(
            f"worker {env.rank} cannot open the store of the run: its port is in use on this host.",
            given=f"port {env.port}, by {env.source}",
            expected="a port that no other program, and no other run, listens on",
            hint="give all workers another one: MASTER_PORT",
        )
    raise WorkerError(
        f"worker {env.rank} cannot reach the other workers.",
        given=f"{env.address}:{env.port}: {reason}",
        expected="the store of the run to listen there",
        hint="check MASTER_ADDR and MASTER_PORT, and that worker 0 or the launcher is running",
    )


def _store(env: WorkerEnvironment) -> TCPStore | RuntimeError:
    try:
        return TCPStore(
            env.address,
            env.port,
            is_master=env.rank == env.store_rank,
            timeout=timedelta(seconds=TIMEOUT_SECONDS),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:  # DistError, as a rule
        return error
