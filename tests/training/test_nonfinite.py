"""Faults put into a run: the report names step, tower, worker, what was not finite first, and the examples."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import worker_processes
from torch import Tensor, nn

import lockstep as ls
from lockstep.checkpoints import Retention, Store
from lockstep.losses.regularization import L2
from lockstep.workers.rank import join

TOWERS, BATCH_SIZE = 4, 8
# The second batch is bad, in its last tower: positions 14 and 15 of the stream.
BAD_BATCH = 8


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


class _BadSlope(torch.autograd.Function):
    """The identity, whose gradient is infinite where the input was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.bad = bool((x.abs() > 1e6).any())
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (math.inf if ctx.bad else 1.0)


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _BadSlope.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def make_loader(**bad: tuple[int, float]) -> ls.data.Loader:
    """32 examples; `field=(row, value)` spoils one."""
    generator = torch.Generator().manual_seed(1)
    fields = {"x": torch.randn(32, 3, generator=generator), "y": torch.randn(32, generator=generator)}
    fields["weight"] = torch.ones(32)
    for field, (row, value) in bad.items():
        fields[field][row] = value
    return ls.data.Loader(ls.data.Arrays(fields), batch_size=BATCH_SIZE, order="sequential")


def make_state(middle: nn.Module | None = None, **options: Any) -> ls.TrainState:
    torch.manual_seed(0)
    return ls.TrainState(
        nn.Sequential(nn.Linear(3, 4), middle or nn.ReLU(), nn.Linear(4, 1)), ls.optim.SGD(0.01), **options
    )


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    square = (model(batch["x"]).squeeze(1) - batch["y"]).square()
    return {"plain": model[0].bias.square().sum(), "square": (square * batch["weight"]).mean()}


def refused(state: ls.TrainState, loader: ls.data.Loader, function: Any = losses, **how: Any) -> ls.NonFiniteError:
    """The error of the second attempt."""
    steps = ls.train_steps(state, function, loader, ls.Towers(TOWERS, **how))
    assert next(steps).step == 1
    with pytest.raises(ls.NonFiniteError) as caught:
        next(steps)
    return caught.value


def bad_pixel() -> ls.NonFiniteError:
    return refused(make_state(), make_loader(x=(15, math.inf)))


def huge_weight() -> ls.NonFiniteError:
    return refused(make_state(), make_loader(weight=(14, 3e38), y=(14, 100.0)))


def overflow() -> ls.NonFiniteError:
    return refused(make_state(Square()), make_loader(x=(15, 1e30)))


def bad_gradient() -> ls.NonFiniteError:
    return refused(make_state(Identity()), make_loader(x=(15, 1e7)))


# The fault, what is said of the last tower, and how many towers are guilty on one worker and on two.
FAULTS: dict[str, tuple[Callable[[], ls.NonFiniteError], str, list[int]]] = {
    "bad_pixel": (bad_pixel, "loss 'square' is nan; the field 'x' of the batch is not finite; examples 15", [1, 1]),
    "huge_weight": (huge_weight, "loss 'square' is inf; examples 14, 15", [1, 1]),
    "overflow": (
        overflow,
        "loss 'square' is nan; the output of module '1' (Square) is not finite; examples 15",
        [1, 1],
    ),
    "bad_gradient": (bad_gradient, "the gradient of '0.bias' is not finite; examples 14, 15", [1, 1]),
}


def all_faults() -> dict[str, Any]:
    found = {}
    for name, (fault, _, _) in FAULTS.items():
        error = fault()
        nonfinite = error.nonfinite
        assert nonfinite is not None
        towers = None if nonfinite.batch is None else list(nonfinite.batch.towers)
        found[name] = str(error), nonfinite.position, nonfinite.culprits, towers
    return found


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    """What each worker knows of each fault, by the number of workers; filled by the tests."""
    return {}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.process)])
def test_a_fault_is_named(found: dict[int, list[dict[str, Any]]], name: str, num_workers: int) -> None:
    if num_workers not in found:
        found[num_workers] = [all_faults()] if num_workers == 1 else worker_processes.run_workers(all_faults, 2)
    _, said, counts = FAULTS[name]
    last = num_workers - 1
    for rank, (text, position, culprits, towers) in enumerate(each[name] for each in found[num_workers]):
        assert "The update after step 1 is not finite" in text
        assert position == BAD_BATCH
        assert culprits[-1] == f"tower 3 on worker {last} (positions 14 to 15 of the stream): {said}"
        assert len(culprits) == counts[last]
        assert culprits[-1] in text
        assert towers == ([0, 1, 2, 3][2 * rank * last :] if rank == last else None)


