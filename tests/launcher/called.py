"""Functions that tests have called on workers."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import lockstep as ls


def tell(text: str, *, times: int = 1) -> dict[str, Any]:
    """Write to both streams, and to the descriptor, and say who is there."""
    worker = ls.join("cpu")
    print(f"{worker.rank} says {text * times}", flush=True)
    os.write(2, f"{worker.rank} cannot say é\n".encode())
    try:
        starts = ls.launch(return_object, 2)
    except ls.InputError as error:
        starts = error.what
    copied = {"is a copy of this process": "pytest" in sys.modules, "starts others": starts}
    return {"rank": worker.rank, "of": worker.num_workers, **copied}


def count_to(end: int) -> None:
    worker = ls.join("cpu")
    worker.group.barrier("all print at once")
    for number in range(end):
        print(f"{worker.rank} counts {number}")


def fail() -> None:
    worker = ls.join("cpu")
    if worker.rank == 1:
        raise ZeroDivisionError("by worker 1 alone")
    worker.group.barrier("nobody comes")


def return_object() -> object:
    return Path()


def wait_for_stop(folder: str) -> str | None:
    """Wait until a stop is requested, and say by what; the pids of the workers are in the folder meanwhile."""
    worker = ls.join("cpu")
    worker.pulse.at(1, "loop body")
    (Path(folder) / str(os.getpid())).touch()
    while not worker.pulse.stop_requested:
        time.sleep(0.02)
    return worker.pulse.stop_requested
