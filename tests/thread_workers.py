"""Workers of a run as threads of the test: so what needs a group of workers is tested in milliseconds."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from lockstep.workers.group import JSON, check_agreement
from lockstep.workers.pulse import Pulse
from lockstep.workers.rank import Worker

TIMEOUT_SECONDS = 20.0


class Meeting:
    """What the threads of one run share."""

    def __init__(self, num_workers: int) -> None:
        self.values: list[Any] = [None] * num_workers
        self.barrier = threading.Barrier(num_workers)


class ThreadGroup:
    """A group of workers that are threads of one process."""

    store: Any = None

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank, self._meeting = rank, meeting

    def barrier(self, name: str) -> None:
        self._meeting.barrier.wait(TIMEOUT_SECONDS)

    def gather(self, value: JSON) -> list[Any]:
        self._meeting.values[self._rank] = json.dumps(value)
        self.barrier("all have put their value")
        values = list(map(json.loads, self._meeting.values))
        self.barrier("all have read")
        return values

    def broadcast(self, value: JSON) -> Any:
        return self.gather(value)[0]

    def share_memory(self, descriptor: int | None) -> int:
        shared = os.dup(self.broadcast(descriptor))
        self.barrier("all have their own")
        if descriptor is not None:
            os.close(descriptor)
        return shared

    def agree(self, what: str, value: JSON) -> None:
        check_agreement(what, self.gather(value))


def thread_workers(num_workers: int, **fields: Any) -> list[Worker]:
    """The workers of one CPU host; `fields` of `Worker` may differ."""
    meeting = Meeting(num_workers)
    usual: dict[str, Any] = {"num_local_workers": num_workers, "device": torch.device("cpu"), "pulse": Pulse()}
    return [
        Worker(rank, num_workers, rank, **{"group": ThreadGroup(rank, meeting), **usual, **fields})
        for rank in range(num_workers)
    ]


def run_threads(function: Callable[[Worker], Any], num_workers: int) -> list[Any]:
    """Call a function in a thread for each worker; returns what each returned, by rank."""
    with ThreadPoolExecutor(num_workers) as pool:
        calls = [pool.submit(function, worker) for worker in thread_workers(num_workers)]
        return [call.result(TIMEOUT_SECONDS) for call in calls]