# The model itself is to blame -----------------------------------------------------------------------------------------


def overflowing(nonfinite: Any, **options: Any) -> ls.TrainState:
    """A state whose third update overflows, from a loss and gradients that are finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    rate = ls.optim.PiecewiseConstant([2, 3], [0.01, 1e39, 0.01])
    return ls.TrainState(model, ls.optim.SGD(rate), nonfinite=nonfinite, **options)


@pytest.mark.parametrize("nonfinite", ["stop", "skip", "rollback"])
def test_parameters_that_are_not_finite_stop_the_run_at_once(tmp_path: Path, nonfinite: str) -> None:
    state, loader = overflowing(nonfinite), make_loader()
    ls.save(state, loader, tmp_path)
    with pytest.raises(ls.NonFiniteError) as caught:
        ls.train(state, losses, loader, ls.Towers(TOWERS))
    assert str(caught.value) == (
        "The model is not finite after step 3, so no batch is to blame.\n"
        "  given:    '0.weight' of parameters, '0.bias' of parameters, "
        "'2.weight' of parameters, '2.bias' of parameters\n"
        "  expected: finite parameters, and no NaN in buffers\n"
        "  hint:     go on from the last checkpoint with a lower learning rate or clipped gradients; "
        "skipping batches cannot help"
    )
    with pytest.raises(ls.NonFiniteError, match="no batch is to blame"):
        ls.rollback(state, loader, tmp_path, caught.value)
    assert (state.step, loader.position, loader.skipped) == (3, 24, [])


@pytest.mark.parametrize("nonfinite", ["stop", "rollback", "off"])
@pytest.mark.parametrize("average", [None, ls.optim.MovingAverage(0.9)])
def test_what_is_not_finite_is_not_saved(tmp_path: Path, nonfinite: str, average: Any) -> None:
    state, loader = overflowing(nonfinite, average=average), make_loader()
    store = Store(tmp_path / "checkpoints", Retention(newest=1))
    for report in ls.train_steps(state, losses, loader, ls.Towers(TOWERS), until=ls.Steps(3)):
        if report.step < 3:
            ls.save(state, loader, store)
    for save in (ls.save, saved_in_background):
        with pytest.raises(ls.CheckpointError) as caught:
            save(state, loader, store)
        assert caught.value.what == "The checkpoint of step 3 was not written: nothing could go on from it."
        assert str(caught.value.given).startswith("values that are not finite: '0.weight' of parameters, '0.bias' of")
        assert store.steps() == [2], "a good one is not pruned for a bad one"
    assert ls.resume(state, loader, store) == 2


class Masked(nn.Module):
    """Scores with a mask that is a parameter, and not trained."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.mask = nn.Parameter(torch.tensor([0.0, value, 0.0, value]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + self.mask).softmax(1)  # type: ignore[no-any-return]


def masked_state(value: float = -math.inf) -> tuple[ls.TrainState, ls.data.Loader]:
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(24, 3)}), batch_size=8)
    return ls.TrainState(Masked(value), ls.optim.SGD(0.1)), loader


def first_score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"score": model(batch["x"])[:, 0].mean()}


def test_a_parameter_that_is_not_trained_may_hold_infinities(tmp_path: Path) -> None:
    state, loader = masked_state()
    ls.train(state, first_score, loader, until=ls.Steps(2))
    ls.save({"masked": state}, loader, tmp_path)
    saved_in_background(state, loader, Store(tmp_path / "alone"))
    for states, folder in (({"masked": state}, tmp_path), (state, Store(tmp_path / "alone"))):
        state.model.linear.weight.data.zero_()
        assert ls.resume(states, masked_state()[1], folder) == 2
        assert state.model.linear.weight.abs().min() > 0


