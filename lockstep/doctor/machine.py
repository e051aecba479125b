"""The machine as its system shows it, without torch: cores, limits, shared memory, environment and clock."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lockstep.cores import cgroup_cores, cgroup_folders, openmp_threads_are_named, usable_cores
from lockstep.doctor.check_result import Check, CheckResult, judged
from lockstep.workers.environment import SETTINGS, chosen_waits, is_alone_here, worker_environment

_BUSY, _THROTTLED = 0.5, 0.05
"""Share of the cores that others keep busy, and of the periods in which a quota stopped this one, worth a warning."""
_FILES, _FILES_A_CORE = 256, 64
"""Open files of a run: those of its launcher and one worker, and of what each core brings more. A reader keeps at most
128 open."""
_THREADS, _THREADS_A_CORE = 128, 16
_SHARED_BYTES = 1 << 28
"""What NCCL and torch's own loaders ask of /dev/shm; a container has 64 MB by default."""
_SLOW_CLOCK_NS = 1000.0


def machine_checks(root: Path = Path("/")) -> dict[str, Check]:
    """Return the checks of this machine by name; `root` has /proc, /sys and /dev."""
    return {
        "cores": lambda: _cores(root),
        "load": lambda: _load(root),
        "threads": _threads,
        "open files": _open_files,
        "processes": lambda: _processes(root),
        "limits": _other_limits,
        "/dev/shm": lambda: _shared_memory(root / "dev/shm"),
        "allocator": _allocator,
        "OpenMP waits": _waits,
        "clock": lambda: _clock(root),
    }


def _cores(root: Path) -> Iterator[CheckResult]:
    cores, quota, there = usable_cores(), cgroup_cores(root), os.cpu_count() or 1
    numbers = {"usable": cores, "of_the_machine": there}
    limited = "" if quota == float("inf") else f", {quota:g} by the quota of its control group"
    found = f"{cores} usable of {there}{limited}"
    if quota < there and quota != int(quota):
        mend = f"give whole cores ({int(quota) + 1}): workers and threads are counted in whole ones"
        yield CheckResult("cores", found, "warn", mend, numbers)
    else:
        mend = "give two or more: what reads ahead takes turns with the step"
        yield judged("cores", found, numbers, is_bad=cores == 1, mend=mend)
    if (share := _throttled(root)) is not None:
        yield judged(
            "quota",
            f"it has stopped the processes of this group in {100 * share:.1f} % of its periods",
            {"throttled_share": share},
            is_bad=share > _THROTTLED,
            mend="fewer workers or threads than cores (--threads), or a larger quota",
        )


def _throttled(root: Path) -> float | None:
    """Return the share of periods in which a quota has stopped the innermost group that has one; None without one."""
    for folder in cgroup_folders("cpu", root):
        with suppress(OSError, ValueError, KeyError, ZeroDivisionError):
            facts = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            return int(facts["nr_throttled"]) / int(facts["nr_periods"])
    return None


def _load(root: Path) -> Iterator[CheckResult]:
    load, cores = float((root / "proc/loadavg").read_text().split()[0]), os.cpu_count() or 1
    yield judged(
        "load",
        f"{load:.1f} processes were running or waiting in the last minute, of {cores} cores",
        {"load": load},
        is_bad=load > _BUSY * cores,
        mend="train where nothing else computes, or leave cores to it: --threads, or taskset",
    )


def _threads() -> Iterator[CheckResult]:
    cores = usable_cores()
    if not openmp_threads_are_named():
        found = f"each worker gets its share of the {cores} cores"
        yield CheckResult("threads", found, numbers={"threads_of_one_worker": cores})
        return
    named = int(os.environ["OMP_NUM_THREADS"].partition(",")[0])
    yield judged(
        "threads",
        f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} for each worker, of {cores} cores",
        {"threads_of_one_worker": named},
        is_bad=named > cores,
        mend="unset OMP_NUM_THREADS: each worker then gets its share of the cores",
    )


