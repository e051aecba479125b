"""Tests on separate hosts: skipped, with the reason, where none can be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import separate_hosts
from separate_hosts import Hosts


@pytest.fixture(scope="session")
def why_no_hosts() -> str | None:
    return separate_hosts.missing()


@pytest.fixture
def make_hosts(why_no_hosts: str | None, tmp_path: Path) -> Iterator[Callable[[int], Hosts]]:
    """Make so many hosts, which are removed when the test has ended."""
    if why_no_hosts:
        pytest.skip(why_no_hosts)
    with ExitStack() as stack:
        yield lambda num_hosts: stack.enter_context(Hosts(num_hosts, tmp_path))
