"""The environment of workers: what the allocator, OpenMP and cuBLAS read once and for all.

`benchmarks/neighbours.py` measures what it is worth beside busy processes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

SHORT_WAITS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
"""How long an idle thread spins before it sleeps. GNU's OpenMP counts rounds, 300,000 by default, which take some
milliseconds; Intel's and LLVM's count milliseconds, 200 by default. To the system a thread that spins is at work:
beside another busy process it uses up the time on a core that the thread it waits for would need. No bits depend on it.
"""
WAITS_ALONE = {**SHORT_WAITS, "GOMP_SPINCOUNT": "10000"}
"""The same where no other process computes when the workers start. A step of a small net, of which many parts are
shorter than it takes to wake a thread, is up to twice as fast."""
_NUM_LOOKS, _PAUSE_SECONDS = 4, 0.003

SETTINGS = {
    # Large gradients are allocated and freed each step: without these, glibc gives the pages back each time.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    # One thread until the worker knows how many it may have: torch takes a larger number later, but never fewer cores.
    "OMP_NUM_THREADS": "1",
    # With which cuBLAS gives the same bits each time, as an exact run on a GPU needs; 32 MiB of the GPU's memory.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    **SHORT_WAITS,
}

_WAIT_NAMES = {*SHORT_WAITS, "OMP_WAIT_POLICY"}
_OF_LIBRARY = {"libgomp": "GOMP_SPINCOUNT", "libiomp5": "KMP_BLOCKTIME", "libomp": "KMP_BLOCKTIME"}


def worker_environment(given: Mapping[str, str], *, is_alone: bool = False) -> dict[str, str]:
    """The environment that is given, with the settings that it does not have; `is_alone`, where no other computes.

    One that it has stays, and one that it has empty is left out: then the library's own default holds. Whoever says in
    any way how idle threads wait is not spoken for in another.
    """
    waits = {} if chosen_waits(given) else WAITS_ALONE if is_alone else SHORT_WAITS
    settings = {name: value for name, value in SETTINGS.items() if name not in SHORT_WAITS} | waits
    return {name: value for name, value in {**settings, **given}.items() if value or name not in SETTINGS}


def is_alone_here() -> bool:
    """Whether no other process of this machine computes: in one of some looks within a hundredth of a second, none."""
    try:
        for _ in range(_NUM_LOOKS):
            lines = Path("/proc/stat").read_text().splitlines()
            if next(int(line.split()[1]) for line in lines if line.startswith("procs_running ")) == 1:
                return True
            time.sleep(_PAUSE_SECONDS)
    except (OSError, ValueError, StopIteration):
        pass
    return False


def chosen_waits(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that say how idle threads wait."""
    return {name: environment[name] for name in sorted(_WAIT_NAMES & environment.keys())}


def short_waits_here() -> dict[str, str]:
    """The short waits of the OpenMP that this process has loaded; empty where it has none, or none that is known."""
    maps = Path("/proc/self/maps")
    paths = (line.split()[-1] for line in maps.read_text().splitlines()) if maps.exists() else ()
    libraries = {Path(path).name.partition(".")[0].partition("-")[0] for path in paths}
    return {name: SHORT_WAITS[name] for library, name in _OF_LIBRARY.items() if library in libraries}
