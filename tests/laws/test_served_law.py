"""The laws of served exchanges: backup workers have the bits of the exact all-reduce, and no example is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import staged_run
import torch
from corners import on_devices
from staged_run import BATCH_SIZE as BATCH_SIZE_OF_STAGES
from staged_run import Disturbance, contents, make_recipe
from test_detector_law import ONE_SIZE, OWN_SIZES
from test_detector_law import train_some as train_detector
from test_rollback import make_loader as make_rolled_loader
from test_rollback import make_state as make_rolled_state
from test_rollback import spoiled
from test_towers import losses, make_loader, make_state, train_some
from torch import Tensor, nn

import lockstep as ls
from lockstep.types import Arrivals

pytestmark = pytest.mark.process

NUM_TOWERS = 4


def train_all(policies: list[str]) -> list[str]:
    """The digests of a run with backups for each policy of batch norm, then of an asynchronous one."""
    found = [train_some(NUM_TOWERS, ls.Backups(), coupled=True, steps=6, batch_norm=policy)[0] for policy in policies]
    if ls.join().num_workers == 2:
        found.append(train_some(NUM_TOWERS, ls.Asynchronous(), coupled=True, steps=6)[0])
    return found


@pytest.mark.usefixtures("each_device")
@on_devices(
    ["num_computing"],
    quick=[("cpu", 2), ("accelerator", 1)],
    slow=[("cpu", 1), ("cpu", NUM_TOWERS), ("accelerator", 2), ("accelerator", NUM_TOWERS)],
)
def test_where_no_gradient_is_dropped_the_bits_are_those_of_the_exact_all_reduce(
    run_workers: Callable[..., list[Any]], num_computing: int
) -> None:
    policies = ["mean", "first", "last"] if num_computing == 2 else ["mean"]
    alone = [
        train_some(NUM_TOWERS, ls.AllReduce(exact=True), coupled=True, steps=6, batch_norm=policy)[0]
        for policy in policies
    ]
    chief, *_ = run_workers(train_all, num_computing + 1, policies)
    assert chief[: len(alone)] == alone
    if num_computing == 1:
        assert chief[-1] == alone[0], "one asynchronous worker is the plain loop"


def train_and_resume(workdir: Path, exchange: Any) -> list[tuple[int, int, str]]:
    """Two steps at a time, each from the checkpoint of those before: step, position and digest of the parameters."""
    found = []
    for steps in (2, 4, 6):
        state, loader = make_state(coupled=True), make_loader()
        ls.resume(state, loader, workdir)
        ls.train(state, losses, loader, ls.Towers(NUM_TOWERS), exchange, until=ls.Steps(steps))
        ls.save(state, loader, workdir)
        ls.join().group.barrier("saved")
        weights = torch.cat([p.detach().flatten() for p in state.model.parameters()])
        found.append((state.step, loader.position, weights.numpy().tobytes().hex()))
    return found


@pytest.mark.parametrize(
    ("exchange", "num_workers"), [pytest.param(ls.Backups(), 3, marks=pytest.mark.slow), (ls.Asynchronous(), 2)]
)
def test_a_run_that_is_resumed_has_the_bits_of_one_that_is_not(
    run_workers: Callable[..., list[Any]], tmp_path: Path, exchange: Any, num_workers: int
) -> None:
    alone = train_and_resume(tmp_path / "alone", ls.AllReduce(exact=True))
    for each in run_workers(train_and_resume, num_workers, tmp_path / "served", exchange):
        assert each == alone, "the same on the chief and on the workers that compute"


def train_detectors(exchange: Any) -> list[str]:
    """Digests of runs whose losses are divided by counts: images of one size, and of several."""
    return [train_detector(NUM_TOWERS, exchange, task, steps=3)[0] for task in (ONE_SIZE, OWN_SIZES)]


@pytest.mark.usefixtures("each_device")
@on_devices(
    ["num_computing"],
    quick=[("accelerator", 2)],
    slow=[("cpu", 2), ("cpu", NUM_TOWERS), ("accelerator", NUM_TOWERS)],
)
def test_a_detector_has_the_bits_of_the_exact_all_reduce(
    run_workers: Callable[..., list[Any]], num_computing: int
) -> None:
    """Its losses are divided by counts over the batch, of which each worker has a part."""
    alone = train_detectors(ls.AllReduce(exact=True))
    chief, *_ = run_workers(train_detectors, num_computing + 1, ls.Backups())
    assert chief == alone


# No example is lost ---------------------------------------------------------------------------------------------------

SIZE, BATCH_SIZE = 48, 8


class Tally(nn.Module):
    """A weight for each example: its gradient says how often the example was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, index: Tensor) -> Tensor:
        return self.weight[index]


