"""The other workers where another launcher has started them: who of them is gone, and why.

The first worker of each host starts a watcher there, a process that loads no torch (`lockstep.launcher.watcher`). Each
worker is connected to that of its host by a socket which no other user can take part in: it sends its pulse, and why it
leaves; it is told who is lost. This ends its waiting for others. A timeout of torch.distributed could not: it does not
know a dead worker from one that compiles for minutes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lockstep.errors import LockstepError, PeerLostError, WorkerError
from lockstep.tracebacks import short_traceback
from lockstep.workers import pulse as pulses
from lockstep.workers.channel import Channel
from lockstep.workers.connections import KEY, address_towards, leads_out
from lockstep.workers.limits import LEAVE_SECONDS, REACH_SECONDS, VERDICT_SECONDS
from lockstep.workers.membership import Membership

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from lockstep.workers.discovery import Discovery
    from lockstep.workers.pulse import Pulse

# What torch.distributed says in a worker when another one is gone; it names no worker.
_LOST_PEER_TEXTS = (
    "connection closed by peer",
    "connection closed by remote peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "application timeout caused pair closure",
    "ncclremoteerror",
)
_PAUSE_SECONDS = 0.02
_CREDENTIALS = struct.Struct("3i")
_WATCHER = "lockstep.launcher.watcher"


def says_peer_is_lost(text: str) -> bool:
    """Whether what torch.distributed says means that another worker, or the way to it, is gone."""
    return any(each in text.lower() for each in _LOST_PEER_TEXTS)


def process_behind(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id at the other end of a Unix socket, as the system knows them."""
    room = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(room)
    return pid, user


class Peers(Membership):
    """The membership of a worker that another launcher has started: the watcher of its host says who is lost.

    At its end a worker that `leaves_last` lets the others leave first. The store is that of these workers alone.
    """

    def __init__(
        self, watcher: Channel, rank: int, num_workers: int, pulse: Pulse, store: Store, *, leaves_last: bool = False
    ) -> None:
        super().__init__(rank)
        self._watcher, self._num_workers, self._pulse = watcher, num_workers, pulse
        self._store, self._leaves_last = store, leaves_last
        # torchrun's workers outlive it, where nothing else ends them; those of srun and mpirun do not.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._is_leaving = False
        self._watched = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="lockstep-peers", daemon=True)

    def start(self) -> None:
        """Begin to beat, and wait until the watchers of all hosts have come: from then on no failure goes unnoticed.

        Raises:
            PeerLostError: a watcher has not come.
        """
        self._thread.start()
        while not self._watched.wait(_PAUSE_SECONDS):
            self.check()

    def leave(self, error: BaseException | None) -> None:
        """Tell the others that this worker leaves, and why; the one that leaves last waits for them."""
        place = {"step": self._pulse.step, "phase": self._pulse.phase}
        self._is_leaving = True
        if error is not None:
            # The user's mistake, too, is named with the worker: the others have not made it.
            kind = "peer" if isinstance(error, PeerLostError) else "error"
            text = str(error) if isinstance(error, LockstepError) else short_traceback(error)
            self._watcher.send({"failed": text, "kind": kind, **place})
            return
        self._pulse.at(self._pulse.step, "end")
        pulses.beat(self._pulse, self._watcher)
        self._watcher.send({"leaves": "last" if self._leaves_last else "now"})
        if self._failure is None:
            # In a thread: a store whose host is gone may never answer.
            leaving = threading.Thread(target=self._leave_store, daemon=True)
            leaving.start()
            leaving.join(LEAVE_SECONDS if self._leaves_last else VERDICT_SECONDS)

    def _leave_store(self) -> None:
        with suppress(RuntimeError):  # torch's stores: it is gone
            num_left = self._store.add("left", 1)
            while self._leaves_last and num_left < self._num_workers and self._failure is None:
                time.sleep(_PAUSE_SECONDS)
                num_left = self._store.add("left", 0)

    def _keep_beating(self) -> None:
        for messages in pulses.beats(self._pulse, self._watcher):
            for message in messages:
                if "lost" in message:
                    self._fail(str(message["lost"]), str(message["why"]))
                elif "watched" in message:
                    self._watched.set()
            if self._launcher and os.getppid() != self._launcher:
                self._fail("its launcher", "torchrun has ended, or was killed, and nobody would end its workers")
        self._watcher.close()
        if not self._is_leaving:
            self._fail("the watcher of its host", "it has ended, or was killed: nobody would be missed without it")

    def _fail(self, who: str, why: str) -> None:
        given, _, note = why.partition("\n")
        for action in self._record_failure(who, given.rstrip(":"), note):
            action()


