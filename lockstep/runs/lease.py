"""A lease: a folder belongs to one process at a time, and to a dead one no longer.

`flock` would do on a local disk; network file systems lack it, or grant it to everybody.

The lease is a file, `.lease-000001`, with its owner in it. A process that takes the folder over, from an owner that is
dead or has given it up, creates the file with the next number. The system lets exactly one process create a file, so of
all that have seen the same owner dead exactly one follows it. The highest number holds the folder: a process that was
slow, and has created a file that is no longer the highest, sees that and withdraws. Lower numbers are deleted, the
highest never, not even when the lease is given up.

An owner on this system is looked up among its processes. Any other is alive as long as it renews the time of its file.
That time is compared with the time of a file created for the purpose: both come from the file server's clock, so the
clocks of the hosts do not matter.

On a bucket the files are objects, which a conditional write creates, and the owner writes its own anew to renew it.
Where a store has no conditional writes, and of two that start at once both may take the folder, the one whose object
was overwritten sees that when it looks again, before it uploads anything.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lockstep.durable import atomic_write, open_at_once
from lockstep.errors import WorkdirError, WorkdirLostError
from lockstep.owner import Owner, this_process
from lockstep.run_files import LEASE, LEASE_NAME
from lockstep.screen import log
from lockstep.storage.remote_path import AnyPath, RemotePath
from lockstep.storage.retries import ended_by, told

RENEW_SECONDS = 10.0
EXPIRY_SECONDS = 60.0
"""An owner that cannot be seen is dead when it has not renewed its lease for this long."""

_CLOCK = f"{LEASE}clock-"
_MAX_BYTES = 1 << 12
_NUM_READS, _READ_PAUSE_SECONDS = 20, 0.05
_PATIENCE_SECONDS = 3.0
"""For a renewal that is under way when the lease is given up."""
_UNKNOWN = Owner("", 0, "0", "", 0, "")


class _Entry(NamedTuple):
    owner: Owner
    renewed: float
    """Time of the last renewal in seconds, by the server's clock."""


class Holder(NamedTuple):
    """Who holds a folder, or held it last, as another process sees it."""

    owner: Owner
    renewed_unix_seconds: float
    """When it was last known to live, within `RENEW_SECONDS`, by the clock of the file server."""
    is_alive: bool
    """It has not given the folder up and lives, or has renewed its lease in time by this host's clock."""


class Lease:
    """The hold of this process on a folder; `take` makes it, and a thread renews it until it is released.

    Methods raise OSError where the system refuses; on a bucket whatever the store raises.
    """

    def __init__(self, path: AnyPath, owner: Owner, taken_from: Owner | None) -> None:
        self.path = path
        self.owner = owner
        self.taken_from = taken_from
        """The owner before, if it died without giving the folder up."""
        self._renewed, self._is_gone, self._is_failing = time.time(), False, False
        self._released = threading.Event()
        self._writing = threading.Lock()
        """On a bucket a renewal is a read and a write, between which nobody gives the folder up."""
        threading.Thread(target=self._keep, name="lockstep-lease", daemon=True).start()

    def check(self) -> None:
        """Check that the folder is still this process's, and renew the lease.

        Raises:
            WorkdirError: another process has taken it over; a WorkdirLostError where the lease is deleted.
        """
        mine, newest = _read(self.path), _newest(self.path.parent)
        if mine is None or mine.owner != self.owner or newest != self.path:
            raise self._lost(_read(newest) if newest else None)
        # On a bucket it takes three requests, and a check comes before each object: the thread renews it, too.
        if not isinstance(self.path, RemotePath) or abs(time.time() - self._renewed) > RENEW_SECONDS:
            self._renew()

    def check_if_stale(self) -> None:
        """Check only if the lease is gone or was not renewed in time; cheap enough for every step."""
        # time.time is the one clock that goes on while the host sleeps.
        if self._is_gone or abs(time.time() - self._renewed) > 3 * RENEW_SECONDS:
            self.check()

    def release(self) -> None:
        """Give the folder up, if it is still this process's; a store is asked once, for the process is to end."""
        self._released.set()
        try:
            if not self._writing.acquire(timeout=_PATIENCE_SECONDS):
                raise TimeoutError("the store does not answer")
            try:
                with ended_by(self._released):
                    mine = _read(self.path)
                    if mine and mine.owner == self.owner:
                        _write(self.path, replace(self.owner, released=True))
            finally:
                self._writing.release()
        except Exception as error:  # of a store: any
            log.info("%s cannot be released (%s); it is void without this process", self.path, _told(error))

    def _keep(self) -> None:
        while not self._released.wait(RENEW_SECONDS):
            self._renew()

    def _renew(self) -> None:
        try:
            if isinstance(self.path, RemotePath):
                with self._writing, ended_by(self._released):
                    if self._released.is_set():
                        return
                    mine = _read(self.path)
                    if mine is None or mine.owner != self.owner:  # to write it would take it back
                        raise FileNotFoundError
                    _write(self.path, self.owner)
            else:
                os.utime(self.path)  # the time of the server, not of this host
        except FileNotFoundError:
            self._is_gone = True
        except Exception as error:
            if not self._is_failing and not self._released.is_set():
                log.warning("%s cannot be renewed: %s", self.path, _told(error))
            self._is_failing = True
        else:
            self._renewed, self._is_failing = time.time(), False

    def _lost(self, by: _Entry | None) -> WorkdirError:
        return (WorkdirError if by else WorkdirLostError)(
            f"The run in {self.path.parent} is no longer this start's, which ends here.",
            given=f"taken over by {by.owner}" if by else f"{self.path.name} is gone",
            expected=f"held by {self.owner}, without a break of more than {EXPIRY_SECONDS:.0f} s",
            hint="let the other start go on; where there is none, the same command goes on from the last checkpoint",
        )


