"""A server that has imported what workers need and forks them: one import of torch for all, a new worker in 10 ms.

The standard library's fork server would run the launcher's `__main__` again in each child, leave its socket in the
file system when the launcher is killed, and know nothing of the children's children. This one ends with its launcher,
however that ends, and takes every process below it along.

Importing this module loads no torch. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any

from lockstep.errors import WorkerError
from lockstep.launcher import entry
from lockstep.owner import processes_by_parent
from lockstep.workers.connections import KEY
from lockstep.workers.environment import is_alone_here, worker_environment
from lockstep.workers.signals import NOTICES

_PACKET_BYTES = 1 << 17
_MAX_DESCRIPTORS = 4
_CLOSE_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, *NOTICES)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Event:
    """A process that the server has forked has begun or ended."""

    name: str
    pid: int
    status: int | None
    """Exit status, negative for the signal that killed it; None at the beginning."""


class ForkServer:
    """The launcher's end of the server: asks for processes, and hears when they begin and end.

    `screen` are the descriptors that its processes have as standard output and error; None are those of this one.
    """

    def __init__(self, preload: Sequence[str], screen: tuple[int, int] | None = None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._serves = False
        path = [str(each) for each in sys.path]
        code = (
            f"import sys; sys.path[:] = {path!r}; from lockstep.launcher import forkserver; "
            f"forkserver.serve({theirs.fileno()}, {os.getpid()}, {list(preload)!r})"
        )
        # Blocked until the server ignores them: a Ctrl-C during its first instants must not end it with a traceback.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=screen and screen[0],
                stderr=screen and screen[1],
                env=worker_environment(
                    {name: value for name, value in os.environ.items() if name != KEY}, is_alone=is_alone_here()
                ),
                pass_fds=[theirs.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()

    def fork(self, name: str, task: Mapping[str, object], connections: Sequence[socket.socket | Connection]) -> None:
        """Ask for a process that does the task; it inherits the connections, which are closed here."""
        self._send({"name": name, "task": task}, [each.fileno() for each in connections])
        for each in connections:
            each.close()

    def kill(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process, if it is still there."""
        self._send({"name": name, "signal": int(number)}, [])

    def preload(self, modules: Sequence[str]) -> None:
        """Have the server import modules as well, between its other work: those forked from then on have them."""
        self._send({"preload": list(modules)}, [])

    def _send(self, order: Mapping[str, object], descriptors: Sequence[int]) -> None:
        # When the server is gone, the next call of `events` says so.
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._control, [json.dumps(order).encode()], descriptors)

    def events(self, timeout_seconds: float) -> list[Event]:
        """Return the events since the last call; waits for the first one."""
        events = []
        while wait([self._control], timeout_seconds):
            packet, _ = _receive(self._control)
            if not packet:
                raise WorkerError(
                    "The process that starts the workers is gone, and the workers with it.",
                    given=f"exit status {self._process.wait()}",
                    expected="it to live as long as the run",
                    hint="read what it said last; if it was killed, look for a lack of memory",
                )
            events.append(Event(**json.loads(packet)))
            self._serves = True
            timeout_seconds = 0.0
        return events

    def fileno(self) -> int:
        """The descriptor that becomes readable with an event, to wait for several."""
        return self._control.fileno()

    def close(self) -> None:
        """End the server and every process below it."""
        self._control.close()
        if not self._serves:
            self._process.kill()  # It imports its modules, and has no processes to take along.
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(descriptor: int, launcher: int, preload: Sequence[str]) -> None:
    """Serve a launcher; in the forked children, do what each was forked for and exit."""
    # Only until it serves: then it sees by itself that its launcher is gone, and has processes to take along.
    end_with_parent(launcher)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    gc.disable()  # saves a sixth of the time of importing torch, which makes a million objects and little garbage
    for module in preload:
        import_module(module)
    _send_at_end_of_parent(0)
    # The objects of now are never garbage: the children's collectors need not touch, and so copy, all their pages.
    gc.freeze()
    gc.enable()
    work = _Server(socket.socket(fileno=descriptor)).serve()
    sys.exit(work())


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._names: dict[int, str] = {}
        """Names of the living processes, by pid."""
        self._due: deque[str] = deque()
        """Modules that are still to be imported."""

    def serve(self) -> Callable[[], int]:
        """Serve until the launcher is gone; returns in forked children alone, with their work."""
        while True:
            events = self._selector.select(0.0 if self._due else None)
            if not events:
                self._import_next()
            for key, _ in events:
                if key.data is None:
                    work = self._handle_order()
                    if work is not None:
                        return work
                else:
                    self._reap(key.fd, key.data)

    def _handle_order(self) -> Callable[[], int] | None:
        packet, descriptors = _receive(self._control)
        if not packet:
            end_descendants()
            os._exit(0)
        order = json.loads(packet)
        if "preload" in order:
            self._due.extend(order["preload"])
            return None
        if "signal" in order:
            for pid in [pid for pid, name in self._names.items() if name == order["name"]]:
                os.kill(pid, order["signal"])
            return None
        return self._fork(order["name"], order["task"], descriptors)

    def _import_next(self) -> None:
        # For lack of memory, say: the run goes on, and who needs it imports it.
        with contextlib.suppress(Exception, SystemExit):
            import_module(self._due.popleft())
        gc.freeze()

    def _fork(self, name: str, task: dict[str, Any], descriptors: list[int]) -> Callable[[], int] | None:
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            self._close()
            end_with_parent(parent)
            return lambda: entry.run_task(task, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._names[pid] = name
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        self._report(Event(name, pid, None))
        return None

    def _close(self) -> None:
        """Close the server's descriptors, in a child."""
        for descriptor in [key.fd for key in self._selector.get_map().values() if key.data is not None]:
            os.close(descriptor)
        self._selector.close()
        self._control.close()

    def _reap(self, descriptor: int, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        self._report(Event(self._names.pop(pid), pid, os.waitstatus_to_exitcode(status)))

    def _report(self, event: Event) -> None:
        with contextlib.suppress(ConnectionError):
            self._control.send(json.dumps(vars(event)).encode())


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and the descriptors that came with it; an empty one when the other end is gone."""
    try:
        packet, descriptors, _, _ = socket.recv_fds(control, _PACKET_BYTES, _MAX_DESCRIPTORS)
    except ConnectionError:
        return b"", []
    return packet, descriptors


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent dies."""
    _send_at_end_of_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _send_at_end_of_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_descendants() -> None:
    """Kill every process below this one, which has to be a subreaper: the children of the dead become its own."""
    while children := processes_by_parent().get(os.getpid()):
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
