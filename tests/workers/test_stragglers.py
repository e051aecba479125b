from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.workers.stragglers import Straggler, Stragglers, find_straggler


def test_the_slowest_worker_is_named_with_its_phase_and_what_it_costs() -> None:
    usual = {"data": 1.0, "compute": 5.0, "exchange": 4.0, "first step": 3.0}
    slow = {"data": 4.0, "compute": 5.5, "exchange": 0.5, "first step": 9.0}
    found = find_straggler([usual, usual, slow, usual], 10)
    assert found == Straggler(2, "input", 0.4, 0.1, 0.35)
    assert found.describe("worker 2 on b") == (
        "worker 2 on b is the slowest: input takes it 0.400 s a step, and the others 0.100 s; they wait for it 35% of "
        "the time"
    )


def test_a_chief_that_saves_is_a_straggler_of_its_checkpoints() -> None:
    found = find_straggler([{"save": 3.0, "compute": 6.0, "exchange": 1.0}, {"compute": 6.0, "exchange": 4.0}], 100)
    assert found
    assert (found.rank, found.phase, found.share) == (0, "checkpoints", 0.3)


def test_workers_that_are_alike_have_no_straggler() -> None:
    assert find_straggler([{"compute": 90.0, "exchange": 10.0}, {"compute": 85.0, "exchange": 15.0}], 10) is None
    assert (
        find_straggler([{"compute": 9.0, "exchange": 0.0}, {"compute": 1.0, "exchange": 8.0}], 10) is None
    )  # too short
    assert find_straggler([{"compute": 90.0}], 10) is None
    assert find_straggler([{"compute": 90.0}, {"compute": 10.0}], 0) is None
    assert find_straggler([{}, {}], 10) is None


def test_a_chief_that_serves_the_others_does_not_make_stragglers_of_them() -> None:
    serves = {"exchange": 95.0, "loop body": 3.0, "save": 2.0}
    assert find_straggler([serves, {"compute": 90.0, "exchange": 10.0}], 10) is None
    assert find_straggler([serves, {"compute": 90.0}, {"compute": 88.0, "exchange": 2.0}], 10) is None
    found = find_straggler([serves, {"compute": 90.0}, {"compute": 45.0, "exchange": 45.0}], 10)
    assert found
    assert found.rank == 1, "with as many workers as gradients the others do wait"


times = st.dictionaries(st.sampled_from(["data", "compute", "exchange", "save", "script"]), st.floats(0, 1e6))


@given(st.lists(times, min_size=2, max_size=6))
def test_whatever_the_times_the_share_is_one(of_workers: list[dict[str, float]]) -> None:
    found = find_straggler(of_workers, 3)
    assert found is None or (0.1 <= found.share <= 1.0 and found.step_seconds >= found.usual_seconds)


def test_each_look_is_at_the_time_since_the_last_one_and_they_become_rare() -> None:
    stragglers = Stragglers(now=0.0)
    looks = []
    for second in range(1, 700):
        first, then = min(second, 60), max(second - 60, 0)
        times = {0: first + then / 2, 1: first / 2 + then}  # worker 1 is the slower one from the first look on
        for rank in (0, 1):
            stragglers.record(rank, second, {"compute": times[rank], "exchange": second - times[rank]})
        if found := stragglers.poll(float(second)):
            looks.append((second, found.rank, found.step_seconds))
    assert looks == [(60, 0, 1.0), (180, 1, 1.0), (420, 1, 1.0)]


def test_nobody_is_judged_before_all_have_been_heard_or_while_no_step_is_made() -> None:
    stragglers = Stragglers(now=0.0)
    stragglers.record(1, 10, {"compute": 9.0})
    assert stragglers.poll(60.0) is None
    stragglers.record(0, 10, {"compute": 1.0, "exchange": 8.0})
    assert stragglers.poll(180.0) is None


def test_after_a_loss_those_that_are_left_are_compared_from_then_on() -> None:
    stragglers = Stragglers(now=0.0)
    for rank, slow in enumerate([1.0, 1.0, 9.0]):
        stragglers.record(rank, 10, {"compute": 10 * slow, "exchange": 90.0 - 10 * slow})
    stragglers.keep([0, 2])
    stragglers.record(0, 20, {"compute": 10 + 80.0, "exchange": 80.0})
    stragglers.record(2, 20, {"compute": 90 + 10.0, "exchange": 70.0})
    found = stragglers.poll(60.0)
    assert found is not None
    assert (found.rank, found.step_seconds, found.usual_seconds) == (0, 8.0, 1.0)
