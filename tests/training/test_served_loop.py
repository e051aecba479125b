"""The loops of served exchanges: what they refuse, what all workers see, and how they end."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.errors import DataError, InputError, PeerLostError
from lockstep.training.state import before_change
from lockstep.types import NonFiniteError

pytestmark = pytest.mark.process

SIZE, BATCH_SIZE = 32, 8
RunWorkers = Callable[..., list[Any]]


def make_loader() -> ls.data.Loader:
    generator = torch.Generator().manual_seed(1)
    fields = {"x": torch.randn(SIZE, 4, generator=generator), "index": torch.arange(SIZE)}
    return ls.data.Loader(ls.data.Arrays(fields), batch_size=BATCH_SIZE, order="sequential")


def make_state(**changes: Any) -> ls.TrainState:
    torch.manual_seed(2)
    return ls.TrainState(nn.Linear(4, 1), ls.optim.SGD(0.1), **changes)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def weights_of(state: ls.TrainState) -> list[float]:
    return torch.cat([p.detach().flatten() for p in state.model.parameters()]).tolist()


# What is refused ------------------------------------------------------------------------------------------------------


def refusals() -> list[str]:
    loader = make_loader()
    batch = ls.Batch({"x": torch.randn(4, 4)}, position=0, batch_size=4, towers=range(1))
    two, replayed = ls.Towers(2), make_state()
    replayed.replay_steps = 100

    def said(function: Callable[[], object]) -> str:
        with pytest.raises(InputError) as caught:
            function()
        return caught.value.what

    return [
        said(lambda: ls.train_step(make_state(), losses, batch, two, ls.Backups())),
        said(lambda: ls.train(make_state(), losses, loader, ls.Towers(2, batch_norm="sync"), ls.Backups())),
        said(lambda: ls.train(make_state(), losses, loader, ls.Towers(3), ls.Backups())),
        said(lambda: ls.train(replayed, losses, loader, two, ls.Asynchronous())),
    ]


def test_what_a_chief_cannot_serve_is_refused_on_all_workers(run_workers: RunWorkers) -> None:
    expected = [
        "Only ls.train and ls.train_steps serve several workers: in a loop of your own all make the same steps.",
        "Backup workers cannot share the statistics of a batch: nobody waits for all of them.",
        "The batch cannot be split evenly over the towers.",
        "What a chief serves is not computed on all workers at once, and so not again on all of them.",
    ]
    assert run_workers(refusals, 2) == [expected, expected]


def test_a_worker_that_is_alone_makes_the_plain_steps() -> None:
    found = []
    for exchange in (ls.AllReduce(), ls.Backups(), ls.Asynchronous(startup_delay_steps=3)):
        state = make_state()
        report = ls.train(state, losses, make_loader(), ls.Towers(2), exchange, until=ls.Steps(3))
        assert report is not None
        assert report.arrivals is None
        found.append(weights_of(state))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("field", ["staleness", "startup_delay_steps"])
def test_a_bound_below_zero_is_refused(field: str) -> None:
    with pytest.raises(InputError, match=f"{field} is out of range"):
        ls.Asynchronous(**{field: -1})


def go_on_otherwise(workdir: Path) -> list[Any]:
    state, loader = ls.TrainState(nn.Linear(4, 1), ls.optim.SGD(0.1, momentum=0.9)), make_loader()
    four = ls.Towers(4)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.fill_(0.5)
    ls.train(state, losses, loader, four, ls.Backups(), until=ls.Steps(2))
    with pytest.raises(InputError) as caught:
        ls.train(state, losses, loader, four, ls.AllReduce(), until=ls.Steps(4))
    ls.train(state, losses, loader, four, ls.Backups(), until=ls.Steps(4))
    ls.save(state, loader, workdir)
    ls.join().group.barrier("saved")
    ls.resume(state, loader, workdir, changed=("exchange",))
    ls.train(state, losses, loader, four, ls.AllReduce(), until=ls.Steps(6))
    return [caught.value.what, weights_of(state)]


def test_workers_without_the_slots_make_no_steps_of_their_own(run_workers: RunWorkers, tmp_path: Path) -> None:
    chief, other, another = run_workers(go_on_otherwise, 3, tmp_path)
    assert chief[0].startswith("The chief alone has the optimizer's slots")
    assert chief == other == another


# What all workers see -------------------------------------------------------------------------------------------------


def changes_told(exchange: Any) -> list[Any]:
    """The steps that a worker sees, and how often its weights had changed without a call of `before_change`."""
    state, seen, unannounced = make_state(average=ls.optim.MovingAverage(0.9)), [], 0
    told: list[int] = []
    before_change.append(lambda: told.append(state.step))
    weights = weights_of(state)
    for report in ls.train_steps(state, losses, make_loader(), ls.Towers(2), exchange, until=ls.Steps(10)):
        unannounced += not told or told[-1] == state.step
        assert weights_of(state) != weights
        weights = weights_of(state)
        seen.append(report.step)
        assert state.is_settled
    return [seen[-1], len(told) >= len(seen), unannounced]


@pytest.mark.parametrize("exchange", [ls.Backups(), ls.Asynchronous()])
def test_what_waits_for_changes_is_told_of_each_on_all_workers(run_workers: RunWorkers, exchange: Any) -> None:
    assert run_workers(changes_told, 3, exchange) == [[10, True, 0]] * 3


def bad_at(places: set[int]) -> Callable[[nn.Module, ls.Batch], dict[str, Tensor]]:
    def found(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        is_bad = bool(places & set(batch["index"].tolist()))
        return {"square": losses(model, batch)["square"] * (math.nan if is_bad else 1.0)}

    return found


def skip_one(exchange: Any) -> list[Any]:
    state, loader = make_state(nonfinite="skip"), make_loader()
    reports = list(ls.train_steps(state, bad_at({13}), loader, ls.Towers(2), exchange, until=ls.Epochs(1)))
    skipped = [report for report in reports if report.skipped]
    assert [report.progress.position for report in skipped] == [16]
    assert skipped[0].nonfinite is not None
    return [state.step, loader.position, weights_of(state), list(skipped[0].nonfinite.culprits)]


@pytest.mark.parametrize(
    ("exchange", "culprit"),
    [
        (ls.Backups(), "tower 1 on worker 1 (positions 12 to 15 of the stream)"),
        (ls.Asynchronous(), "one of towers 0 to 1 on worker 1 (positions 8 to 15 of the stream)"),
    ],
)
def test_an_attempt_that_is_not_finite_is_skipped_by_all(run_workers: RunWorkers, exchange: Any, culprit: str) -> None:
    chief, *others = run_workers(skip_one, 2, exchange)
    step, position, _, culprits = chief
    assert (step, position) == (3, SIZE)
    assert len(culprits) == 1
    assert culprits[0].startswith(culprit)
    assert "12, 13, 14, 15" in culprits[0]
    assert others == [chief]


def stop_at_one() -> tuple[str, tuple[int, float]]:
    state = make_state()
    with pytest.raises(NonFiniteError) as caught:
        ls.train(state, bad_at({13}), make_loader(), ls.Towers(2), ls.Backups())
    assert caught.value.nonfinite is not None
    return str(caught.value), (caught.value.nonfinite.position, state.step)


def test_an_attempt_that_is_not_finite_ends_the_loops_of_all(run_workers: RunWorkers) -> None:
    found = run_workers(stop_at_one, 3)
    assert found[0][1] == (8, 1)
    assert found == [found[0]] * 3, "the same words, and the same report"


def evaluate_often() -> list[Any]:
    """Evaluations in the loop body, the end of the loop by its body, and a second loop that goes on from there."""
    state, loader = make_state(average=ls.optim.MovingAverage(0.5)), make_loader()
    found: list[Any] = []

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"output": model(batch["x"]).flatten().double()}

    for until in (5, 9):
        for report in ls.train_steps(state, losses, loader, ls.Towers(2), ls.Asynchronous()):
            if report.step % 2 == 0:
                found.append([report.step, ls.evaluate(state, score, make_loader(), weights="average")["output"]])
            if report.step >= until:
                break
        found.append([state.step, weights_of(state)])
        ls.join().group.barrier("the loop is over on all workers")
    return found


def test_all_workers_come_to_the_evaluations_of_the_loop_body(run_workers: RunWorkers) -> None:
    found = run_workers(evaluate_often, 4)
    assert [step for step, _ in found[0]] == [2, 4, 5, 6, 8, 9]
    assert found == [found[0]] * 4, "of the same weights, and their average"


def be_stopped() -> tuple[int, bool]:
    worker, state = ls.join(), make_state()
    report = None
    for report in ls.train_steps(state, losses, make_loader(), ls.Towers(2), ls.Backups(), until=ls.Steps(100_000)):
        if report.step >= 5 and worker.rank == 1:
            worker.pulse.stop_requested = "SIGTERM"
    assert report is not None
    return report.step, report.stop_requested


def test_a_stop_that_one_worker_is_asked_for_ends_all_at_one_step(run_workers: RunWorkers) -> None:
    found = run_workers(be_stopped, 3)
    assert found == [found[0]] * 3
    assert found[0][0] < 100_000
    assert found[0][1]


def leave_while_one_is_lost() -> list[str]:
    """What threads raise in a chief that leaves the loop and hears then that a worker is lost, which still computes."""
    worker, raised = ls.join(), []
    threading.excepthook = lambda found: raised.append(repr(found.exc_value))

    def lose() -> None:
        raise PeerLostError("worker 1 is lost", given="", expected="", hint="")

    def slow(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        time.sleep(0.3)
        return losses(model, batch)

    for report in ls.train_steps(make_state(), slow, make_loader(), ls.Towers(2), ls.Backups()):
        if worker.is_chief and report.step == 2:
            time.sleep(0.1)  # worker 1 has begun to compute by then
            worker.group.watch(lose)
            break
    for thread in threading.enumerate():
        if thread.name == "lockstep-see-off":
            thread.join()
    return raised


def test_a_worker_that_is_lost_when_the_loop_is_over_is_no_error_of_a_thread(run_workers: RunWorkers) -> None:
    assert run_workers(leave_while_one_is_lost, 2, lost=[1]) == [[], None]


def begin_late() -> list[int]:
    loader = make_loader()
    exchange = ls.Asynchronous(startup_delay_steps=3)
    for report in ls.train_steps(make_state(), losses, loader, ls.Towers(1), exchange, until=ls.Steps(40)):
        assert report.arrivals is not None
        if report.step <= 3:
            assert dict(report.arrivals.used) == {1: report.step}
    return sorted(report.arrivals.used)  # type: ignore[union-attr]


def test_the_other_workers_begin_after_the_startup_delay(run_workers: RunWorkers) -> None:
    chief, *_ = run_workers(begin_late, 4)
    assert chief[0] == 1
    assert len(chief) > 1, "others have begun"


class Torn:
    """Numbers, of which one cannot be read."""

    cost = "memory"

    def __len__(self) -> int:
        return SIZE

    def read_batch(self, indices: Any) -> dict[str, Any]:
        if 13 in indices:
            raise DataError("example 13 is torn.", given="half", expected="a whole", hint="mend it")
        return {"x": torch.from_numpy(indices).float().sin()[:, None].expand(-1, 4)}

    def example_id(self, index: int) -> str:
        return f"row-{index}"


def read_torn(budget: int) -> list[Any]:
    loader = ls.data.Loader(Torn(), batch_size=BATCH_SIZE, order="sequential", bad_examples="skip", bad_budget=budget)
    state, bad = make_state(), []
    try:
        for report in ls.train_steps(state, losses, loader, ls.Towers(2), ls.Backups(), until=ls.Epochs(1)):
            bad += [example.example_id for example in report.bad]
    except DataError as error:
        return [state.step, bad, error.what]
    return [state.step, bad, loader.position, weights_of(state)]


def test_examples_that_cannot_be_read_are_counted_by_the_chief(run_workers: RunWorkers) -> None:
    found = run_workers(read_torn, 2, 1)
    assert found[0][:3] == [4, ["row-13"], SIZE]
    assert found == [found[0]] * 2
    refused = run_workers(read_torn, 2, 0)
    assert refused[0][:2] == [1, []], "the update with too many of them is not made"
    assert refused == [refused[0]] * 2, "the same error on all workers"


def leave_with_an_error() -> str:
    """The loop body of the chief raises, while the others are at their own loop bodies."""
    state = make_state()
    try:
        for report in ls.train_steps(state, losses, make_loader(), ls.Towers(2), ls.Backups(), until=ls.Steps(50)):
            if ls.join().is_chief and report.step == 3:
                raise ValueError("the chief's own")
    except ValueError as error:
        return str(error)
    return f"ended at step {state.step}"


def test_an_error_in_the_chiefs_loop_body_comes_out_at_once(run_workers: RunWorkers) -> None:
    assert run_workers(leave_with_an_error, 3) == ["the chief's own", "ended at step 3", "ended at step 3"]


# Sparse gradients -----------------------------------------------------------------------------------------------------


def sparse_update(exchange: Any) -> list[float]:
    """One update of an embedding: tower 0 sees rows 0 and 1, tower 1 rows 1 and 2."""
    model = nn.Embedding(4, 1, sparse=True)
    nn.init.zeros_(model.weight)
    state = ls.TrainState(model, ls.optim.SGD(1.0))
    fields = {"index": torch.tensor([0, 1, 1, 2])}
    loader = ls.data.Loader(ls.data.Arrays(fields), batch_size=4, order="sequential")

    def seen(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"sum": -2 * model(batch["index"]).mean()}

    ls.train(state, seen, loader, ls.Towers(2), exchange, until=ls.Steps(1))
    return weights_of(state)


def test_a_row_of_a_sparse_gradient_is_averaged_over_the_towers_that_have_it(run_workers: RunWorkers) -> None:
    assert sparse_update(ls.AllReduce()) == [0.5, 1.0, 0.5, 0.0], "over all towers"
    assert run_workers(sparse_update, 3, ls.Backups()) == [[1.0, 1.0, 1.0, 0.0]] * 3


def count_objects() -> list[float]:
    """A loss that is a sum, divided by a count over the batch."""
    state, loader = make_state(), make_loader()

    def summed(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"square": F.mse_loss(model(batch["x"]), torch.ones(len(batch["x"]), 1), reduction="sum")}

    def counts(batch: ls.Batch) -> dict[str, float]:
        return {"square": float(len(batch["x"]))}

    ls.train(state, summed, loader, ls.Towers(2), ls.Asynchronous(), counts=counts, until=ls.Steps(3))
    return weights_of(state)


def test_an_asynchronous_worker_counts_over_its_batch(run_workers: RunWorkers) -> None:
    alone = count_objects()
    assert run_workers(count_objects, 2) == [alone, alone]