def test_nan_is_refused_in_it_too(tmp_path: Path) -> None:
    state, loader = masked_state(math.nan)
    with pytest.raises(
        ls.InputError, match=r"'mask' cannot be trained.*\n.*not finite\n.*values other than NaN on cpu"
    ):
        ls.train(state, first_score, loader, until=ls.Steps(2))
    with pytest.raises(ls.CheckpointError, match="values that are not finite: 'mask' of parameters"):
        ls.save(state, loader, tmp_path)


def saved_in_background(state: ls.TrainState, loader: ls.data.Loader, store: Store) -> None:
    with ls.Saver(store) as saver:
        saver.save(state, loader)


def bad_parameter() -> str:
    """A parameter of the last worker alone loses its value after the first step."""
    state, worker = make_state(), join()
    steps = ls.train_steps(state, losses, make_loader(), ls.Towers(TOWERS))
    next(steps)
    if worker.rank == worker.num_workers - 1:
        state.model[2].weight.data[0, 1] = math.nan
    with pytest.raises(ls.NonFiniteError) as caught:
        next(steps)
    return str(caught.value)


@pytest.mark.process
def test_the_worker_is_named_whose_model_alone_is_not_finite() -> None:
    for said in worker_processes.run_workers(bad_parameter, 2):
        assert "The model is not finite after step 1" in said
        assert "given:    worker 1: '2.weight' of parameters\n" in said


# --------------------------------------------------------------------------------------------------------------------


