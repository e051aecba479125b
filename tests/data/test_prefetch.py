from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from lockstep.data.prefetch import LoaderStatus, StallTimeout
from lockstep.errors import WorkerError

THERE = LoaderStatus("loader process 0 (pid 7)", "the batch at position 64", "cat/7.jpg", "Stack:\n  File")


def found_after(seconds: float) -> Callable[[float], str]:
    """What is found after so many seconds of a clock that only looks move."""
    left = seconds

    def ready(look: float) -> str:
        nonlocal left
        assert look > 0
        left -= look
        return "found" if left < 0 else ""

    return ready


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The warnings since this was last asked."""

    def since() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    with caplog.at_level(logging.WARNING, "lockstep"):
        yield since


def test_a_wait_of_ten_seconds_is_told_once(warnings: Callable[[], list[str]]) -> None:
    stall_timeout = StallTimeout(0)
    assert stall_timeout.wait(found_after(9.9), lambda: THERE) == "found"
    assert not warnings()
    stall_timeout = StallTimeout(0)
    assert stall_timeout.wait(found_after(1000), lambda: THERE) == "found"
    assert warnings() == [
        "the trainer has waited 10 s for the batch at position 64: loader process 0 (pid 7) is at cat/7.jpg\n"
        "Stack:\n  File"
    ]


def test_a_stall_is_warned_of_only_at_ten_times_the_waits_before(warnings: Callable[[], list[str]]) -> None:
    stall_timeout = StallTimeout(0)
    stall_timeout.wait(found_after(6.2), lambda: THERE)  # found in the look that begins at 6 s
    stall_timeout.wait(found_after(59), lambda: THERE)
    assert not warnings()
    stall_timeout.wait(found_after(595), lambda: THERE)
    assert [message[:32] for message in warnings()] == ["the trainer has waited 590 s for"]


def test_a_wait_ends_after_the_timeout(warnings: Callable[[], list[str]]) -> None:
    stall_timeout = StallTimeout(600)
    assert stall_timeout.wait(found_after(599.9), lambda: THERE) == "found"
    with pytest.raises(WorkerError) as caught:
        stall_timeout.wait(found_after(600.1), lambda: THERE)
    assert str(caught.value) == (
        "Loader process 0 (pid 7) hangs: the trainer has waited 600 s for the batch at position 64.\n"
        "  given:    it is at cat/7.jpg\n"
        "  expected: a batch within timeout_seconds=600\n"
        "  hint:     look at that example and the disk it is on: a network disk may not answer; if reading may take so "
        "long, give ls.data.Loader a larger timeout_seconds (a recipe: watch.hang_seconds; 0 waits for ever)"
    )
    assert caught.value.__notes__ == ["Stack:\n  File"]


def test_a_short_timeout_comes_before_any_warning(warnings: Callable[[], list[str]]) -> None:
    with pytest.raises(WorkerError, match=r"waited 0\.3 s for"):
        StallTimeout(0.3).wait(found_after(1), lambda: THERE)
    assert not warnings()
