"""Real separate hosts on one machine: network namespaces, joined by a bridge in a namespace of its own.

    with Hosts(2, tmp_path) as hosts:
        chief = hosts.start(0, sys.executable, "-c", "...")
        hosts.cut(1)
        chief.wait_for("host1 is gone")
        assert chief.wait() == 1
        assert hosts.leftovers() == []

Each host has an address, a name that all resolve (host0, host1, ...), a loopback and a /dev/shm of its own. Files are
shared, as on a cluster with a network file system. Real hosts have traps, and so do these: an interface `docker0`,
which leads nowhere and has the same address on all, and a name of their own that they take for their loopback, as
Debian's /etc/hosts has it. Needs root and iproute2, see `missing`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from worker_processes import HANG_SECONDS

NAMESPACES, FILES_OF_NAMESPACES = Path("/run/netns"), Path("/etc/netns")
INTERFACE, WRONG_INTERFACE, WRONG_ADDRESS = "eth0", "docker0", "172.17.0.1"
# A mount namespace is made by `ip netns exec`, so what is mounted here is seen by the command alone.
ENTER = 'hostname "$0" && mount --bind "$1" /dev/shm && shift && exec "$@"'


def missing() -> str | None:
    """Why there can be no separate hosts here, or None."""
    if not shutil.which("ip"):
        return "needs `ip` (iproute2)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    name = f"lockstep-{os.getpid()}-probe"
    try:
        _ip("netns", "add", name)
        _ip("netns", "exec", name, "unshare", "--uts", "true")
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        return f"needs the right to make network namespaces: {getattr(error, 'stderr', error)}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return None


class Command:
    """A process on a host; what it prints, both streams together, is kept by line."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self._has_ended = False
        """Its last line is read, and the process is gone."""
        self.process = subprocess.Popen(
            arguments,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def last_line(self) -> str:
        return next((line for line in reversed(self.lines) if line.strip()), "")

    def wait_for(self, text: str, seconds: float = HANG_SECONDS) -> str:
        """The first line with this text, if it comes in so many seconds."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [line for line in self.lines if text in line]
            return bool(found) or self._has_ended

        with self._changed:
            self._changed.wait_for(look, seconds)
        assert found, f"{text!r} has not come in {seconds} s. Printed was:\n{self.text}"
        return found[0]

    def wait(self, seconds: float = HANG_SECONDS) -> int:
        """The exit code; all that was printed has been read then. Below 0: ended by that signal."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self._has_ended, seconds)
        assert ended, f"it has not ended in {seconds} s. Printed was:\n{self.text}"
        return self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for text in output:
                with self._changed:
                    self.lines.append(text.rstrip("\n"))
                    self._changed.notify_all()
        self.process.wait()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


class Hosts:
    """So many hosts on a network of their own; left, none of their processes, links and namespaces remains."""

    def __init__(self, num_hosts: int, folder: Path, name: str = "host") -> None:
        self._called = [f"{name}{host}" for host in range(num_hosts)]
        self._names = [f"lockstep-{os.getpid()}-{host}" for host in range(num_hosts)]
        self._hub = f"lockstep-{os.getpid()}-hub"
        self._shared_memory = [folder / f"host{host}-shm" for host in range(num_hosts)]
        self._commands: list[Command] = []

    def __enter__(self) -> Hosts:
        _remove_abandoned()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def start(self, host: int, *arguments: str | Path, **environment: str) -> Command:
        """Start a command on a host, in the environment of this process and with what is given besides."""
        command = Command(
            [*self.entering(host), *map(str, arguments)],
            {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment},
        )
        self._commands.append(command)
        return command

    def entering(self, host: int) -> list[str]:
        """The words before a command that runs it on a host."""
        namespace = ["ip", "netns", "exec", self._names[host], "unshare", "--uts"]
        return [*namespace, "sh", "-c", ENTER, self._called[host], str(self._shared_memory[host])]

    def cut(self, host: int) -> None:
        """Pull the cable of a host: packets are lost in both directions, and nobody is told."""
        _ip("-n", self._hub, "link", "set", f"port{host}", "down")

    def part(self, one: int, other: int) -> None:
        """Lose all packets between two hosts, in both directions; each still reaches all others."""
        for here, there in ((one, other), (other, one)):
            nobody = ["lladdr", "02:00:00:00:00:99", "nud", "permanent"]
            _ip("-n", self._names[here], "neighbour", "replace", self.address(there), *nobody, "dev", INTERFACE)

    def restore(self, host: int) -> None:
        """Plug the cable in again."""
        _ip("-n", self._hub, "link", "set", f"port{host}", "up")

    def limit(self, host: int, rate: str) -> None:
        """Let no more than this in and out of a host, such as "200mbit"."""
        for namespace, device in ((self._hub, f"port{host}"), (self._names[host], INTERFACE)):
            shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms"]
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *shape)

    def kill(self, host: int) -> None:
        """SIGKILL all processes of a host: its kernel lives on and closes their connections."""
        while pids := self.processes(host):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.005)

    def vanish(self, host: int) -> None:
        """Switch a host off: all its processes end, and the others hear nothing of it."""
        self.cut(host)
        self.kill(host)

    def processes(self, host: int) -> list[int]:
        """The ids of all processes on a host, however they came there."""
        return [int(pid) for pid in _ip("netns", "pids", self._names[host]).split()]

    def leftovers(self, seconds: float = HANG_SECONDS) -> list[str]:
        """What still runs, listens or lies in shared memory on any host after at most so many seconds, in words."""
        deadline = time.monotonic() + seconds
        while (left := self._leftovers()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def close(self) -> None:
        """End all that runs on the hosts, and remove them."""
        for host, name in enumerate(self._names):
            if (NAMESPACES / name).exists():
                self.kill(host)
        for command in self._commands:
            command.close()
        for name in [*self._names, self._hub]:
            _remove(name)

    def _make(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for host, name in enumerate(self._names):
            self._shared_memory[host].mkdir(parents=True, exist_ok=True)
            (FILES_OF_NAMESPACES / name).mkdir(parents=True)
            (FILES_OF_NAMESPACES / name / "hosts").write_text(self._names_of_hosts(host))
            _ip("netns", "add", name)
            port = f"port{host}"
            _ip("link", "add", port, "netns", self._hub, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "link", "add", WRONG_INTERFACE, "type", "bridge")
            for device, address in ((INTERFACE, self.address(host)), (WRONG_INTERFACE, WRONG_ADDRESS)):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            for device in ("lo", INTERFACE, WRONG_INTERFACE):
                _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "route", "add", "default", "dev", INTERFACE)

    def _names_of_hosts(self, host: int) -> str:
        """What /etc/hosts of a host says."""
        own = {host: "127.0.1.1"}
        lines = [f"{own.get(other, self.address(other))} {name}" for other, name in enumerate(self._called)]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])

    def _leftovers(self) -> list[str]:
        left = []
        for host, name in enumerate(self._names):
            left += [f"host{host}: process {pid}: {_command_line(pid)}" for pid in self.processes(host)]
            left += [f"host{host}: listens: {line}" for line in _run("ss", "-N", name, "-Hltn").splitlines()]
            left += [f"host{host}: /dev/shm/{path.name}" for path in self._shared_memory[host].iterdir()]
        return left


def _run(*arguments: str) -> str:
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _remove(name: str) -> None:
    try:
        if (NAMESPACES / name).exists():
            _ip("netns", "delete", name)
    except subprocess.CalledProcessError:
        if (NAMESPACES / name).exists():  # another process of tests may have removed it meanwhile
            raise
    shutil.rmtree(FILES_OF_NAMESPACES / name, ignore_errors=True)


def _remove_abandoned() -> None:
    """Remove the hosts of processes that were killed before they could."""
    for folder in (NAMESPACES, FILES_OF_NAMESPACES):
        for path in folder.glob("lockstep-*"):
            owner = re.match(r"lockstep-(\d+)-", path.name)
            if owner and not Path("/proc", owner[1]).exists():
                _remove(path.name)


def _command_line(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(it is gone)"
