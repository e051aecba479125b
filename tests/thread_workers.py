"""Workers of a run as threads of the test: so what needs a group of workers is tested in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from worker_processes import HANG_SECONDS

from lockstep.workers.group import Group
from lockstep.workers.pulse import Pulse
from lockstep.workers.rank import Worker
from lockstep.workers.socket_store import SocketStore
from lockstep.workers.store_server import StoreServer


def thread_workers(num_workers: int, **fields: Any) -> list[Worker]:
    """The workers of one CPU host, which meet in a store of this process; `fields` of `Worker` may differ."""
    server = StoreServer()

    def worker(rank: int) -> Worker:
        group = fields.get("group") or Group(SocketStore(server.connect()), rank, num_workers, HANG_SECONDS)
        usual: dict[str, Any] = {"num_local_workers": num_workers, "device": torch.device("cpu"), "pulse": Pulse()}
        return Worker(rank, num_workers, rank, **{**usual, **fields, "group": group})

    return [worker(rank) for rank in range(num_workers)]


def run_threads(function: Callable[[Worker], Any], num_workers: int) -> list[Any]:
    """Call a function in a thread for each worker; returns what each returned, by rank."""
    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(function, thread_workers(num_workers), timeout=HANG_SECONDS))
