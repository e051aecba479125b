"""The disk of a workdir: whether it can be read and written, what kind it is, and how fast."""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.doctor.check_result import Check, CheckResult, judged
from lockstep.run_files import RECIPE
from lockstep.screen import log

"""The file that is in the folder of each run."""
_CHUNK_BYTES, _SMALL_BYTES, _NUM_SMALL = 1 << 24, 1 << 12, 11
_MOST_SECONDS = 3.0
"""For the large file: a disk that is slow is known by then."""
_SLOW_RATE, _SLOW_FSYNC_SECONDS = 50e6, 0.1
_LITTLE_ROOM, _NO_ROOM = 5e9, 100e6
_PASSING = {
    "tmpfs": "memory, and gone with the next start of the machine",
    "ramfs": "memory, and gone with the next start of the machine",
    "overlay": "a container's own disk, and gone with the container",
}


class Pace(NamedTuple):
    """How fast a folder takes what is written."""

    rate: float
    """Bytes a second, until a large file is safe."""
    fsync_seconds: float
    """The median time until a small write is safe."""


def disk_checks(workdir: Path, num_bytes: int = 1 << 26) -> dict[str, Check]:
    """Return the checks of the disk of a workdir, which need not be there yet; at the end nothing is left there.

    A file of so many bytes is written; where a run is in the folder, beside it.
    """
    return {"workdir": lambda: _workdir(workdir, num_bytes)}


def above_runs(folder: Path) -> Path:
    """Return a folder that belongs to no run: this one, or where it is that of a run or lies in one, that above it."""
    place = folder.resolve()
    runs = [path for path in (place, *place.parents) if (path / RECIPE).is_file()]
    return runs[-1].parent if runs else folder


def _workdir(workdir: Path, num_bytes: int) -> Iterator[CheckResult]:
    try:
        there = next(path for path in (workdir.absolute(), *workdir.absolute().parents) if _is_there(path))
        next(there.iterdir(), None)  # which says why it cannot be read
        folder = above_runs(there)
    except OSError as error:
        yield _refused(workdir, "read", error)
        return
    if not os.access(there, os.W_OK | os.X_OK):
        yield _refused(workdir, "written", f"{there} may not be written by this user, or is read-only")
        return
    yield from _kind_of_disk(there)
    if folder.stat().st_dev != there.stat().st_dev or not os.access(folder, os.W_OK | os.X_OK):
        why = f"nothing is written into a run, and {folder} is another disk or may not be written"
        yield CheckResult("workdir", f"the speed of {there} is not known: {why}")
        return
    log.info("writing up to %.0f MB to %s, for its speed", num_bytes / 1e6, folder)
    try:
        pace = write_pace(folder, num_bytes)
    except OSError as error:
        yield _refused(folder, "written", error)
        return
    yield judged(
        "workdir",
        f"{folder} takes {pace.rate / 1e6:.0f} MB/s, and a small write is safe after {1e3 * pace.fsync_seconds:.1f} ms",
        {"bytes_per_second": pace.rate, "fsync_seconds": pace.fsync_seconds},
        is_bad=pace.rate < _SLOW_RATE or pace.fsync_seconds > _SLOW_FSYNC_SECONDS,
        mend="a faster disk, or fewer checkpoints (checkpoints.every): each has to be safe before the next",
    )


def _is_there(path: Path) -> bool:
    """Whether there is such a path; unlike `Path.exists` of Python 3.14 it raises OSError where that cannot be said."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _refused(path: Path, how: str, why: object) -> CheckResult:
    mend = "name another --workdir, or get the right to read and write there"
    return CheckResult("workdir", f"{path} cannot be {how}: {why}", "fails", mend)


def _kind_of_disk(folder: Path) -> Iterator[CheckResult]:
    facts, kind = os.statvfs(folder), _kind(folder)
    free = facts.f_bavail * facts.f_frsize
    found, numbers = f"{folder} has {free / 1e9:.1f} GB free, on {kind}", {"free_bytes": float(free)}
    if free < _NO_ROOM:
        yield CheckResult("room", found, "fails", "make room, or name another --workdir", numbers)
    elif kind in _PASSING:
        mend = "name a --workdir on a disk that stays"
        yield CheckResult("room", f"{found}: {_PASSING[kind]}", "warn", mend, numbers)
    else:
        mend = "make room: a run keeps several checkpoints"
        yield judged("room", found, numbers, is_bad=free < _LITTLE_ROOM, mend=mend)


def _kind(folder: Path, table: Path = Path("/proc/self/mounts")) -> str:
    """Return the kind of file system that a folder is on, "unknown" where the system does not say."""
    best, kind = -1, "unknown"
    for line in table.read_text(errors="replace").splitlines() if table.exists() else []:
        _, name, found, *_ = line.split(" ")
        mount = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), name))
        # Of several on one place the last one covers the others.
        if folder.resolve().is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), found
    return kind


def write_pace(folder: Path, num_bytes: int) -> Pace:
    """Measure how fast a folder takes a file of so many bytes, or what it takes of it in some seconds.

    Raises:
        OSError: the system refuses, as where there is no room.
    """
    chunk = os.urandom(min(_CHUNK_BYTES, num_bytes))  # which no file system compresses
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began, written = time.perf_counter(), 0
        while written < num_bytes and time.perf_counter() - began < _MOST_SECONDS:
            written += file.write(chunk)
            os.fsync(file.fileno())
        passed = time.perf_counter() - began
        seconds = []
        for _ in range(_NUM_SMALL):
            began = time.perf_counter()
            file.write(chunk[:_SMALL_BYTES])
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return Pace(written / passed, statistics.median(seconds))