def tallied(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    if ls.join().rank == 1:
        time.sleep(0.02)  # the straggler
    return {"seen": -BATCH_SIZE * model(batch["index"]).mean()}


def count_examples(exchange: Any) -> tuple[list[float], list[float], Arrivals | None, list[int]]:
    """How often each example counts in an epoch and in two; what became of the gradients; the steps that were seen."""
    loader = ls.data.Loader(ls.data.Arrays({"index": torch.arange(SIZE)}), batch_size=BATCH_SIZE)
    state = ls.TrainState(Tally(), ls.optim.SGD(1.0))
    after: list[list[float]] = []
    steps = []
    report = None
    for report in ls.train_steps(state, tallied, loader, ls.Towers(2), exchange, until=ls.Epochs(2)):
        steps.append(report.step)
        if report.step in (SIZE // BATCH_SIZE, 2 * SIZE // BATCH_SIZE):
            ls.join().group.barrier("the chief waits: all workers are at this step")
            after.append(state.model.weight.tolist())  # type: ignore[operator]
    assert report is not None
    return after[0], after[1], report.arrivals, steps


@pytest.mark.parametrize(
    "exchange",
    [
        ls.Backups(),
        pytest.param(ls.Asynchronous(), marks=pytest.mark.slow),
        pytest.param(ls.Asynchronous(staleness=1), marks=pytest.mark.slow),
    ],
)
def test_each_example_counts_once_an_epoch_beside_a_straggler(
    run_workers: Callable[..., list[Any]], exchange: Any
) -> None:
    of_workers = run_workers(count_examples, 5, exchange)
    for first, second, arrivals, steps in of_workers:
        assert first == [1.0] * SIZE
        assert second == [2.0] * SIZE
        assert arrivals == of_workers[0][2]
        assert steps == sorted(set(steps)), "each report once, in order"
        assert steps[-1] == 12
    used, _, staleness = of_workers[0][2]
    assert sum(used.values()) == sum(staleness.values()) == 12 * (2 if exchange == ls.Backups() else 1)
    most = exchange.staleness if isinstance(exchange, ls.Asynchronous) else 0
    assert most is None or max(staleness) <= most
    assert of_workers[0][3] == list(range(1, 13)), "the chief has every report"


def weigh_examples(exchange: Any) -> list[float]:
    """What each example weighs in an epoch, where a batch is divided by what is counted in it."""
    heaviness = torch.arange(SIZE) % 5
    fields = {"index": torch.arange(SIZE), "heaviness": heaviness}
    loader = ls.data.Loader(ls.data.Arrays(fields), batch_size=BATCH_SIZE)
    state = ls.TrainState(Tally(), ls.optim.SGD(1.0))

    def weighed(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        if ls.join().rank == 1:
            time.sleep(0.02)
        return {"seen": -model(batch["index"]).sum()}

    def counts(batch: ls.Batch) -> dict[str, float]:
        if ls.join().rank == 2:
            time.sleep(0.07)  # the others do not wait for it so long
        return {"seen": float(batch["heaviness"].sum())}

    ls.train(state, weighed, loader, ls.Towers(2), exchange, counts=counts, until=ls.Epochs(1))
    found: list[float] = state.model.weight.tolist()  # type: ignore[operator, union-attr]
    return found


@pytest.mark.slow
def test_each_example_weighs_what_it_does_in_its_batch_beside_stragglers(run_workers: Callable[..., list[Any]]) -> None:
    """Each loss is divided by the count over its batch of the stream, in whatever update and by whomever computed."""
    alone = weigh_examples(ls.AllReduce(exact=True))
    assert len({*alone}) > 3
    for each in run_workers(weigh_examples, 5, ls.Backups()):
        assert each == alone


# Going back -----------------------------------------------------------------------------------------------------------


def roll_back(workdir: Path, exchange: Any, bad: list[int], *, is_told: bool = False) -> list[Any]:
    """What a run of an epoch comes to that goes back where a batch is bad, or is told from the start to skip it."""
    state, loader = make_rolled_state(), make_rolled_loader(order="sequential")
    for position in bad if is_told else ():
        loader.skip(position)
    ls.save(state, loader, workdir)
    ls.join().group.barrier("saved")
    losses, reached = spoiled([] if is_told else bad), None
    while True:
        try:
            for report in ls.train_steps(state, losses, loader, ls.Towers(2), exchange, until=ls.Epochs(1)):
                reached = report.step, report.progress.position
                if report.step % 3 == 0:
                    ls.save(state, loader, workdir)
            break
        except ls.NonFiniteError as error:
            ls.rollback(state, loader, workdir, error)
    weights = torch.cat([p.detach().flatten() for p in state.model.parameters()])
    return [loader.state(), reached, weights.numpy().tobytes().hex()]


@pytest.mark.parametrize(
    ("exchange", "num_workers"), [pytest.param(ls.Backups(), 3, marks=pytest.mark.slow), (ls.Asynchronous(), 2)]
)
def test_a_run_that_goes_back_has_the_bits_of_one_told_to_skip(
    run_workers: Callable[..., list[Any]], tmp_path: Path, exchange: Any, num_workers: int
) -> None:
    bad = [8, 12, 24]  # the last one of the epoch, too
    told = roll_back(tmp_path / "told", ls.AllReduce(exact=True), bad, is_told=True)
    assert told[0]["skipped"] == bad
    assert run_workers(roll_back, num_workers, tmp_path / "served", exchange, bad) == [told] * num_workers


def go_back_beside_a_straggler(workdir: Path) -> tuple[list[float], list[int]]:
    """How often each example counts in an epoch and a little more, where a slice is not finite; what was skipped."""
    loader = ls.data.Loader(ls.data.Arrays({"index": torch.arange(SIZE)}), batch_size=BATCH_SIZE, order="sequential")
    state = ls.TrainState(Tally(), ls.optim.SGD(1.0), nonfinite="rollback")

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"seen": tallied(model, batch)["seen"] * (float("nan") if 21 in batch["index"] else 1.0)}

    ls.save(state, loader, workdir)
    ls.join().group.barrier("saved")
    while True:
        try:
            for _ in ls.train_steps(state, losses, loader, ls.Towers(2), ls.Backups(), until=ls.Steps(6)):
                ls.save(state, loader, workdir)
            break
        except ls.NonFiniteError as error:
            ls.rollback(state, loader, workdir, error)
    return state.model.weight.tolist(), loader.skipped  # type: ignore[operator, union-attr]


@pytest.mark.slow
def test_going_back_loses_no_example_of_other_batches_beside_a_straggler(
    run_workers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    for counted, skipped in run_workers(go_back_beside_a_straggler, 4, tmp_path):
        assert skipped == [16]
        assert counted[8:16] + counted[24:] == [1.0] * 32
        assert counted[20:24] == [0.0] * 4, "the slice that was not finite; the other one may have been used before"


# A run by a recipe ----------------------------------------------------------------------------------------------------


def run_by_recipe(workdir: Path) -> str:
    """A run of three stages, which scores and saves as it goes; it is stopped in the second, and goes on."""
    reasons = []
    for is_first in (True, False):

        def stop(position: int, is_first: bool = is_first) -> None:
            if is_first and position == 3 * BATCH_SIZE_OF_STAGES:
                ls.join().pulse.stop_requested = "SIGUSR1"

        given = make_recipe(exchange=ls.Backups())
        reasons.append(staged_run.start(workdir, given, Disturbance(attempted=stop)).run().reason)
    return ", ".join(reasons)


def learned_and_said(workdir: Path) -> dict[str, object]:
    """The tensors, the scores, and the lines of metrics.jsonl but for what became of the gradients."""
    found = contents(workdir)
    lines = [json.loads(line) for line in found.pop("metrics.jsonl").splitlines()]
    for line in lines:
        line.pop("arrivals", None)
    return {name: data for name, data in found.items() if not name.startswith("values")} | {"lines": lines}


def test_a_run_by_a_recipe_that_is_stopped_has_the_bytes_of_the_exact_all_reduce(
    run_workers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    staged_run.run(tmp_path / "alone", make_recipe())
    assert run_workers(run_by_recipe, 3, tmp_path / "served") == ["stopped, end"] * 3
    assert learned_and_said(tmp_path / "served") == learned_and_said(tmp_path / "alone")


def go_back_by_recipe(workdir: Path, bad: list[int]) -> None:
    """A run of three stages that goes back, to the end of the first one and in the second."""
    given = make_recipe(exchange=ls.Backups(), nonfinite="rollback")
    staged_run.start(workdir, given, Disturbance(bad=bad)).run()


@pytest.mark.slow
def test_a_run_by_a_recipe_that_goes_back_has_the_bytes_of_the_exact_all_reduce(
    run_workers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    bad = [12, 24]
    staged_run.run(tmp_path / "told", make_recipe(nonfinite="rollback"), Disturbance(skipped=bad))
    run_workers(go_back_by_recipe, 3, tmp_path / "served", bad)
    assert learned_and_said(tmp_path / "served") == learned_and_said(tmp_path / "told")
