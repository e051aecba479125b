"""Who goes on when workers are lost: the decisions, and real workers that are killed and stopped."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.launcher.launch import launch_command
from lockstep.launcher.survival import Survival
from lockstep.launcher.watchdog import Failure
from lockstep.workers.membership import Generation
from tests.launcher import surviving_run


def lost(number: int) -> Failure:
    return Failure(f"worker {number} was killed", "lost", f"worker {number}")


def lose(survival: Survival, *numbers: int) -> Generation | None:
    for number in numbers:
        survival.record_failure(number, lost(number))
    return survival.without_lost()


def replace(survival: Survival, number: int, step: int, *, took_part: bool) -> bool:
    """Start a worker anew if it may be."""
    if survival.why_not_replaced(number, step, took_part=took_part):
        return False
    survival.record_started(number)
    return True


def form(survival: Survival) -> list[int]:
    """All members of the newest generation find each other; returns those who are new."""
    arrived: list[int] = []
    for number in survival.generation.members:
        arrived += survival.record_joined(number, survival.generation.number)
    return arrived


def test_those_that_are_left_keep_their_order_and_newcomers_come_last() -> None:
    survival = Survival(1, 3, num_workers=4)
    assert lose(survival, 0, 2) == Generation(
        1, (1, 3), "worker 0 and worker 2", "worker 0 was killed\nworker 2 was killed"
    )
    assert replace(survival, 0, 5, took_part=True)
    assert replace(survival, 2, 5, took_part=True)
    assert form(survival) == []
    survival.record_ready(2)
    assert survival.with_newcomers() is None, "the other newcomer is not ready"
    survival.record_ready(0)
    assert survival.with_newcomers() == Generation(2, (1, 3, 0, 2))
    assert survival.is_newcomer(0)
    assert form(survival) == [0, 2]
    assert not survival.is_newcomer(0)


def test_newcomers_that_are_ready_join_at_once_where_another_worker_is_lost() -> None:
    survival = Survival(1, 3, num_workers=3)
    lose(survival, 1)
    replace(survival, 1, 5, took_part=True)
    form(survival)
    survival.record_ready(1)
    assert lose(survival, 0) == Generation(2, (2, 1), "worker 0", "worker 0 was killed")


def test_newcomers_wait_until_the_others_have_found_each_other() -> None:
    survival = Survival(1, 3, num_workers=3)
    lose(survival, 1)
    replace(survival, 1, 5, took_part=True)
    survival.record_ready(1)
    assert survival.with_newcomers() is None
    form(survival)
    assert survival.with_newcomers() is not None


def test_a_newcomer_that_fails_before_it_takes_part_changes_nothing_for_the_others() -> None:
    survival = Survival(1, 3, num_workers=2)
    lose(survival, 1)
    form(survival)
    replace(survival, 1, 5, took_part=True)
    survival.record_failure(1, lost(1))
    assert survival.why_not(has_ended=True) == ""
    assert survival.without_lost() is None
    assert survival.generation == Generation(1, (0,), "worker 1", "worker 1 was killed")


def test_with_too_few_they_do_not_go_on() -> None:
    survival = Survival(2, 3, num_workers=3)
    survival.record_failure(0, lost(0))
    assert survival.why_not(has_ended=False) == ""
    survival.record_failure(1, lost(1))
    assert survival.why_not(has_ended=False) == "1 of 3 workers are left, fewer than 2 (watch.min_workers)"
    assert survival.unsettled == [lost(0), lost(1)]


def test_no_more_workers_are_left_than_there_are() -> None:
    with pytest.raises(InputError, match="fewer workers than are to be left") as caught:
        Survival(min_workers=4, replacements=3, num_workers=3)
    assert caught.value.given == "3 workers, of which at least 4 are to go on (watch.min_workers)"


def test_newcomers_alone_have_nothing_to_go_on_from() -> None:
    survival = Survival(1, 3, num_workers=2)
    lose(survival, 0)
    replace(survival, 0, 5, took_part=True)
    form(survival)
    survival.record_ready(0)
    survival.with_newcomers()
    survival.record_failure(1, lost(1))
    assert survival.why_not(has_ended=False) == "0 of 2 workers are left, fewer than 1 (watch.min_workers)"


def test_where_some_have_ended_the_others_do_not_go_on() -> None:
    survival = Survival(1, 3, num_workers=2)
    survival.record_failure(1, lost(1))
    assert "have come to their end" in survival.why_not(has_ended=True)


def test_a_loss_is_settled_when_the_others_have_found_each_other() -> None:
    survival = Survival(1, 3, num_workers=3)
    lose(survival, 1)
    assert survival.unsettled == [lost(1)]
    form(survival)
    assert survival.unsettled == []


def test_a_worker_is_started_anew_as_long_as_the_run_gets_on_with_it() -> None:
    survival = Survival(1, 2, num_workers=2)
    assert [replace(survival, 1, 5, took_part=True) for _ in range(3)] == [True, True, False]
    assert replace(survival, 1, 6, took_part=True)
    assert replace(survival, 1, 7, took_part=False), "the others got on without it"
    assert not replace(survival, 1, 8, took_part=False)
    assert replace(survival, 0, 5, took_part=True), "each worker counts by itself"


def test_each_further_try_waits_twice_as_long() -> None:
    survival, pauses = Survival(1, 4, num_workers=2), list[float]()
    for _ in range(4):
        assert survival.why_not_replaced(1, 5, took_part=False) == ""
        pauses.append(survival.pause_seconds(1))
    assert pauses == [0.0, 2.0, 4.0, 8.0]
    assert survival.why_not_replaced(1, 5, took_part=False) == (
        "watch.restarts (--restarts) allows 4 starts in a row without progress; mend what has ended it, then stop the "
        "run, and start it again: it goes on with all workers"
    )


def test_a_host_that_has_come_back_counts_anew() -> None:
    survival = Survival(1, 1, num_workers=2)
    assert [replace(survival, 1, 5, took_part=False) for _ in range(2)] == [True, False]
    assert survival.why_not_back(1) == ""
    assert replace(survival, 1, 5, took_part=False)
    survival.dismiss_newcomers()
    assert survival.why_not_back(1) == "its run has ended"


def test_a_broken_connection_makes_a_generation_of_the_same_workers() -> None:
    survival = Survival(1, 1, num_workers=2)
    survival.record_broken(0, now=10.0)
    survival.record_broken(0, now=11.9)
    assert survival.reconnected(11.9, step=3) is None, "who is lost may not be known yet"
    found = survival.reconnected(12.1, step=3)
    assert found is not None
    assert (found.number, found.members, found.lost) == (1, (0, 1), "a connection")
    survival.record_broken(0, now=13.0)
    assert survival.reconnected(99.0, step=3) is None, "that was said of the generation before"
    survival.record_broken(1, now=100.0)
    assert survival.reconnected(103.0, step=3) is None, "nothing is gained by it"


def test_newcomers_are_dismissed_in_whatever_state_they_are() -> None:
    survival = Survival(1, 3, num_workers=3)
    lose(survival, 1)
    replace(survival, 1, 5, took_part=True)
    form(survival)
    survival.record_ready(1)
    survival.with_newcomers()
    lose(survival, 2)
    replace(survival, 2, 5, took_part=True)
    assert survival.generation.members == (0, 1)
    assert survival.dismiss_newcomers() == [2, 1]
    assert survival.generation.members == (0,)
    assert survival.dismiss_newcomers() == []


EVENTS = st.tuples(st.sampled_from(["lose", "ready", "join", "take in"]), st.integers(0, 3))


ONE_OF_TWO_IS_IN = [*[("lose", 0)] * 4, ("lose", 1), ("lose", 2), ("ready", 1), ("ready", 2), ("join", 3)]
ONE_OF_TWO_IS_IN += [("take in", 0), ("join", 2), ("lose", 3)]


@example(ONE_OF_TWO_IS_IN)
@given(st.lists(EVENTS, max_size=60))
def test_whatever_happens_the_first_of_a_generation_has_taken_part_before(events: list[tuple[str, int]]) -> None:
    """It alone is asked what the others are called, and its memory is a checkpoint."""
    survival, alive = Survival(1, 3, num_workers=4), {0, 1, 2, 3}
    for event, number in events:
        if event == "lose" and number in alive:
            took_part = not survival.is_newcomer(number)
            survival.record_failure(number, lost(number))
            if survival.why_not(has_ended=False):
                return
            survival.without_lost()
            alive = alive - {number} | ({number} if replace(survival, number, 0, took_part=took_part) else set())
        elif event == "ready":
            survival.record_ready(number)
        elif event == "join" and number in survival.generation.members:
            survival.record_joined(number, survival.generation.number)
        elif event == "take in":
            survival.with_newcomers()
        members = survival.generation.members
        assert not survival.is_newcomer(members[0])
        assert len(set(members)) == len(members)
        assert set(members) <= alive


# Real workers ---------------------------------------------------------------------------------------------------------


def run_with(folder: Path, num_workers: int, num_steps: int, *faults: str, **plan: Any) -> tuple[int, list[list[Any]]]:
    """Launch `surviving_run`; returns the exit code, and what its workers have said, in time."""
    survival = {"min_workers": 1, "replacements": 3} | plan
    argv = [str(folder), json.dumps({"workers": num_workers, "survival": survival}), str(num_steps), *faults]
    preload, spares = ("torch", "lockstep.exchange.collectives"), ("no_such_module", "wave")
    code = launch_command(argv, plan=surviving_run.plan, main=surviving_run.main, preload=preload, spares=spares)
    said = [json.loads(line) for file in folder.iterdir() for line in file.read_text().splitlines()]
    return code, sorted(said, key=lambda words: words[-1])


@pytest.mark.process
def test_the_others_go_on_when_workers_are_killed_the_chief_too_and_take_others_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lockstep")
    code, said = run_with(tmp_path, 3, 60, "2:SIGKILL@10", "0:SIGKILL@35")
    assert code == 0
    ends = [words for words in said if words[1] == "done"]
    assert [words[2:4] for words in ends] == [[60, surviving_run.total_of(60)]] * 3
    assert max(words[4] for words in ends) < 24, "descriptors are closed with each generation"
    names = {worker: [words[4] for words in said if words[0] == worker and words[4]] for worker in range(3)}
    assert [1, ["worker 0", "worker 1"]] in names[1]
    assert [0, ["worker 1", "worker 2", "worker 0"]] in names[1], "the newcomer is not the chief"
    assert [2, ["worker 1", "worker 2", "worker 0"]] in names[0]
    began = [words[:2] for words in said if words[1] in ("cold", "spare")]
    assert sorted(began[:3]) == [[0, "cold"], [1, "cold"], [2, "cold"]]
    assert began[-1] == [0, "spare"], "it was forked with what is imported for those that take the place of lost ones"
    lost = next(words for words in said if words[1] == "lost")
    goes_on = next(words for words in said if words[1] == "goes on")
    assert lost[4].startswith(f"worker {lost[0]} lost worker 2.\n  given:    worker 2 (pid ")
    assert goes_on[-1] - lost[-1] < 2.0
    killed = (
        r"worker {0} \(pid \d+\) was killed by SIGKILL at step .*\n2 of 3 workers are left; worker {0} is started anew"
    )
    takes_part = r"worker {0} \(pid \d+\) takes part from now on"
    expected = [line.format(worker) for worker in (2, 0) for line in (killed, "2 of 3 workers go on", takes_part)]
    assert [re.fullmatch(*pair) is not None for pair in zip(expected, caplog.messages, strict=True)] == [True] * 6


@pytest.mark.slow
def test_the_others_go_on_when_workers_are_stopped_or_lost_at_once(tmp_path: Path) -> None:
    code, said = run_with(tmp_path, 4, 80, "1:SIGSTOP@10", "0:SIGKILL@30", "3:SIGKILL@30", "2:SIGKILL@60")
    assert code == 0
    assert [words[2:4] for words in said if words[1] == "done"] == [[80, surviving_run.total_of(80)]] * 4
    fault = next(words for words in said if words[1] == "fault")
    goes_on = next(words for words in said if words[1] == "goes on")
    assert 1.8 <= goes_on[-1] - fault[-1] < 4.0, "it beats ten times a second until then"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_many_kills_at_random_steps_lose_nothing(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    steps = sorted(random.sample(range(5, 90), 12))
    faults = [f"{random.randrange(4)}:SIGKILL@{step}" for step in steps]
    code, said = run_with(tmp_path, 4, 100, *faults, replacements=100)
    assert code == 0
    assert [words[2:4] for words in said if words[1] == "done"] == [[100, surviving_run.total_of(100)]] * 4