def take(folder: AnyPath, *, known_dead: Owner | None = None, owner: Owner | None = None) -> Lease:
    """Take the lease of an existing folder, or of one on a bucket, that a dead process may hold, or one has given up.

    `known_dead` is an owner that is known to be dead, though perhaps not to this system; `owner` this process, as it
    has taken another folder of the same run.

    Raises:
        WorkdirError: a process that is alive holds it.
        OSError: the folder cannot be read or written.
    """
    owner = owner or this_process()
    while True:
        last = _newest(folder)
        before = _read(last) if last else None
        dead = before.owner if before and not before.owner.released else None
        if before and dead and dead != known_dead:
            _check_dead(before, folder)
            log.warning("the run in %s was held by %s, which is dead: going on in its place", folder, dead)
        mine = folder / f"{LEASE}{_number(last) + 1:06d}"
        if _create(mine, owner):
            if _newest(folder) == mine:
                if isinstance(mine, RemotePath) and mine.write_new(owner.encode()):
                    _tell_of_plain_writes(folder)
                _sweep(folder, mine)
                return Lease(mine, owner, dead)
            _delete(mine)


def find_holder(folder: Path) -> Holder | None:
    """Look who holds a folder, and write nothing there; None where nobody ever has. Raises OSError."""
    last = _newest(folder)
    seen = _read(last) if last else None
    if seen is None:
        return None
    state = seen.owner.state()
    is_renewed = state == "unseen" and abs(time.time() - seen.renewed) < EXPIRY_SECONDS
    return Holder(seen.owner, seen.renewed, not seen.owner.released and (state == "alive" or is_renewed))


def check_free(folder: AnyPath) -> None:
    """Refuse a folder that another process holds, as `take` does, and take nothing.

    On a bucket an object is written and deleted, which a process that holds it has to be able to.
    """
    if isinstance(folder, RemotePath):
        _server_seconds(folder)
    last = _newest(folder)
    seen = _read(last) if last else None
    if seen and not seen.owner.released:
        _check_dead(seen, folder)


