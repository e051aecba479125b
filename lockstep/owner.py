"""Owners of files and folders: which process something belongs to, and whether that process still lives.

The system gives a dead process's number to a new one, so the time at which a process began belongs to its name. And a
process can be seen only from its own system: after a restart, or in another container, its number is another process.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

_BOOT, _PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_OWNER_FILE = "owner.json"
_MAX_BYTES = 1 << 12


@dataclass(frozen=True)
class Owner:
    """A process that holds something."""

    host: str
    pid: int
    """0 where it is not known."""
    started: str
    """See `start_ticks`."""
    system: str
    """Processes of one system see each other; "" where nobody can tell."""
    since_unix_seconds: int
    """Start by the clock of its host."""
    token: str
    """A random text that distinguishes what one process takes twice."""
    released: bool = False

    def __str__(self) -> str:
        if not self.pid:
            return "a process that did not name itself"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_unix_seconds))
        return f"process {self.pid} on host {self.host}, since {since}"

    def encode(self) -> bytes:
        """Return the owner as JSON."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> Owner:
        """Return the owner that was encoded.

        Raises:
            ValueError: the bytes are not those of an owner.
        """
        try:
            body = json.loads(data)
            return cls(
                host=str(body["host"]),
                pid=int(body["pid"]),
                started=str(body["started"]),
                system=str(body["system"]),
                since_unix_seconds=int(body["since_unix_seconds"]),
                token=str(body["token"]),
                released=bool(body["released"]),
            )
        except (TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ValueError(f"not an owner: {error!r}") from error

    def state(self) -> Literal["alive", "dead", "unseen"]:
        """Whether the process lives; `unseen` where this one cannot see it."""
        if not self.system or self.system != _system():
            return "unseen"
        return "alive" if start_ticks(self.pid) == self.started else "dead"


def this_process() -> Owner:
    """This process, as the owner of something from now on."""
    pid = os.getpid()
    return Owner(host_name(), pid, start_ticks(pid), _system(), int(time.time()), uuid.uuid4().hex)


def host_name() -> str:
    """The name of this host, of letters, digits and hyphens."""
    return re.sub(r"[^A-Za-z0-9-]", "-", platform.node()) or "unnamed"


def start_ticks(pid: int) -> str:
    """When a process began, in clock ticks since the start of the system; "0" where none lives or none can be seen."""
    fields = process_fields(pid)
    return "0" if not fields or fields[0] in "ZX" else fields[19]


def process_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on ("T" is stopped, then the parent's pid); none where it is gone."""
    try:
        # Before the state stands the program's name, in parentheses, which may hold anything.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def processes_by_parent() -> dict[int, list[int]]:
    """The processes that this one can see, by the pid of their parent."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if fields := process_fields(int(path.name)):
            found.setdefault(int(fields[1]), []).append(int(path.name))
    return found


def _system() -> str:
    with suppress(OSError):
        return f"{_BOOT.read_text().strip()} {_PROCESSES.readlink()}"
    return ""


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder among the temporary files, or in `parent`, whose name begins so, and delete it at the end.

    First delete the folders with such names that this user's processes have left, if they can be seen to be dead.
    """
    for path in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError, ValueError):
            if _is_left_over(path):
                shutil.rmtree(path)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        (folder / _OWNER_FILE).write_bytes(this_process().encode())
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_left_over(path: Path) -> bool:
    """Whether a folder is this user's, and its process is dead; raises OSError or ValueError if it names no process."""
    # Anybody may write here: no link is followed, and nothing of another user is opened.
    if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
        return False
    with (path / _OWNER_FILE).open("rb") as file:
        return Owner.decode(file.read(_MAX_BYTES)).state() == "dead"
