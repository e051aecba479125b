"""The model of `lockstep plan`: its formulas, on costs made up so that the answer can be worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from made_up_costs import make_costs
from torch import nn

from lockstep.errors import InputError
from lockstep.exchange.exchange import AllReduce, Alone
from lockstep.planning.model import (
    Link,
    RunCosts,
    SaveCost,
    Seating,
    SentBucket,
    WorkerCost,
    exposed_seconds,
    predict_step,
    ring_seconds,
)
from lockstep.recipes.parts import Checkpoints
from lockstep.recipes.recipe import Recipe
from lockstep.types import Epochs, Hours, Interval, Steps

MB = 10**6
WORKER = WorkerCost(
    num_local=1,
    tower_size=8,
    first_seconds=0.100,
    further_seconds=0.080,
    first_cpu_seconds=0.100,
    further_cpu_seconds=0.080,
    update_seconds=0.010,
    update_cpu_seconds=0.010,
    input_seconds=0.005,
    input_cpu_seconds=0.005,
    memory_bytes=500 * MB,
    tower_bytes=1 * MB,
)
COSTS = make_costs(
    per_host=4,
    batch_size=32,
    epoch_size=320,
    workers=(WORKER,),
    buckets=(SentBucket(8 * MB, 0.050), SentBucket(2 * MB, 0.0)),
    save=SaveCost(num_bytes=20 * MB, blocked_seconds=0.01, seconds=0.5, cpu_seconds=0.1),
    shared_memory=Link(0.001, 1e-9),
    messages=Link(0.001, 1e-8, 0.0001, 1e-9),
)


def nothing(*_: object) -> None:
    """Stands for a function of the user's own, which nothing here calls."""


@pytest.fixture
def recipe() -> Recipe:
    """Four towers of eight examples."""
    return Recipe.of(nn.Linear, nothing, nothing, batch_size=32, num_towers=4, end=Steps(100))


def test_one_worker_computes_all_towers_in_turn_and_exchanges_nothing(recipe: Recipe) -> None:
    found = predict_step(COSTS, recipe, 1)
    assert found.compute_seconds == pytest.approx(0.1 + 3 * 0.08)
    assert found.step_seconds == pytest.approx(0.34 + 0.01 + 4 * 0.005)  # which it reads itself, between the steps
    assert (found.exchange, found.exchange_seconds, found.limit) == ("nothing", 0.0, "compute")
    assert (found.efficiency, found.memory_bytes) == (1.0, (500 + 3 + 20) * MB)


def test_workers_of_a_host_add_up_in_its_memory(recipe: Recipe) -> None:
    found = predict_step(COSTS, recipe, 4)
    work = 4 * 10 * MB * 1e-9  # four rows, which four cores copy and add up
    assert found.exchange == "shared memory"
    assert found.exchange_seconds == pytest.approx(0.001 + work / 4)
    assert found.step_seconds == pytest.approx(0.1 + 0.01 + 0.005 + 0.011)
    assert found.efficiency == pytest.approx(0.37 / (4 * 0.126))
    assert found.memory_bytes == (500 + 20 + 2 * 10) * MB


def test_towers_that_cannot_be_dealt_evenly_are_waited_for(recipe: Recipe) -> None:
    found = predict_step(COSTS, recipe, 3)
    assert (found.seating.fewest_towers, found.seating.most_towers) == (1, 2)
    assert found.compute_seconds == pytest.approx(0.18)


def test_a_ring_sends_twice_all_bytes_but_one_share() -> None:
    link = Link(0.001, 1e-8)
    assert ring_seconds(link, 1, MB) == 0.0
    assert ring_seconds(link, 2, MB) == pytest.approx(2 * 0.001 + MB * 1e-8)
    assert ring_seconds(link, 8, MB) == pytest.approx(14 * 0.001 + 2 * 7 / 8 * MB * 1e-8)


def test_buckets_are_sent_in_line_beside_the_backward_pass() -> None:
    link = Link(0.0, 1e-8)  # 0.08 s and 0.02 s with two workers
    early, late = SentBucket(8 * MB, 0.2), SentBucket(2 * MB, 0.0)
    assert exposed_seconds([early, late], link, 2) == pytest.approx(0.02), "the first is there before the end"
    assert exposed_seconds([replace(early, early_seconds=0.05), late], link, 2) == pytest.approx(0.03 + 0.02)
    assert exposed_seconds([early], link, 2) == 0.0
    assert exposed_seconds([replace(early, early_seconds=0.05)], link, 2, slowed=2.0) == 0.0


def test_hosts_exchange_over_the_network_that_is_given(recipe: Recipe) -> None:
    two_hosts = replace(COSTS, per_host=2)
    here = predict_step(two_hosts, recipe, 4)
    assert (here.exchange, here.seating.num_hosts) == ("all-reduce", 2)
    assert here.whole_exchange_seconds == pytest.approx(
        sum(ring_seconds(COSTS.messages or Link(0, 0), 4, n * MB) for n in (8, 2))
    )
    given = two_hosts.over(latency_seconds=0.004, bits_per_second=8e7)
    assert given.network == Link(0.005, 1e-7, 0.0001, 1e-9)
    assert predict_step(given, recipe, 4).exchange_seconds > 3 * here.exchange_seconds
    assert predict_step(given, recipe, 2) == predict_step(two_hosts, recipe, 2), "on one host nothing is sent"
    fast = two_hosts.over(None, 1e12)
    assert fast.network == COSTS.messages, "no network is faster than what the workers compute for it"


