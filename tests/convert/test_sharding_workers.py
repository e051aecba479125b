"""The pool of converting processes: which process runs which tasks, and what comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_processes import HANG_SECONDS

from lockstep.convert.sharding import run_tasks
from lockstep.errors import DataError, WorkerError


def double(task: int) -> Iterator[tuple[int, int, int]]:
    for part in range(2):
        yield task, part, os.getpid()


def fail(task: int) -> Iterator[int]:
    yield task
    raise DataError("no", given="that", expected="this", hint="that") if task else ValueError("not ours")


def test_one_process_is_the_callers_own() -> None:
    assert list(run_tasks([1, 2], double, 1)) == [(task, part, os.getpid()) for task in (1, 2) for part in (0, 1)]


@pytest.mark.process
def test_events_of_a_task_come_in_order_from_one_process() -> None:
    events = list(run_tasks(range(5), double, 2))
    assert sorted(event[:2] for event in events) == [(task, part) for task in range(5) for part in (0, 1)]
    processes = {task: {process for other, _, process in events if other == task} for task in range(5)}
    assert processes[0] == processes[2] == processes[4] != processes[1] == processes[3]
    assert all(len(each) == 1 and each != {os.getpid()} for each in processes.values())
    for task in range(5):
        assert [part for other, part, _ in events if other == task] == [0, 1]


@pytest.mark.process
@pytest.mark.parametrize(("tasks", "error"), [([1, 2], DataError), ([0, 0], WorkerError)])
def test_an_error_in_a_process_is_raised_with_its_traceback(tasks: list[int], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        list(run_tasks(tasks, fail, 2))
    assert any("In a converting process" in note for note in caught.value.__notes__)


def deaf_once(task: int) -> Iterator[int]:
    """Miss the first SIGTERM, as a process does that is just about to read."""
    asked = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, asked) and None)
    try:
        yield task
        time.sleep(HANG_SECONDS)
    finally:
        Path(f"ended-{task}").touch()


@pytest.mark.process
def test_a_process_that_has_missed_a_signal_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    events = run_tasks([0, 1], deaf_once, 2)
    assert {next(events), next(events)} == {0, 1}
    events.close()
    assert {path.name for path in tmp_path.iterdir()} == {"ended-0", "ended-1"}
