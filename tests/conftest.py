"""What all tests share: each starts alone, on one thread."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import worker_processes

from lockstep.reporting.log import LineHandler


@pytest.fixture(autouse=True, scope="session")
def _signals_are_heard() -> Iterator[None]:
    """Also where the tests run under nohup, or in the background of a shell: what they start would ignore signals."""
    heard = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in heard.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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
