"""What all tests share: each starts alone, on one thread; one that costs much, or starts a process, is marked so."""

from __future__ import annotations

import logging
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
import worker_processes

from lockstep.screen import LineHandler

NUM_SLOWEST_SHOWN, MAX_CPU_SECONDS = 20, 30.0
"""20 s on a quiet machine: where cores are shared, the same work takes up to half as much again."""
PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", worker_processes.EVENT}
process_starts: list[str] = []


def note_process_start(event: str, _arguments: object) -> None:
    """Audit hook, which cannot be removed again: note what has started a process."""
    if event in PROCESS_EVENTS:
        process_starts.append(event)


platform.processor()  # runs `uname` once in a process; so would the first import of h5py, within some test
sys.addaudithook(note_process_start)

hypothesis.settings.register_profile("ci", max_examples=25, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def cpu_seconds() -> float:
    """Of this process and of the children that have ended: a busy machine does not add to it."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def pytest_configure(config: pytest.Config) -> None:
    """Show a GPU to the tests that are for one alone: all others compute on the CPU, wherever they run."""
    if "gpu" not in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note what a test costs, and refuse one that is slow, or starts a process, and is not marked so."""
    start = cpu_seconds()
    process_starts.clear()
    yield
    if process_starts and not {mark.name for mark in item.iter_markers()} & {"process", "slow"}:
        pytest.fail(f"it has started a process ({process_starts[0]}): mark it process")
    seconds = cpu_seconds() - start
    item.user_properties.append(("cpu_seconds", seconds))
    if seconds > MAX_CPU_SECONDS and not item.get_closest_marker("slow"):
        pytest.fail(
            f"it took {seconds:.0f} s of CPU time: make it cheaper, or mark it slow (limit {MAX_CPU_SECONDS} s)"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the slowest tests, by CPU time."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    costs = [(dict(report.user_properties).get("cpu_seconds", 0.0), report.nodeid) for report in reports]
    slowest = [cost for cost in sorted(costs, reverse=True)[:NUM_SLOWEST_SHOWN] if cost[0] >= 1.0]
    if slowest:
        terminalreporter.write_sep("=", f"slowest {len(slowest)} tests, seconds of CPU time")
        for seconds, name in slowest:
            terminalreporter.write_line(f"{seconds:6.1f}  {name}")


@pytest.fixture(autouse=True, scope="session")
def _signals_are_heard() -> Iterator[None]:
    """Also where the tests run under nohup, or in the background of a shell: what they start would ignore signals."""
    heard = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in heard.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests derive from data is kept for their session alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two cores are shared by all tests: one thread each, which also pins the bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Each test starts outside of any run."""
    from lockstep.workers.rank import leave

    leave()
    yield
    leave()


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command shows the log on the screen; no other test shall see it there."""
    yield
    logger = logging.getLogger("lockstep")
    for handler in [handler for handler in logger.handlers if isinstance(handler, LineHandler)]:
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def run_workers() -> Callable[..., list[Any]]:
    """See `worker_processes.run_workers`."""
    return worker_processes.run_workers