def _check_dead(seen: _Entry, folder: AnyPath) -> None:
    """Raise WorkdirError unless the owner is dead."""
    state, silent_seconds = seen.owner.state(), 0.0
    if state == "unseen":
        # The clock of a server may be set: a time far ahead is that of no renewal.
        silent_seconds = abs(_server_seconds(folder) - seen.renewed)
    if state == "dead" or silent_seconds >= EXPIRY_SECONDS:
        return
    heard, more = "alive", ""
    if state == "unseen":
        heard = f"it renewed its lease {silent_seconds:.0f} s ago"
        more = f"; if it is dead, start again in {EXPIRY_SECONDS - silent_seconds + 1:.0f} s"
    raise WorkdirError(
        f"The run in {folder} is going on already.",
        given=f"held by {seen.owner} ({heard})",
        expected="one start of a run at a time",
        hint=f"wait for it or stop it, or name another --workdir{more}",
    )


def _create(path: AnyPath, owner: Owner) -> bool:
    """Create a lease file; returns whether this process, and no other, has created it."""
    if isinstance(path, RemotePath):
        # A request of which the answer was lost is made again, and finds its own object.
        return path.write_new(owner.encode()) or ((seen := _read(path)) is not None and seen.owner == owner)
    try:
        file = path.open("xb", buffering=0)
    except FileExistsError:
        return False
    with file:
        try:
            file.write(owner.encode())
            os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise
    return True


def _tell_of_plain_writes(folder: AnyPath) -> None:
    log.warning(
        "The store of %s, or the package that reaches it, has no conditional writes: it has overwritten a lease. Of "
        "two starts in the same second the first one may go on until its first upload; start one at a time",
        folder,
    )


def _write(path: AnyPath, owner: Owner) -> None:
    if isinstance(path, RemotePath):
        path.write_bytes(owner.encode())
        return
    with atomic_write(path) as file:
        file.write(owner.encode())


def _delete(path: AnyPath) -> None:
    if isinstance(path, RemotePath):
        path.unlink()
    else:
        path.unlink(missing_ok=True)


def _told(error: Exception) -> str:
    return told(Exception(getattr(error, "strerror", None) or error))


def _read(path: AnyPath) -> _Entry | None:
    """Read a lease: None where there is no such file; one that cannot be read belongs to an unknown owner."""
    if isinstance(path, RemotePath):
        try:
            renewed = path.changed_unix_seconds()
            return _Entry(Owner.decode(path.read_range(_MAX_BYTES, 0)), renewed)
        except FileNotFoundError:
            return None
        except ValueError:
            return _Entry(_UNKNOWN, renewed)
    for _ in range(_NUM_READS):
        try:
            with open(path, "rb", opener=open_at_once) as file:  # `open` asks the server; `stat` may answer from memory
                data, renewed = file.read(_MAX_BYTES), os.fstat(file.fileno()).st_mtime
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return None
            raise
        with suppress(ValueError):
            return _Entry(Owner.decode(data), renewed)
        time.sleep(_READ_PAUSE_SECONDS)  # most likely it is just being written
    return _Entry(_UNKNOWN, renewed)


def _newest(folder: AnyPath) -> AnyPath | None:
    return max((path for path in _inside(folder) if LEASE_NAME.fullmatch(path.name)), key=_number, default=None)


def _inside(folder: AnyPath) -> list[AnyPath]:
    if not isinstance(folder, RemotePath):
        return list(folder.iterdir())
    folder.invalidate()
    with suppress(FileNotFoundError):
        return list(folder.iterdir())
    return []


def _number(path: AnyPath | None) -> int:
    match = LEASE_NAME.fullmatch(path.name) if path else None
    return int(match[1]) if match else 0


def _server_seconds(folder: AnyPath) -> float:
    """Return the time now, on the clock of the file server."""
    probe = folder / f"{_CLOCK}{uuid.uuid4().hex}"
    if isinstance(probe, RemotePath):
        probe.write_bytes(b"a moment")
        now = probe.changed_unix_seconds()
        probe.unlink()
        return now
    try:
        with probe.open("xb") as file:
            return os.fstat(file.fileno()).st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _sweep(folder: AnyPath, newest: AnyPath) -> None:
    """Delete leases with lower numbers, and the clock files of processes that were killed."""
    for path in _inside(folder):
        is_clock = isinstance(path, Path) and path.name.startswith(_CLOCK)  # the process that reads it may be at it
        if 0 < _number(path) < _number(newest) or is_clock:
            with suppress(OSError):
                path.unlink()
