from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launcher import watchdog
from lockstep.launcher.watchdog import Failure, Limits, Verdict, Watchdog, WorkerStatus

LIMITS = Limits()
STATUS = WorkerStatus(rank=1, pid=123, step=57, phase="exchange")


def running(rank: int) -> bool:
    return False


def looks(watch: Watchdog, start: float, seconds: float, stopped: bool = False) -> list[tuple[float, Verdict]]:
    """What is decided when the launcher looks ten times a second, and when (in seconds after the start)."""
    decided = []
    for tick in range(1, round(seconds * 10) + 1):
        decided += [(tick / 10, verdict) for verdict in watch.poll(start + tick / 10, lambda rank: stopped)]
    return decided


def at(phase: str) -> Watchdog:
    """One worker that told at time 0 that it is in this phase, and nothing since."""
    watch = Watchdog(1, LIMITS, now=0.0)
    watch.record_beat(0, 0, phase, 1)
    return watch


def beating(watch: Watchdog, start: float, seconds: float, places: list[tuple[int, str, int]]) -> list[Verdict]:
    """What is decided while all workers say twice a second that they are still at these places."""
    decided = []
    for tick in range(1, round(seconds * 2) + 1):
        for rank, (step, phase, count) in enumerate(places):
            watch.record_beat(rank, step, phase, count, waits=phase in ("exchange", "gather"))
        decided += watch.poll(start + tick / 2, running)
    return decided


def test_a_stopped_worker_is_killed_after_two_seconds() -> None:
    ((seconds, verdict),) = looks(at("compute"), 0.0, 100.0, stopped=True)
    assert seconds == pytest.approx(2.0, abs=0.11)
    assert (verdict.action, verdict.reason) == ("kill", "stopped")


def test_a_silent_worker_that_runs_shows_its_stack_once_and_is_killed_later() -> None:
    (shown, show), (killed, kill) = looks(at("exchange"), 0.0, 100.0)
    assert shown == pytest.approx(10.0, abs=0.11)
    assert killed == pytest.approx(60.0, abs=0.11)
    assert (show.action, kill.action, kill.reason) == ("show", "kill", "silent")
    assert kill.seconds == pytest.approx(60.0, abs=0.11)


@pytest.mark.parametrize("phase", ["start", "first step", "save", "evaluate", "loop body", "end"])
def test_in_phases_that_take_long_a_worker_may_be_silent_for_longer(phase: str) -> None:
    assert [round(seconds) for seconds, _ in looks(at(phase), 0.0, 1000.0)] == [60, 360]


def test_a_worker_that_starts_but_is_stopped_may_not() -> None:
    ((seconds, verdict),) = looks(at("start"), 0.0, 100.0, stopped=True)
    assert seconds == pytest.approx(2.0, abs=0.11)
    assert verdict.action == "kill"


def test_a_stack_is_shown_again_when_the_worker_spoke_in_between() -> None:
    watch = at("compute")
    assert [verdict.action for _, verdict in looks(watch, 0.0, 15.0)] == ["show"]
    watch.record_beat(0, 1, "compute", 2)
    assert [verdict.action for _, verdict in looks(watch, 15.0, 15.0)] == ["show"]


def test_the_pause_of_the_launcher_is_nobodys_silence() -> None:
    watch = at("compute")
    assert watch.poll(3600.0, lambda rank: True) == []
    assert [round(seconds, 1) for seconds, _ in looks(watch, 3600.0, 10.0, stopped=True)] == [1.5]


def test_only_the_silent_one_is_judged() -> None:
    watch = Watchdog(3, LIMITS, now=0.0)
    for tick in range(1, 40):
        for rank in (0, 2):
            watch.record_beat(rank, 1, "exchange", tick)
        verdicts = watch.poll(tick / 10, lambda rank: rank == 1)
        assert [verdict.rank for verdict in verdicts] in ([], [1])
        if verdicts:
            break
    assert verdicts[0].rank == 1


def test_a_worker_that_has_ended_is_silent_for_good() -> None:
    watch = at("compute")
    watch.forget(0)
    watch.forget(0)
    assert looks(watch, 0.0, 100.0, stopped=True) == []


@given(st.lists(st.floats(min_value=0.01, max_value=1.9), max_size=50))
def test_who_speaks_often_enough_is_left_alone(silences: list[float]) -> None:
    watch, now = Watchdog(1, LIMITS, now=0.0), 0.0
    for count, seconds in enumerate(silences):
        now += seconds
        assert watch.poll(now, lambda rank: True) == []
        watch.record_beat(0, count, "compute", count)