# The watcher ----------------------------------------------------------------------------------------------------------


def have_watched(store: Store, rank: int, found: Discovery, pulse: Pulse, *, holds_store: bool) -> Peers:
    """Connect this worker to the watcher of its host, which the first worker there starts; it beats from now on.

    The store is that of these workers alone; where this one `holds_store`, it ends with this worker.

    Raises:
        WorkerError: there is no watcher.
    """
    hosts = found.hosts()
    host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    name = f"\0lockstep/{found.start}/{host}"
    task = None
    if rank == hosts[host][0]:
        task = _task(host, found, store)
        _start_watcher(name, len(hosts[host]))
    watcher = Channel(_reach(name, found.locations[rank].host))
    watcher.send({"rank": rank, "can_show": _show_stack_on_signal(), "task": task})
    decides = rank == 0 and len(hosts) > 1
    if task and decides:
        _tell_where(task, watcher, store)
    peers = Peers(watcher, rank, len(found.locations), pulse, store, leaves_last=holds_store or decides)
    peers.start()
    return peers


def _show_stack_on_signal() -> bool:
    """Have SIGUSR2 write this process's stack, unless the script has a use for it."""
    if signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL:
        return False
    faulthandler.register(signal.SIGUSR2, file=2)
    return True


def _task(host: int, found: Discovery, store: Store) -> dict[str, Any]:
    """What the watcher of a host is to know. That of the chief's host decides; the others find it by the store."""
    hosts, key = found.hosts(), os.environ.get(KEY)
    task = {"host": host, "ranks": hosts, "names": found.host_names()}
    if len(hosts) == 1:
        return task
    if not host:
        # Without a key from its user, one is drawn: it is as secret as the store is.
        return {**task, "address": _address_for_others(found), "key": key or secrets.token_hex(16)}
    store.wait(["watcher"], timedelta(seconds=REACH_SECONDS))
    address, port, drawn = json.loads(store.get("watcher"))
    return {**task, "address": address, "port": port, "key": key or drawn}


def _address_for_others(found: Discovery) -> str:
    """The address of the chief's host for the others; where the store is here, the way to it may be the loopback."""
    outside = [each.address for each in found.locations if leads_out(each.address)]
    own = found.locations[0].address
    return own if own in outside or not outside else address_towards(outside[0], 1)


def _tell_where(task: Mapping[str, Any], watcher: Channel, store: Store) -> None:
    """Tell the other hosts where the watcher that decides listens."""
    for answer in watcher.receive(REACH_SECONDS):
        store.set("watcher", json.dumps([task["address"], answer["port"], "" if KEY in os.environ else task["key"]]))


def _start_watcher(name: str, num_workers: int) -> None:
    """Start the watcher of this host; it lives until the last worker of the run has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen(num_workers)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _WATCHER, str(listener.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # stderr stays: it is the screen
            pass_fds=[listener.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # what ends a worker, and all that it has started, does not end its watcher
        )
    process.returncode = 0  # nobody waits for it


def _reach(name: str, host: str) -> socket.socket:
    """Connect to the watcher of this host, once its first worker has made the socket."""
    deadline = time.monotonic() + REACH_SECONDS
    why = f"nobody has come in {REACH_SECONDS:g} s"
    while time.monotonic() < deadline:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(name)
            if process_behind(connection)[1] == os.geteuid():
                return connection
            why = "it belongs to another user"
        except ConnectionRefusedError:  # nobody has made it yet
            time.sleep(_PAUSE_SECONDS)
        connection.close()
    raise WorkerError(
        f"The watcher of host {host} cannot be reached.",
        given=why,
        expected="a watcher, which the first worker of each host starts",
        hint="read what the first worker of that host said last; start the workers of a host as one user",
    )
