from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.parallel import watch
from lockstep.parallel.watch import Limits, Place, Trouble, Verdict, Watch

LIMITS = Limits()
PLACE = Place(rank=1, pid=123, step=57, phase="exchange")


def running(rank: int) -> bool:
    return False


def looks(watch: Watch, start: float, seconds: float, stopped: bool = False) -> list[tuple[float, Verdict]]:
    """What is decided when the launcher looks ten times a second, and when (in seconds after the start)."""
    decided = []
    for tick in range(1, round(seconds * 10) + 1):
        decided += [(tick / 10, verdict) for verdict in watch.look(start + tick / 10, lambda rank: stopped)]
    return decided


def silent(phase: str) -> Watch:
    """One worker that was heard at time 0, in this phase, and not again."""
    watch = Watch(1, LIMITS, now=0.0)
    watch.heard(0, phase)
    return watch


def test_a_stopped_worker_is_killed_after_two_seconds() -> None:
    ((seconds, verdict),) = looks(silent("compute"), 0.0, 100.0, stopped=True)
    assert seconds == pytest.approx(2.0, abs=0.11)
    assert (verdict.action, verdict.stopped) == ("kill", True)


def test_a_silent_worker_that_runs_shows_its_stack_once_and_is_killed_later() -> None:
    (dumped, dump), (killed, kill) = looks(silent("exchange"), 0.0, 100.0)
    assert dumped == pytest.approx(10.0, abs=0.11)
    assert killed == pytest.approx(60.0, abs=0.11)
    assert (dump.action, kill.action, kill.stopped) == ("dump", "kill", False)
    assert kill.silent_seconds == pytest.approx(60.0, abs=0.11)


def test_a_worker_that_starts_may_be_silent_for_ten_times_as_long() -> None:
    decided = looks(silent("start"), 0.0, 1000.0)
    assert [round(seconds / 10) for seconds, _ in decided] == [10, 60]


def test_a_worker_that_starts_but_is_stopped_may_not() -> None:
    ((seconds, verdict),) = looks(silent("start"), 0.0, 100.0, stopped=True)
    assert seconds == pytest.approx(2.0, abs=0.11)
    assert verdict.action == "kill"


def test_a_stack_is_shown_again_when_the_worker_spoke_in_between() -> None:
    watch = silent("compute")
    assert [verdict.action for _, verdict in looks(watch, 0.0, 15.0)] == ["dump"]
    watch.heard(0, "compute")
    assert [verdict.action for _, verdict in looks(watch, 15.0, 15.0)] == ["dump"]


def test_the_pause_of_the_launcher_is_nobodys_silence() -> None:
    watch = silent("compute")
    assert watch.look(3600.0, lambda rank: True) == []
    assert [round(seconds, 1) for seconds, _ in looks(watch, 3600.0, 10.0, stopped=True)] == [1.5]


def test_only_the_silent_one_is_judged() -> None:
    watch = Watch(3, LIMITS, now=0.0)
    for tick in range(1, 40):
        for rank in (0, 2):
            watch.heard(rank, "exchange")
        verdicts = watch.look(tick / 10, lambda rank: rank == 1)
        assert [verdict.rank for verdict in verdicts] in ([], [1])
        if verdicts:
            break
    assert verdicts[0].rank == 1


def test_a_worker_that_has_ended_is_silent_for_good() -> None:
    watch = silent("compute")
    watch.forget(0)
    watch.forget(0)
    assert looks(watch, 0.0, 100.0, stopped=True) == []


@given(st.lists(st.floats(min_value=0.01, max_value=1.9), max_size=50))
def test_who_speaks_often_enough_is_left_alone(silences: list[float]) -> None:
    watch, now = Watch(1, LIMITS, now=0.0), 0.0
    for seconds in silences:
        now += seconds
        assert watch.look(now, lambda rank: True) == []
        watch.heard(0, "compute")


def test_a_failure_is_told_with_its_place_and_its_text_last() -> None:
    trouble = watch.failed(PLACE, "error", "Traceback ...\nValueError: bad\n")
    assert trouble.text == "worker 1 failed at step 57 (phase exchange):\nTraceback ...\nValueError: bad"


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (-9, "worker 1 (pid 123) was killed by SIGKILL at step 57 (phase exchange)"),
        (-11, "worker 1 (pid 123) was killed by SIGSEGV at step 57 (phase exchange)"),
        (3, "worker 1 (pid 123) ended with exit code 3 at step 57 (phase exchange)"),
    ],
)
def test_a_death_is_told_with_its_signal_or_exit_code(status: int, text: str) -> None:
    assert watch.died(PLACE, status) == Trouble(text)


@pytest.mark.parametrize(
    ("stopped", "text"),
    [
        (True, "worker 1 (pid 123) was stopped (SIGSTOP) for 2.1 s at step 57 (phase exchange), and was killed"),
        (False, "worker 1 (pid 123) gave no sign of life for 2.1 s at step 57 (phase exchange), and was killed"),
    ],
)
def test_a_silence_is_told_with_its_length(stopped: bool, text: str) -> None:
    assert watch.silenced(PLACE, Verdict(1, "kill", 2.1, stopped)) == Trouble(text)


def test_the_cause_is_the_first_that_is_not_a_lost_peer() -> None:
    lost, first, second = Trouble("worker 0 lost worker 1", "peer"), Trouble("bad", "input"), Trouble("worse")
    assert watch.cause([lost, first, second]) is first
    assert watch.cause([lost]) is lost