def test_a_worker_that_beats_but_stands_still_shows_its_stack_and_is_killed_later() -> None:
    show, kill = beating(at("compute"), 0.0, 700.0, [(0, "compute", 1)])
    assert (show.action, show.reason, kill.action, kill.reason) == ("show", "stuck", "kill", "stuck")
    assert show.seconds == pytest.approx(10.0, abs=0.11)
    assert kill.seconds == pytest.approx(600.0, abs=0.11)


def test_without_a_limit_it_is_never_killed() -> None:
    watch = Watchdog(1, replace(LIMITS, hang_seconds=0), now=0.0)
    assert [verdict.action for verdict in beating(watch, 0.0, 5000.0, [(0, "compute", 1)])] == ["show"]


@pytest.mark.parametrize(
    ("phase", "shown_after", "killed_after"),
    [("compute", 10, 600), ("loop body", 60, 600), ("data", 15, 900), ("save", 60, 3600), ("evaluate", 60, 3600)],
)
def test_what_a_worker_may_take_depends_on_its_phase(phase: str, shown_after: int, killed_after: int) -> None:
    verdicts = beating(at(phase), 0.0, 4000.0, [(0, phase, 1)])
    assert [round(each.seconds) for each in verdicts] == [shown_after, killed_after]


@pytest.mark.parametrize(("phase", "limit"), [("exchange", 13), ("loop body", 13), ("save", 78)])
def test_a_short_limit_holds_and_the_stack_is_shown_before_it(phase: str, limit: int) -> None:
    show, kill = beating(Watchdog(1, replace(LIMITS, hang_seconds=13.0), 0.0), 0.0, 100.0, [(0, phase, 1)])
    assert show.seconds == pytest.approx(min(10, limit / 2) if phase == "exchange" else limit / 2, abs=0.51)
    assert (round(kill.seconds), kill.limit_seconds) == (limit, limit)


def test_steps_that_take_long_are_no_hang() -> None:
    watch = at("compute")
    for step in range(1, 4):
        verdicts = beating(watch, 90.0 * step, 90.0, [(step, "compute", step)])
        assert [verdict.action for verdict in verdicts] == (["show"] if step == 1 else [])
    show, *_ = beating(watch, 360.0, 1000.0, [(4, "compute", 4)])
    assert show.seconds == pytest.approx(900.0, rel=0.01)


def test_at_the_same_step_and_phase_a_count_that_grows_is_no_hang() -> None:
    watch = at("evaluate")
    decided = []
    for batch in range(30):
        decided += beating(watch, 50.0 * batch, 50.0, [(0, "evaluate", batch)])
    assert decided == []


@pytest.mark.parametrize("call", ["exchange", "gather"])
def test_who_waits_for_all_others_is_not_to_blame(call: str) -> None:
    watch = Watchdog(3, LIMITS, now=0.0)
    verdicts = beating(watch, 0.0, 605.0, [(5, call, 9), (5, "compute", 8), (5, call, 9)])
    assert [(verdict.rank, verdict.action) for verdict in verdicts] == [(1, "show"), (1, "kill")]
    # Nor is it when the last one comes at last.
    watch = Watchdog(2, LIMITS, now=0.0)
    beating(watch, 0.0, 500.0, [(5, "exchange", 9), (5, "compute", 8)])
    assert beating(watch, 500.0, 9.0, [(5, "exchange", 9), (5, "exchange", 9)]) == []


def test_where_all_wait_in_the_exchange_all_are_stuck() -> None:
    verdicts = beating(Watchdog(2, LIMITS, now=0.0), 0.0, 700.0, [(5, "exchange", 9)] * 2)
    assert [(verdict.rank, verdict.action) for verdict in verdicts] == [
        (0, "show"),
        (1, "show"),
        (0, "kill"),
        (1, "kill"),
    ]


def test_code_of_a_script_outside_of_any_loop_may_take_its_time() -> None:
    assert beating(at("script"), 0.0, 50_000.0, [(0, "script", 1)]) == []
    watch = Watchdog(2, LIMITS, now=0.0)
    assert beating(watch, 0.0, 5_000.0, [(0, "script", 1), (0, "script", 1)]) == []
    show, kill = beating(watch, 5_000.0, 3_605.0, [(0, "script", 1), (0, "gather", 2)])
    assert [(each.rank, each.action, round(each.seconds)) for each in (show, kill)] == [
        (0, "show", 60),
        (0, "kill", 3600),
    ]
    assert [verdict.reason for _, verdict in looks(at("script"), 0.0, 1000.0)] == ["silent", "silent"]


