"""`lockstep train` as a process that is watched from outside: how far its run is, who its workers are, what it leaves.

Everything is read from the workdir and from /proc, as a stranger would: nothing in the run knows that it is watched.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.chaos.linked_data import LinkedData
from lockstep.owner import process_fields, processes_by_parent

POLL_SECONDS = 0.01
_MARK = "LOCKSTEP_CHAOS"
_TAIL_BYTES = 1 << 14
_MAX_LINES = 200


class TrainCommand:
    """A command that trains in a workdir, in a session of its own; its data are given where they may be damaged."""

    def __init__(self, words: Sequence[str], workdir: Path, data: LinkedData | None = None) -> None:
        self.workdir, self.data, self._mark = workdir, data, uuid.uuid4().hex
        self._seen, self._step = 0, 0
        self._process = subprocess.Popen(
            [*words, "--workdir", str(workdir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {_MARK: self._mark},
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self.pid = self._process.pid
        """Process id of the launcher."""
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        # A thread, for a pipe that nobody reads would stop the run; and it ends with the last process that writes.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            self._lines.extend(line.rstrip("\n") for line in lines)

    def poll(self) -> int | None:
        """Return the exit code, negative for the signal that killed it; None while it runs."""
        return self._process.poll()

    def last_lines(self) -> list[str]:
        """Return the last lines of its output, once it has ended."""
        self._reader.join(timeout=1.0)
        return list(self._lines)

    def error(self) -> str | None:
        """Return the error that has ended it: its first line, and what was given; None where it has written none."""
        lines = self.last_lines()
        at = next((at for at in range(len(lines) - 1, -1, -1) if lines[at].startswith("error: ")), None)
        return None if at is None else " ".join(line.strip() for line in lines[at : at + 2])

    def step(self) -> int:
        """Return the last step whose line stands in metrics.jsonl; 0 before the first."""
        with suppress(OSError):
            seen = (self.workdir / "metrics.jsonl").stat().st_mtime_ns
            if seen != self._seen:  # it is asked again and again
                self._seen, self._step = seen, newest_step(self.workdir)
        return self._step

    def chief(self) -> int | None:
        """The worker that holds the workdir; None while there is none."""
        leases = sorted(self.workdir.glob(".lease-[0-9]*")) if self.workdir.is_dir() else []
        with suppress(OSError, ValueError, KeyError, IndexError):
            owner = json.loads(leases[-1].read_bytes())
            if not owner["released"] and owner["pid"] in descendants(self.pid):
                return int(owner["pid"])
        return None

    def workers(self) -> list[int]:
        """The workers, of which the chief is the first; none while there is no chief."""
        chief = self.chief()
        if chief is None:
            return []
        fields = process_fields(chief)
        siblings = processes_by_parent().get(int(fields[1]), []) if fields else []
        return [chief, *sorted(pid for pid in siblings if pid != chief)]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the launcher alone."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill_all(self) -> None:
        """Kill every process of the run, the launcher first, so that it cannot do anything about the others."""
        self._process.kill()
        for pid in self._marked():
            send(pid, signal.SIGKILL)
        self._process.wait()

    def left_over(self, seconds: float) -> list[int]:
        """Wait for all processes of a command that has ended to be gone; returns those that are not after a time."""
        deadline = time.monotonic() + seconds
        while (left := list(self._marked())) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return left

    def _marked(self) -> Iterator[int]:
        """The processes that have inherited the mark of this command, whatever their parents are."""
        mark = f"{_MARK}={self._mark}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes() and (process_fields(int(path.parent.name)) or "Z")[0] not in "ZX":
                    yield int(path.parent.name)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants(root: int) -> list[int]:
    """All processes below one, parents first."""
    children, found = processes_by_parent(), [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def json_lines(path: Path, *, tail: bool = False) -> list[dict[str, Any]]:
    """Return the whole lines of a file of JSON; none where it is not there. With `tail` the last ones alone."""
    try:
        with path.open("rb") as file:
            if tail:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            pieces = file.read().split(b"\n")[:-1]
    except OSError:
        return []
    found = []
    for piece in pieces:
        with suppress(ValueError):  # the first piece of a tail is not a whole line
            found.append(json.loads(piece))
    return found


def newest_step(workdir: Path) -> int:
    """Return the last step whose line stands in a run's metrics.jsonl; 0 before the first."""
    lines = json_lines(workdir / "metrics.jsonl", tail=True)
    return max((int(line["step"]) for line in lines), default=0)
