"""The cores that this process may keep busy, for every part that starts processes or threads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from lockstep.checks import Range

NumThreads = Annotated[int, Range(ge=1, le=4096)]
"""Threads of torch in one process; its OpenMP crashes from far more."""


def usable_cores() -> int:
    """Return the least of the process's affinity and the quotas of its control groups, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, cgroup_cores(Path("/")))))


def share_of_cores(num_local_workers: int) -> int:
    """Return the usable cores that each worker of this host has to itself, at least 1."""
    return max(1, usable_cores() // num_local_workers)


def openmp_threads_are_named() -> bool:
    """Whether OMP_NUM_THREADS is one that OpenMP takes: a number, or several for loops within loops."""
    return re.match(r"\s*\+?0*[1-9]\d*\s*(,|$)", os.environ.get("OMP_NUM_THREADS", "")) is not None


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of this process's control groups that a controller reads, the innermost first (v1 and v2)."""
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            # In a container the path may be the host's: then the mount itself is this group.
            group = mount / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(mount))


def cgroup_cores(root: Path = Path("/")) -> float:
    """Return the least quota of this process's control groups, in cores; infinite without one (cgroup v1 and v2)."""
    return min(map(_quota, cgroup_folders("cpu", root)), default=float("inf"))


def _quota(folder: Path) -> float:
    v2, v1_quota, v1_period = folder / "cpu.max", folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
    if v2.exists():
        quota, period = v2.read_text().split()
    elif v1_quota.exists() and v1_period.exists():
        quota, period = v1_quota.read_text(), v1_period.read_text()
    else:
        return float("inf")
    return float("inf") if quota == "max" or int(quota) < 0 else int(quota) / int(period)