def test_how_long_a_worker_waits_for_all_others_is_counted() -> None:
    watch = at("evaluate")
    for tick in range(1, 51):
        watch.record_beat(0, 0, "evaluate", 1, waits=tick > 20)
        watch.poll(tick / 10, running)
    assert watch.longest_wait() == pytest.approx(3.0, abs=0.11)
    watch.record_beat(0, 0, "evaluate", 1)
    assert watch.longest_wait() == 0


def test_a_failure_is_told_with_its_place_and_its_text_last() -> None:
    failure = watchdog.raised(STATUS, "error", "Traceback ...\nValueError: bad\n")
    assert failure.text == "worker 1 failed at step 57 (phase exchange):\nTraceback ...\nValueError: bad"


def test_wrong_input_is_told_by_its_text_alone() -> None:
    assert watchdog.raised(STATUS, "input", "Record 7 is damaged.\n").text == "Record 7 is damaged."
    apart = watchdog.raised(replace(STATUS, host="node2"), "input", "Record 7 is damaged.\n")
    assert apart.text == "Record 7 is damaged.\n  said by:  worker 1 on node2"


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (-9, "worker 1 (pid 123) was killed by SIGKILL at step 57 (phase exchange)"),
        (-11, "worker 1 (pid 123) was killed by SIGSEGV at step 57 (phase exchange)"),
        (3, "worker 1 (pid 123) ended with exit code 3 at step 57 (phase exchange)"),
    ],
)
def test_a_death_is_told_with_its_signal_or_exit_code(status: int, text: str) -> None:
    assert watchdog.died(STATUS, status) == Failure(text, "lost" if status < 0 else "error", "worker 1")


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("stopped", "worker 1 (pid 123) was stopped (SIGSTOP) for 2.1 s at step 57 (phase exchange), and was killed"),
        ("silent", "worker 1 (pid 123) gave no sign of life for 2.1 s at step 57 (phase exchange), and was killed"),
        (
            "stuck",
            "worker 1 (pid 123) has been at step 57 (phase exchange) for 2 s, and was killed; its stack is shown above."
            " The limit in this phase is 2 s: where it may take longer, raise watch.hang_seconds in the recipe, or"
            " --hang-seconds of lockstep run (0: no limit)",
        ),
    ],
)
def test_a_kill_is_told_with_its_reason(reason: Literal["stopped", "silent", "stuck"], text: str) -> None:
    assert watchdog.killed(STATUS, Verdict(1, "kill", reason, 2.1, 2.0)) == Failure(text, "lost", "worker 1")


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        ("save", "The limit in this phase is 78 s, 6 times watch.hang_seconds: where it may take longer, raise"),
        ("data", "The limit in this phase is 78 s, 1.5 times watch.hang_seconds: where it may take longer, raise"),
        ("loop body", "The limit in this phase is 78 s: where it may take longer, raise watch.hang_seconds"),
        ("regroup", "Those that go on have 78 s to find each other"),
    ],
)
def test_a_kill_is_told_with_the_limit_of_its_phase(phase: str, text: str) -> None:
    failure = watchdog.killed(replace(STATUS, phase=phase), Verdict(1, "kill", "stuck", 78.3, 78.0))
    assert f" for 78 s, and was killed; its stack is shown above. {text}" in failure.text


def test_who_is_missed_is_told_with_its_place() -> None:
    said = (
        "worker 1 (pid 123) ended with exit code 0 at step 57 (phase exchange), before worker 2 at step 57 (phase "
        "compute), which needs it: their loops do not end at the same step (until, or where a loop is left)"
    )
    assert watchdog.left([STATUS], [replace(STATUS, rank=2, phase="compute")]) == [Failure(said, who="worker 1")]


def test_the_cause_is_the_first_that_is_not_a_lost_peer() -> None:
    lost, first, second = Failure("worker 0 lost worker 1", "peer"), Failure("bad", "input"), Failure("worse")
    assert watchdog.root_cause([lost, first, second]) is first
    assert watchdog.root_cause([lost]) is lost


def test_those_that_cannot_find_each_other_after_a_loss_are_ended_soon() -> None:
    watch = Watchdog(2, Limits(regroup_seconds=30.0), 0.0)
    verdicts = beating(watch, 0.0, 40.0, [(0, "regroup", 1), (1, "regroup", 1)])
    assert [(each.action, round(each.seconds)) for each in verdicts] == [("show", 10)] * 2 + [("kill", 30)] * 2


def test_a_worker_that_is_started_anew_is_watched_from_then_on() -> None:
    watch = Watchdog(1, Limits(), 0.0)
    watch.forget(0)
    assert looks(watch, 0.0, 100.0) == []
    watch.watch(0)
    assert [round(second) for second, _ in looks(watch, 100.0, 400.0)] == [60, 360], "it has the time of a start"