def test_the_tree_of_an_exact_exchange_is_sent_when_all_is_computed(recipe: Recipe) -> None:
    exact = replace(recipe, exchange=AllReduce(exact=True))
    found = predict_step(replace(COSTS, per_host=1), exact, 4)
    assert found.exchange == "tree"
    assert found.exchange_seconds == found.whole_exchange_seconds == pytest.approx(2 * 0.001 + 2 * 3 / 4 * 0.1)
    assert predict_step(replace(COSTS, per_host=1), exact, 2).exchange == "all-reduce", "two terms have one sum"


def test_more_workers_than_cores_wait_in_turn_for_what_they_compute(recipe: Recipe) -> None:
    one_core = replace(COSTS, num_cores=1)
    found = predict_step(one_core, recipe, 4)
    assert (found.compute_seconds, found.update_seconds) == pytest.approx((4 * 0.1, 4 * 0.01))
    sleeps = replace(WORKER, first_cpu_seconds=0.001, further_cpu_seconds=0.001)
    assert predict_step(replace(one_core, workers=(sleeps,)), recipe, 4).compute_seconds == pytest.approx(0.103)
    assert Link(0.001, 1e-8, 0.0001, 1e-9).crowded(3.0) == Link(
        pytest.approx(0.0013), pytest.approx(1.3e-8), 0.0001, 1e-9
    )


def test_loaders_that_read_ahead_cost_only_what_is_beyond_the_step(recipe: Recipe) -> None:
    ahead = replace(COSTS, reads_ahead=True, num_cores=64)
    assert predict_step(ahead, recipe, 1).step_seconds == pytest.approx(0.35)
    slow = replace(ahead, workers=(replace(WORKER, input_seconds=0.2),))
    found = predict_step(slow, recipe, 1)
    assert (found.step_seconds, found.limit) == (pytest.approx(0.8), "input")
    few = replace(ahead, num_cores=1, workers=(replace(WORKER, input_cpu_seconds=0.05),))
    found = predict_step(few, recipe, 1)
    assert (found.step_seconds, found.limit) == (pytest.approx(0.34 + 0.01 + 4 * 0.05), "cores")


def test_what_was_measured_beside_as_many_workers_counts(recipe: Recipe) -> None:
    beside = replace(WORKER, num_local=2, first_seconds=0.13)
    both = replace(COSTS, workers=(WORKER, beside))
    seconds = [predict_step(both, replace(recipe, num_towers=4), number).compute_seconds for number in (1, 2, 4)]
    assert seconds == pytest.approx([0.34, 0.21, 0.13])


@pytest.mark.parametrize(
    ("every", "seconds"),
    [
        (Interval(0), 37.0),
        (Interval(10, "steps"), 37.0 + 10 * 0.1),
        (Interval(1, "epochs"), 37.0 + 10 * 0.1),
        (Interval(3.7, "seconds"), 37.0 + 10 * 0.1),
        (Interval(1, "steps"), 100 * 0.5),
    ],
)
def test_saves_cost_what_they_compute_and_wait_for_each_other(recipe: Recipe, every: Interval, seconds: float) -> None:
    found = predict_step(COSTS, replace(recipe, checkpoints=Checkpoints(every)), 1)
    assert found.finish_seconds == pytest.approx(seconds)


def test_the_end_of_a_run(recipe: Recipe) -> None:
    recipe = replace(recipe, checkpoints=Checkpoints(Interval(0)))

    def finish(**changes: object) -> float | None:
        return predict_step(COSTS, replace(recipe, **changes), 1).finish_seconds  # type: ignore[arg-type]

    assert finish(end=Epochs(3)) == pytest.approx(30 * 0.37)
    assert finish(end=Hours(2)) == 7200.0
    assert finish(end=None) is None
    assert predict_step(replace(COSTS, epoch_size=0), replace(recipe, end=Epochs(3)), 1).finish_seconds is None
    assert predict_step(COSTS, recipe, 1).epoch_seconds == pytest.approx(10 * 0.37)


REFUSED: dict[str, tuple[int, Callable[[Recipe], Recipe], str]] = {
    "more than towers": (5, lambda given: given, "Some workers would have no tower to run."),
    "batch": (3, lambda given: replace(given, num_towers=None), "The batch cannot be split evenly over the towers."),
    "served": (2, lambda given: replace(given, exchange=Alone()), "A plan of several workers knows one exchange."),
    "memory": (
        4,
        lambda given: replace(given, exchange=AllReduce("shared_memory")),
        "Shared memory reaches only the workers of one CPU host.",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_numbers_of_workers_that_the_library_refuses(recipe: Recipe, what: str) -> None:
    number, change, text = REFUSED[what]
    with pytest.raises(InputError) as caught:
        predict_step(replace(COSTS, per_host=2), change(recipe), number)
    assert caught.value.what == text


def test_what_was_not_measured_is_not_guessed(recipe: Recipe) -> None:
    alone = replace(COSTS, messages=None, shared_memory=None, num_probed=1)
    with pytest.raises(InputError, match="takes two workers on this machine"):
        predict_step(alone, recipe, 2)
    for half in (alone.over(0.001, None), alone.over(None, 1e9)):
        with pytest.raises(InputError, match="takes two workers on this machine"):
            predict_step(replace(half, per_host=1), recipe, 2)
    known = replace(alone, per_host=1).over(0.001, 1e9)
    assert predict_step(known, recipe, 2).exchange_seconds > 0
    with pytest.raises(InputError, match="Towers of this size were not measured"):
        predict_step(COSTS, replace(recipe, num_towers=8), 1)


def test_costs_are_read_as_they_were_written() -> None:
    assert RunCosts.read(json.loads(json.dumps(COSTS.as_json()))) == COSTS


def test_the_towers_of_a_recipe_without_a_number_are_its_workers(recipe: Recipe) -> None:
    found = Seating.of(replace(recipe, num_towers=None), 8, per_host=2)
    assert (found.tower_size, found.most_towers, found.num_hosts, found.num_local) == (4, 1, 4, 2)
