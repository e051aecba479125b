from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lockstep import timing
from lockstep.timing import added, measured, timed


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is one second after the one before."""
    ticks: Iterator[float] = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))


def test_a_stage_within_another_takes_its_time_from_it() -> None:
    with measured() as seconds, timed("augment"), timed("decode"):
        pass
    assert seconds == {"augment": 2.0, "decode": 1.0}


def test_the_same_stage_again_adds_up() -> None:
    with measured() as seconds:
        for _ in range(3):
            with timed("read"):
                pass
    assert seconds == {"read": 3.0}


def test_an_error_ends_its_stages() -> None:
    with measured() as seconds:
        with pytest.raises(ValueError, match="torn"), timed("augment"), timed("decode"):
            raise ValueError("torn")
        with timed("read"):
            pass
    assert seconds == {"augment": 2.0, "decode": 1.0, "read": 1.0}


def test_where_nobody_measures_nothing_is_kept() -> None:
    with timed("read"):
        pass
    with measured() as seconds:
        pass
    assert seconds == {}


def test_threads_are_measured_apart() -> None:
    with measured() as here, timed("read"):
        other = threading.Thread(target=timed("decode").__enter__)
        other.start()
        other.join()
    assert here == {"read": 1.0}


def test_seconds_add_by_stage() -> None:
    assert added({"read": 1.0, "decode": 2.0}, {"decode": 0.5, "collate": 1.0}) == {
        "read": 1.0,
        "decode": 2.5,
        "collate": 1.0,
    }