def _open_files() -> Iterator[CheckResult]:
    soft, hard = (_bounded(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    needed = _FILES + _FILES_A_CORE * usable_cores()
    wanted = max(65536, needed)
    raised = f"ulimit -n {min(hard, wanted):.0f}"
    yield judged(
        "open files",
        f"{soft:g} at a time in a process (at most {hard:g})",
        {"soft": min(soft, 1e18), "needed": needed},
        is_bad=soft < needed,
        mend=raised if hard >= needed else f"--ulimit nofile={wanted} of a container: a new limit",
    )


def _processes(root: Path) -> Iterator[CheckResult]:
    left = _bounded(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    for folder in cgroup_folders("pids", root):
        with suppress(OSError, ValueError):  # none there, or "max"
            left = min(left, int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text()))
    needed = _THREADS + _THREADS_A_CORE * usable_cores()
    is_bounded = left < float("inf")
    yield judged(
        "processes",
        f"{left:g} more processes and threads" if is_bounded else "as many as are asked for",
        {"left": left, "needed": needed} if is_bounded else {},
        is_bad=left < needed,
        mend="ulimit -u, or --pids-limit of a container: workers, loaders and threads count",
    )


def _other_limits() -> Iterator[CheckResult]:
    kinds = {"ulimit -v": ("memory", resource.RLIMIT_AS), "ulimit -f": ("size of a file", resource.RLIMIT_FSIZE)}
    limits = {flag: (what, _bounded(resource.getrlimit(kind)[0])) for flag, (what, kind) in kinds.items()}
    for flag, (what, limit) in limits.items():
        if limit != float("inf"):
            mend = f"{flag} unlimited: torch asks for far more memory than it uses, and checkpoints are one file"
            yield CheckResult("limits", f"{what}: at most {limit / 1e9:.1f} GB", "warn", mend, {"bytes": limit})
    if all(limit == float("inf") for _, limit in limits.values()):
        yield CheckResult("limits", "none on the memory of a process or the size of a file")


def _bounded(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _shared_memory(folder: Path) -> Iterator[CheckResult]:
    of_what = "for NCCL and torch's own loaders; Lockstep's batches and gradients need none"
    if not folder.is_dir():
        yield CheckResult("/dev/shm", f"there is none, {of_what}", "warn", "mount it: --shm-size=1g of a container")
        return
    facts = os.statvfs(folder)
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    yield judged(
        "/dev/shm",
        f"{free / 1e9:.2f} GB free of {size / 1e9:.2f} GB, {of_what}",
        {"free_bytes": free, "bytes": size},
        is_bad=free < _SHARED_BYTES,
        mend="--shm-size=1g of a container, or delete what is left in it",
    )


def _allocator() -> Iterator[CheckResult]:
    names = [name for name in SETTINGS if name.startswith(("MALLOC_", "CUBLAS_"))]
    used = worker_environment(os.environ)
    changed = [f"{name}={os.environ[name] or 'nothing'}" for name in names if used.get(name) != SETTINGS[name]]
    preloaded = os.environ.get("LD_PRELOAD", "")
    if changed:
        mend = f"unset {' '.join(name.partition('=')[0] for name in changed)}, if nothing else needs them"
        yield CheckResult("allocator", f"{', '.join(changed)} goes before what Lockstep would set", "warn", mend)
    elif preloaded:
        yield CheckResult("allocator", f"LD_PRELOAD={preloaded}")
    elif "glibc" not in platform.libc_ver():
        found = f"not glibc's ({platform.libc_ver()[0] or 'unknown'}): large gradients may be slow to allocate"
        yield CheckResult("allocator", found, "warn", "a system with glibc, which torch's wheels are made for")
    else:
        kept = int(SETTINGS["MALLOC_MMAP_THRESHOLD_"])
        found = f"glibc {platform.libc_ver()[1]}, told to keep the pages of tensors up to {kept / 1e9:.1f} GB"
        yield CheckResult("allocator", found, numbers={"kept_bytes": kept})


def _waits() -> Iterator[CheckResult]:
    chosen, is_alone = chosen_waits(os.environ), is_alone_here()
    used = chosen_waits(worker_environment(os.environ, is_alone=is_alone))
    said = " ".join(f"{name}={value}" for name, value in used.items()) or "the library's own"
    numbers = {name: float(value) for name, value in used.items() if value.isdecimal()}
    if not chosen:
        found = f"{said}, as {'nothing' if is_alone else 'something'} else computes here"
        yield CheckResult("OpenMP waits", found, numbers=numbers)
        return
    is_active = os.environ.get("OMP_WAIT_POLICY", "").strip().lower() == "active"
    mend = "unset OMP_WAIT_POLICY: threads that spin take the time of those they wait for"
    yield judged("OpenMP waits", f"{said}, of the environment", numbers, is_bad=is_active, mend=mend)


def _clock(root: Path) -> Iterator[CheckResult]:
    began = time.perf_counter()
    for _ in range(1000):
        time.perf_counter()
    cost_ns = (time.perf_counter() - began) * 1e6
    file = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    source = file.read_text().strip() if file.exists() else "unknown"
    now, numbers = time.time(), {"look_ns": cost_ns}
    found = f"{time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(now))}, source {source}, {cost_ns:.0f} ns a look"
    if now < Path(__file__).stat().st_mtime - 86400:
        mend = "set the clock: times in logs, leases and certificates are wrong"
        yield CheckResult("clock", f"{found}: before Lockstep was installed", "warn", mend, numbers)
    else:
        mend = "boot with clocksource=tsc, where the machine has a stable one"
        yield judged("clock", found, numbers, is_bad=cost_ns > _SLOW_CLOCK_NS, mend=mend)
