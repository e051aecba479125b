"""Folders in the middle of being written or deleted, and sweeping those whose process is gone.

Their names tell whose they are: `.step-00001000.new.HOST.PID.STARTED`, where STARTED is the time the process began at.
No lock is held, so that this works on network file systems too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from pathlib import Path
from typing import Literal

from lockstep.owner import host_name, start_ticks

log = logging.getLogger("lockstep")

ABANDONED_SECONDS = 3600.0
"""What nobody has touched for so long is nobody's, where the process itself cannot be seen (on another host)."""

_NAME = re.compile(r"\.step-\d{8,}\.(?:new|old)\.(?P<host>[^.]+)\.(?P<pid>\d+)\.(?P<started>\d+)")


def unfinished_path(final: Path, kind: Literal["new", "old"]) -> Path:
    """Where this process writes a folder before it is called `final`, or keeps it while it is being deleted."""
    pid = os.getpid()
    return final.with_name(f".{final.name}.{kind}.{host_name()}.{pid}.{start_ticks(pid)}")


def sweep(folder: Path) -> None:
    """Delete the unfinished folders whose process no longer lives; all else is left alone."""
    for path in list(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match and not _is_owned(path, match):
            log.info("deleting %s: the process that was at work on it is gone", path)
            delete(path)


def delete(path: Path) -> None:
    """Delete a folder; where the disk refuses, say so and go on."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s cannot be deleted (%s); delete it by hand, nothing uses it", path, error.strerror)


def _is_owned(path: Path, match: re.Match[str]) -> bool:
    if match["host"] == host_name() and Path("/proc/self/stat").exists():
        return start_ticks(int(match["pid"])) == match["started"]
    return time.time() - _last_touched(path) < ABANDONED_SECONDS


def _last_touched(path: Path) -> float:
    touched = 0.0
    for entry in (path, *path.glob("*")):
        with contextlib.suppress(FileNotFoundError):
            touched = max(touched, entry.stat().st_mtime)
    return touched