def test_a_metric_that_is_not_finite_refuses_nothing() -> None:
    def with_metric(model: nn.Module, batch: ls.Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return losses(model, batch), {"ratio": batch["x"].square().sum() / 0.0}

    (report,) = ls.train_steps(make_state(), with_metric, make_loader(), ls.Towers(TOWERS), until=ls.Steps(1))
    assert not report.skipped
    assert report.metrics == {"ratio": math.inf}


def test_a_metric_is_never_to_blame() -> None:
    def with_metric(model: nn.Module, batch: ls.Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return losses(model, batch), {"ratio": torch.tensor(math.nan if batch.towers.start == 0 else 1.0)}

    nonfinite = refused(make_state(), make_loader(x=(15, math.inf)), with_metric).nonfinite
    assert nonfinite is not None
    assert [line[:7] for line in nonfinite.culprits] == ["tower 3"]


def test_what_depends_on_random_numbers_meets_the_same_ones_again() -> None:
    draws: list[float] = []

    def unlucky(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        draws.append(torch.rand(()).item())
        is_bad = batch.position == BAD_BATCH and draws[-1] > 0.5
        return {"square": losses(model, batch)["square"] * (math.inf if is_bad else 1.0)}

    state, before = make_state(), torch.random.get_rng_state()
    nonfinite = refused(state, make_loader(), unlucky).nonfinite
    unlucky_towers = [tower for tower in range(TOWERS) if draws[TOWERS + tower] > 0.5]
    assert nonfinite is not None
    assert 0 < len(unlucky_towers) < TOWERS
    assert [line[:7] for line in nonfinite.culprits] == [f"tower {tower}" for tower in unlucky_towers]
    of_attempt = draws[TOWERS : 2 * TOWERS]
    assert draws[2 * TOWERS :] == [*(of_attempt[tower] for tower in unlucky_towers), *of_attempt]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_does_not_come_again_is_said() -> None:
    calls: list[int] = []

    def once(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        calls.append(batch.position)
        is_bad = batch.towers.start == 1 and calls.count(BAD_BATCH) == 2
        return {"square": losses(model, batch)["square"] * (math.nan if is_bad else 1.0)}

    error = refused(make_state(), make_loader(), once)
    assert "of the stream): loss 'square' is nan; run again, it is finite; examples 10, 11" in str(error)


def test_an_error_of_the_second_run_hides_nothing() -> None:
    calls: list[int] = []

    def only_once(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        calls.append(batch.position)
        if len(calls) > 2 * TOWERS:
            raise LookupError("no second time")
        return losses(model, batch)

    error = refused(make_state(Square()), make_loader(x=(15, 1e30)), only_once)
    said = "loss 'square' is nan; run again, it raised LookupError('no second time'); examples 14, 15"
    assert f"tower 3 on worker 0 (positions 14 to 15 of the stream): {said}" in str(error)


def test_examples_without_names_hide_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loader = make_loader(x=(3, 1e30))

    def nameless(*arguments: Any) -> list[str]:
        raise OSError("the index is gone")

    loader.example_ids = nameless  # type: ignore[method-assign]
    state, batch = make_state(Square()), next(loader.batches(range(1), 1))
    with pytest.raises(ls.NonFiniteError, match=r"module '1' \(Square\) is not finite\n"):
        ls.train_step(state, losses, batch)
    assert "examples at positions 0 to 7 have no names: OSError('the index is gone')" in caplog.text


def test_many_examples_are_named_in_part() -> None:
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.full((12, 3), 1e30)}), batch_size=12, order="sequential")
    with pytest.raises(ls.NonFiniteError, match=r"examples 0, 1, 2, 3, 4, 5, 6, 7 and 4 more\n"):
        next(ls.train_steps(make_state(Square()), lambda m, b: {"sum": m(b["x"]).sum()}, loader))


LISTED = [{"xyxy": torch.ones(n, 4), "kind": "car"} for n in (2, 0, 1, 3)]
RAGGED = ls.Ragged.of([torch.ones(n, 4) for n in (2, 0, 1, 3)])


@pytest.mark.parametrize(("boxes", "last"), [(LISTED, LISTED[3]["xyxy"]), (RAGGED, RAGGED[3])])
def test_a_bad_item_of_a_field_is_named(boxes: Any, last: Any) -> None:
    fields = {"x": torch.ones(4, 3), "boxes": boxes}
    last[1, 2] = math.inf
    loader: Any = SimpleNamespace(
        example_ids=lambda position, count, bad: [f"example {n}" for n in range(position, position + count)]
    )
    batch = ls.Batch(fields, position=4, batch_size=4, towers=range(1), loader=loader)

    def boxed(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"boxed": model(batch["x"]).sum() * last.sum()}

    with pytest.raises(ls.NonFiniteError, match=r"the field 'boxes' of the batch is not finite; examples example 7\n"):
        ls.train_step(make_state(), boxed, batch)


def test_keypoints_that_are_not_there_are_not_to_blame() -> None:
    missing = ls.Ragged.of([torch.full((2, 3, 2), math.nan), torch.zeros(0, 3, 2)])
    batch = ls.Batch({"keypoints": missing, "x": torch.full((2, 3), 1e30)}, position=0, batch_size=2, towers=range(1))
    with pytest.raises(ls.NonFiniteError, match=r"the output of module '1' \(Square\) is not finite"):
        ls.train_step(make_state(Square()), lambda model, batch: {"sum": model(batch["x"]).sum()}, batch)


def test_the_output_of_the_whole_model_is_called_by_its_class() -> None:
    class Exponent(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).exp()

    state = ls.TrainState(Exponent(3, 1), ls.optim.SGD(0.1))
    batch = ls.Batch({"x": torch.full((2, 3), 1e4)}, position=0, batch_size=2, towers=range(1))
    with torch.no_grad():
        state.model.weight.fill_(1.0)
    with pytest.raises(ls.NonFiniteError, match="the output of module Exponent is not finite"):
        ls.train_step(state, lambda m, b: {"mean": m(b["x"]).mean()}, batch)


def test_a_penalty_that_is_not_finite_blames_no_tower() -> None:
    state = make_state(regularization=[L2(1.0)])
    with torch.no_grad():
        state.model[0].weight.fill_(1e25)
    batch = next(make_loader().batches(range(TOWERS), TOWERS))
    batch["x"].zero_()
    with pytest.raises(ls.NonFiniteError, match="penalty on the parameters is not finite") as caught:
        ls.train_step(state, losses, batch, ls.Towers(TOWERS))
    assert caught.value.nonfinite is None


def test_a_norm_that_overflows_blames_no_tower() -> None:
    def steep(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"steep": model(batch["x"]).sum() * 1e-9 + (model[2].weight * 3e38).sum()}

    with pytest.raises(ls.NonFiniteError, match="are finite, and their global norm is not; from no tower alone"):
        next(ls.train_steps(make_state(), steep, make_loader(), ls.Towers(TOWERS)))


def test_towers_that_run_as_one_are_named_without_another_run() -> None:
    middle = nn.Sequential(Identity(), nn.BatchNorm1d(4))
    error = refused(make_state(middle), make_loader(x=(15, 1e7)), batch_norm="sync")
    said = "tower 0 on worker 0 (positions 8 to 15 of the stream): the gradient of '0.bias' is not finite"
    assert said in str(error)


def test_a_refused_attempt_leaves_the_buffers_of_other_models() -> None:
    other_state = make_state(nn.BatchNorm1d(4))
    other = other_state.model
    state = make_state(Square(), nonfinite="skip")

    def through_both(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"both": (model(batch["x"]) * other(batch["y"][:, None].expand(-1, 3))).mean()}

    before = {name: buffer.clone() for name, buffer in other.named_buffers()}
    (report,) = islice(ls.train_steps(state, through_both, make_loader(x=(3, 1e30)), ls.Towers(2)), 1)
    assert report.skipped
    assert all(torch.equal(buffer, before[name]) for name, buffer in other.named_buffers())


@pytest.mark.parametrize(
    ("policy", "hint"),
    [
        ("stop", "look at these examples, or set nonfinite='skip'"),
        ("rollback", "catch this error and call rollback, then train on; or lower the learning rate"),
    ],
)
def test_the_error_says_what_can_be_done(policy: str, hint: str) -> None:
    assert hint in refused(make_state(nonfinite=policy), make_loader(x=(15, math.inf))).hint


def test_off_does_not_look() -> None:
    state = make_state(nonfinite="off")
    reports = list(ls.train_steps(state, losses, make_loader(x=(15, math.inf)), ls.Towers(TOWERS), until=ls.Steps(2)))
    assert [report.skipped for report in reports] == [False, False]
    assert math.isnan(reports[1].losses["square"])


# The budget -----------------------------------------------------------------------------------------------------------


def from_the_third_on(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    """All batches but the first two are bad, for the last tower alone."""
    is_bad = batch.position >= 2 * BATCH_SIZE and batch.towers.stop == TOWERS
    return {"square": losses(model, batch)["square"] * (math.nan if is_bad else 1.0)}


def skip_all(workdir: Path | None = None, most: int | None = None) -> tuple[list[bool], str, int, list[int]]:
    """Train with a budget of 3; returns what was refused, the error, the count of the state, the positions."""
    state, loader = make_state(nonfinite="skip", nonfinite_budget=3), make_loader()
    if workdir:
        ls.resume(state, loader, workdir)
    reports: list[ls.StepReport] = []
    error = ""
    try:
        for report in islice(ls.train_steps(state, from_the_third_on, loader, ls.Towers(TOWERS)), most):
            reports.append(report)
    except ls.NonFiniteError as raised:
        error = str(raised)
    if workdir:
        ls.save(state, loader, workdir)
    positions = [report.nonfinite.position for report in reports if report.nonfinite]
    return [report.skipped for report in reports], error, state.num_skipped, positions


def test_the_budget_is_the_number_of_attempts_that_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    nonfinites, error, num_skipped, positions = skip_all()
    assert nonfinites == [False, False, True, True, True]
    assert positions == [16, 24, 32]
    assert num_skipped == 4
    assert error.startswith("The update after step 2 is not finite after 3 that were skipped; nothing was changed.")
    assert "set nonfinite='skip' with a larger nonfinite_budget" in error
    skips = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [message[message.rindex("(") :] for message in skips] == [f"({count} of at most 3)" for count in (1, 2, 3)]


def test_a_resumed_run_has_the_rest_of_the_budget(tmp_path: Path) -> None:
    assert skip_all(tmp_path, most=4)[:3] == ([False, False, True, True], "", 2)
    # The checkpoint is that of step 2, so nothing of the budget is lost with the process.
    nonfinites, error, num_skipped, positions = skip_all(tmp_path)
    assert nonfinites == [True]
    assert "after 3 that were skipped" in error
    assert (num_skipped, positions) == (4, [32])


@pytest.mark.process
def test_all_workers_skip_and_stop_alike() -> None:
    alone, *workers = skip_all(), *worker_processes.run_workers(skip_all, 2)
    said = alone[1].replace("tower 3 on worker 0", "tower 3 on worker 1")
    unsure = ", or a device that errs alike each time, which one worker alone cannot tell"
    said = said.replace(unsure, "").replace("same on worker 0", "same on worker 0 and worker 1")
    assert workers == [(alone[0], said, *alone[2:])] * 2
