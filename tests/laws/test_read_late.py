"""The law of the late read: each attempt read while the next one is computed, or at once, a run learns the same bits.

CPU tensors take the branches of an accelerator here. What waits is counted in tests/training/test_step_device_calls.py.
"""

from __future__ import annotations

import math
import signal
import weakref
from collections.abc import Callable, Generator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from device_calls import accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.errors import WorkerError
from lockstep.optim.from_torch import FromTorch
from lockstep.optim.optimizers import FTRL, Adadelta
from lockstep.training.attempt import Attempt
from lockstep.training.step import BoundStep, bind

BATCH_SIZE, NUM_BATCHES = 8, 16
Options = Mapping[str, Any]


@pytest.fixture(autouse=True)
def _accelerator() -> Generator[None, None, None]:
    with accelerator():
        yield


def make_state(optimizer: Any = None, *, dtype: torch.dtype = torch.float32, **options: Any) -> ls.TrainState:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(4 * 36, 5)
        ).to(dtype)
        model[1].float()
    return ls.TrainState(model, optimizer or ls.optim.SGD(ls.optim.Cosine(0.1, 40), momentum=0.9), **options)


def make_loader(bad: Mapping[int, float] = {}) -> Loader:
    """Batches of examples of which some, by their index, hold a number that is not finite."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH_SIZE * NUM_BATCHES, 3, 8, 8, generator=generator)
    labels = torch.randint(0, 5, (len(images),), generator=generator)
    for index, value in bad.items():
        images[index, 0, 0, 0] = value
    return Loader(ls.data.Arrays({"image": images, "label": labels}), batch_size=BATCH_SIZE, seed=3)


def losses(model: nn.Module, batch: ls.Batch) -> tuple[dict[str, Any], dict[str, Tensor]]:
    scores = model(batch["image"].to(next(model.parameters()).dtype)).float()
    hits = (scores.argmax(1) == batch["label"]).float()
    return {"cross_entropy": F.cross_entropy(scores, batch["label"]), "plain": 0.5}, {"accuracy": hits.mean()}


def at_once(
    state: ls.TrainState, loader: Loader, towers: ls.Towers, until: Any
) -> Generator[ls.StepReport, None, None]:
    for batch in ls.batches(loader, towers, until=until):
        yield ls.train_step(state, losses, batch, towers)


def read_late(
    state: ls.TrainState, loader: Loader, towers: ls.Towers, until: Any
) -> Generator[ls.StepReport, None, None]:
    return ls.train_steps(state, losses, loader, towers, until=until)


def learned(state: ls.TrainState, loader: Loader) -> str:
    """All that a checkpoint would hold, and that it says of the numbers to their last bit."""
    tensors = [
        (f"{s}/{n}", t.flatten().tolist()) for s, members in state.sections().items() for n, t in members.items()
    ]
    return repr((tensors, state.values(), loader.position))


def facts(report: ls.StepReport) -> str:
    """All of a report but its times."""
    nonfinite = report.nonfinite and report.nonfinite[:3]
    kept = (report.progress[:3], report.losses, report.smoothed, report.metrics, report.gradient_norm)
    return repr((*kept, report.learning_rates, report.skipped, nonfinite, report.stop_requested))


def story(make: Callable[..., Any], bad: Mapping[int, float], towers: ls.Towers, options: Options) -> list[str]:
    """What a run says, the state in its loop body after each attempt, and how it ends."""
    state, loader = make_state(**options), make_loader(bad)
    told: list[str] = []
    try:
        for report in make(state, loader, towers, ls.Steps(20)):
            told += [facts(report), learned(state, loader)]
    except ls.NonFiniteError as error:
        told.append(str(error))
    return [*told, learned(state, loader)]


BAD = st.dictionaries(
    st.integers(0, BATCH_SIZE * NUM_BATCHES - 1), st.sampled_from([math.nan, math.inf, -math.inf]), max_size=4
)
OPTIONS: dict[str, Options] = {
    "momentum": {"average": ls.optim.MovingAverage(0.9, statistics=True)},
    "adamw": {"optimizer": ls.optim.AdamW(1e-2), "gradient_transforms": [ls.optim.ClipGlobalNorm(0.5)]},
    "by name": {"optimizer": {"bias": ls.optim.SGD(0.1), r"weight": ls.optim.Adagrad(0.1)}},
    "penalty": {"regularization": [ls.losses.L2(1e-2)], "gradient_transforms": [ls.optim.ClipValue(0.05)]},
    "of towers": {"tower_gradient_transforms": [ls.optim.ClipGlobalNorm(0.3)]},
    "rmsprop": {
        "optimizer": ls.optim.RMSProp(1e-3, momentum=0.9, centered=True, weight_decay={"weight": 0.1}),
        "average": ls.optim.MovingAverage(0.9),
    },
    "adadelta": {"optimizer": Adadelta(1.0)},
    "ftrl": {"optimizer": FTRL(ls.optim.Cosine(0.1, 40, final=0.01), l1=0.01)},
    "lars": {"optimizer": ls.optim.LARS(1.0)},
    "lamb": {"optimizer": ls.optim.LAMB(0.01)},
    "from torch": {
        "optimizer": {
            "bias": FromTorch(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
            "weight": FromTorch(torch.optim.AdamW, lr=ls.optim.Cosine(0.01, 40), fused=True),
        }
    },
    "16 bits": {"optimizer": ls.optim.AdamW(1e-2), "dtype": torch.bfloat16},
    "clip norm": {"gradient_transforms": [ls.optim.ClipNorm(0.1)]},
    "adaptive clip": {"gradient_transforms": [ls.optim.AdaptiveClip(0.02), ls.optim.ClipNorm(0.1, "bias")]},
    "clips of towers": {"tower_gradient_transforms": [ls.optim.ClipNorm(0.1), ls.optim.AdaptiveClip(0.02)]},
}


@pytest.mark.parametrize("kind", OPTIONS)
@settings(max_examples=2)
@given(
    BAD,
    st.sampled_from([("stop", 0), ("skip", 2), ("skip", 99), ("off", 0)]),
    st.data(),
)
def test_whatever_batches_are_bad(
    kind: str, bad: dict[int, float], policy: tuple[Any, int], data: st.DataObject
) -> None:
    statistics = data.draw(st.sampled_from(["first", "last", "mean", "sync", "none"]))
    precision = data.draw(st.sampled_from(["fp32", "fp32", "bf16", "fp16"]))
    towers = ls.Towers(data.draw(st.sampled_from([1, 2])), batch_norm=statistics, precision=precision)
    if towers.joined and "tower_gradient_transforms" in OPTIONS[kind]:
        towers = ls.Towers(2)
    options = {**OPTIONS[kind], "nonfinite": policy[0], "nonfinite_budget": policy[1]}
    assert story(read_late, bad, towers, options) == story(at_once, bad, towers, options)


def test_gradients_are_gone_before_the_next_attempt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    enqueued: list[Any] = []
    enqueue = BoundStep.enqueue

    def watched(self: BoundStep, begun: Any) -> Any:
        enqueued.append(weakref.ref(begun.proposal.gradients))
        return enqueue(self, begun)

    def looking(model: nn.Module, batch: ls.Batch) -> Any:
        assert [of_attempt() for of_attempt in enqueued] == [None] * len(enqueued)
        return losses(model, batch)

    monkeypatch.setattr(BoundStep, "enqueue", watched)
    list(ls.train_steps(make_state(), looking, make_loader(), until=ls.Steps(4)))
    assert len(enqueued) == 3, "the last one is read at once"


def test_a_batch_that_the_loss_function_changes_in_place_is_computed_once(caplog: pytest.LogCaptureFixture) -> None:
    def halving(model: nn.Module, batch: ls.Batch) -> Any:
        batch["image"].mul_(0.5)
        return losses(model, batch)

    def trained(steps: Callable[..., Any]) -> str:
        state, loader = make_state(nonfinite="skip"), make_loader({9: math.nan})
        for report in steps(state, loader):
            if report.step == 3:
                with torch.no_grad():
                    state.model[0].weight.mul_(0.5)  # type: ignore[operator,union-attr]
        return learned(state, loader)

    caplog.set_level("INFO")
    late = trained(lambda state, loader: ls.train_steps(state, halving, loader, until=ls.Steps(8)))
    batches = lambda loader: ls.batches(loader, until=ls.Steps(8))  # noqa: E731
    assert late == trained(lambda state, loader: (ls.train_step(state, halving, b) for b in batches(loader)))
    assert "the loss function changes its batch in place" in caplog.text


# The loop body, and the end -----------------------------------------------------------------------------------------


def counting(function: Any = losses) -> tuple[Any, list[int]]:
    """A loss function, and the positions of the batches that it is called with."""
    calls: list[int] = []

    def count(model: nn.Module, batch: ls.Batch) -> Any:
        calls.append(batch.position)
        return function(model, batch)

    return count, calls


@pytest.mark.parametrize("until", [ls.Steps(5), ls.Epochs(5 / NUM_BATCHES)], ids=str)
def test_no_attempt_is_begun_after_the_last_one(until: Any) -> None:
    count, calls = counting()
    reports = list(ls.train_steps(make_state(), count, make_loader(), until=until))
    assert [report.step for report in reports] == [1, 2, 3, 4, 5]
    assert calls == [BATCH_SIZE * place for place in range(5)]


def test_what_the_body_changes_counts_from_the_next_attempt_on() -> None:
    def changing(make: Any) -> str:
        state, loader = make_state(), make_loader()
        for report in make(state, loader, ls.Towers(1), ls.Steps(8)):
            if report.step == 3:
                with torch.no_grad():
                    state.model[0].weight.mul_(0.5)  # type: ignore[operator,union-attr]
            if report.step == 5:
                state.model[1].running_mean.add_(1.0)  # type: ignore[operator,union-attr]
        return learned(state, loader)

    assert changing(read_late) == changing(at_once)


def test_a_loop_that_is_left_leaves_the_state_of_its_last_report() -> None:
    def leaving(make: Any) -> str:
        state, loader = make_state(), make_loader()
        for report in make(state, loader, ls.Towers(1), None):
            if report.step == 4:
                break
        list(make(state, loader, ls.Towers(1), ls.Steps(6)))
        return learned(state, loader)

    assert leaving(read_late) == leaving(at_once)


def test_an_error_of_the_next_attempt_comes_after_the_report_of_the_one_before() -> None:
    def failing(model: nn.Module, batch: ls.Batch) -> Any:
        if batch.position == 3 * BATCH_SIZE:
            raise LookupError("the fourth batch")
        return losses(model, batch)

    state, loader = make_state(), make_loader()
    steps = ls.train_steps(state, failing, loader)
    assert [next(steps).step for _ in range(3)] == [1, 2, 3]
    with pytest.raises(LookupError, match="the fourth batch"):
        next(steps)
    assert (state.step, loader.position) == (3, 3 * BATCH_SIZE)


def test_an_interrupt_in_the_loss_function_leaves_the_update_before_it_whole() -> None:
    def interrupted(model: nn.Module, batch: ls.Batch) -> Any:
        if batch.position == 3 * BATCH_SIZE:
            raise KeyboardInterrupt
        return losses(model, batch)

    state, loader = make_state(average=ls.optim.MovingAverage(0.9)), make_loader()
    with pytest.raises(KeyboardInterrupt):
        list(ls.train_steps(state, interrupted, loader))
    whole, there = make_state(average=ls.optim.MovingAverage(0.9)), make_loader()
    list(at_once(whole, there, ls.Towers(1), ls.Steps(3)))
    assert learned(state, loader) == learned(whole, there)


def test_an_interrupt_while_an_update_is_enqueued_completes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: ls.TrainState, *arguments: Any, **options: Any) -> None:
        make_update(self, *arguments, **options)
        if self.step == 2:
            signal.raise_signal(signal.SIGINT)  # asks for a stop
            signal.raise_signal(signal.SIGINT)

    make_update = ls.TrainState.update
    state, loader = make_state(average=ls.optim.MovingAverage(0.9)), make_loader()
    whole, there = make_state(average=ls.optim.MovingAverage(0.9)), make_loader()
    list(at_once(whole, there, ls.Towers(1), ls.Steps(3)))
    monkeypatch.setattr(ls.TrainState, "update", update)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(ls.train_steps(state, losses, loader))
    finally:
        ls.join().pulse.stop_requested = None
    assert learned(state, loader) == learned(whole, there)


def test_an_error_of_the_data_comes_after_the_report_of_the_attempt_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any, **options: Any) -> Any:
        yield from islice(whole(*arguments, **options), 3)
        raise LookupError("the fourth batch")

    state, loader = make_state(), make_loader()
    whole = loader.batches
    monkeypatch.setattr(loader, "batches", failing)
    steps = ls.train_steps(state, losses, loader)
    assert [next(steps).step for _ in range(3)] == [1, 2, 3]
    with pytest.raises(LookupError, match="the fourth batch"):
        next(steps)
    assert (state.step, loader.position) == (3, 3 * BATCH_SIZE)


def test_what_the_loss_function_puts_into_its_batch_is_not_there_when_an_attempt_is_begun_anew() -> None:
    def doubling(model: nn.Module, batch: ls.Batch) -> Any:
        batch["image"] = batch["image"] * 2.0
        return losses(model, batch)

    def change(state: ls.TrainState, report: ls.StepReport) -> None:
        if report.step == 2:
            state.model[1].running_mean.add_(1.0)  # type: ignore[operator,union-attr]

    late, loader = make_state(), make_loader()
    for report in ls.train_steps(late, doubling, loader, until=ls.Steps(4)):
        change(late, report)
    at_once, there = make_state(), make_loader()
    for batch in ls.batches(there, until=ls.Steps(4)):
        change(at_once, ls.train_step(at_once, doubling, batch))
    assert learned(late, loader) == learned(at_once, there)


def test_losses_of_other_parameters_leave_all_of_them_untouched() -> None:
    elsewhere = torch.ones((), requires_grad=True)
    state = make_state()
    before = learned(state, make_loader())
    reports = list(ls.train_steps(state, lambda *_: {"loss": elsewhere * 2.0}, make_loader(), until=ls.Steps(2)))
    assert [report.gradient_norm for report in reports] == [0.0, 0.0]
    assert before.partition("slots/")[0] == learned(state, make_loader()).partition("slots/")[0]


@pytest.mark.parametrize("withheld", [1.0, math.nan], ids=str)
def test_what_is_withheld_is_not_made_whatever_is_not_looked_at(withheld: float) -> None:
    state, one = make_state(nonfinite="off"), torch.ones((), dtype=torch.float64)
    gradients = [torch.ones_like(parameter) for parameter in state.parameters.values()]
    attempt = Attempt(gradients, [], {"loss": one}, others=one.expand(4), withheld=one * withheld)
    proposal = state.propose(attempt)
    before = learned(state, make_loader())
    state.update(proposal, found_inf=state.found_inf(proposal))
    assert learned(state, make_loader()) == before


def test_a_stop_ends_the_loop_after_its_step() -> None:
    pulse = ls.join().pulse
    state, loader = make_state(), make_loader()
    reports: list[ls.StepReport] = []
    try:
        for report in ls.train_steps(state, losses, loader):
            reports.append(report)
            if report.step == 3:
                pulse.stop_requested = "SIGTERM"
    finally:
        pulse.stop_requested = None
    # It travels with the next attempt that is begun: the one after the fourth, which is under way.
    assert [report.stop_requested for report in reports] == [False] * 4 + [True]
    assert (state.step, loader.position) == (5, 5 * BATCH_SIZE)


def test_a_loop_body_that_trains_another_model_comes_before_the_next_attempt() -> None:
    positions: list[int] = []

    def trained(make: Any) -> tuple[str, list[float]]:
        generator, critic = make_state(), ls.TrainState(nn.Linear(5, 1), ls.optim.SGD(0.1), name="critic")

        def judged(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
            positions.append(batch.position)
            return {"judged": critic.model(model(batch["image"])).square().mean()}

        def judging(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
            return {"judging": (model(generator.model(batch["image"]).detach()) - 1).square().mean()}

        with torch.no_grad():
            for parameter in critic.model.parameters():
                parameter.fill_(0.3)
        loader, theirs, said = make_loader(), iter(ls.batches(make_loader())), []
        for report in make(generator, judged, loader):
            said.append(report.total)
            ls.train_step(critic, judging, next(theirs))
        return learned(generator, loader), said

    def late(state: ls.TrainState, function: Any, loader: Loader) -> Any:
        return ls.train_steps(state, function, loader, until=ls.Steps(5))

    def at_once(state: ls.TrainState, function: Any, loader: Loader) -> Any:
        return (ls.train_step(state, function, batch) for batch in ls.batches(loader, until=ls.Steps(5)))

    assert trained(late) == trained(at_once)
    positions.clear()
    trained(late)
    assert [place // BATCH_SIZE for place in positions] == [0, 1, 1, 2, 3, 4], "begun anew once, then read at once"


def trained_beside_skipped_steps(kind: str) -> float:
    """A weight after a loop whose body makes a step of its own, which is skipped, from a batch that is not finite."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))  # no buffers, whose versions would tell
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    state = ls.TrainState(model, ls.optim.SGD(0.1), nonfinite="skip", name=kind)
    towers, exchange, loader = ls.Towers(2), ls.AllReduce("gloo"), make_loader()
    bad = next(iter(ls.batches(make_loader(dict.fromkeys(range(BATCH_SIZE * NUM_BATCHES), math.nan)), towers)))
    if kind == "late":
        reports: Any = ls.train_steps(state, losses, loader, towers, exchange, until=ls.Steps(4))
    else:
        there = ls.batches(loader, towers, until=ls.Steps(4))
        reports = (ls.train_step(state, losses, batch, towers, exchange) for batch in there)
    for report in reports:
        if report.step == 2:
            assert ls.train_step(state, losses, bad, towers, exchange).skipped
    return float(model[1].weight.square().sum())


def late_and_at_once() -> list[float]:
    return [trained_beside_skipped_steps("late"), trained_beside_skipped_steps("at once")]


@pytest.mark.process
def test_a_step_in_the_body_leaves_nothing_in_the_sum_of_the_next_attempt(run_workers: Callable[..., Any]) -> None:
    for late, at_once in run_workers(late_and_at_once, 2):
        assert late == at_once


def changed_on_the_chief_alone() -> tuple[str, int]:
    state, loader = make_state(), make_loader()
    towers, chief = ls.Towers(2), ls.join().is_chief
    try:
        for report in ls.train_steps(state, losses, loader, towers, ls.AllReduce("gloo"), until=ls.Steps(9)):
            if chief and report.step == 3:
                state.model[1].running_mean.add_(1.0)  # type: ignore[operator,union-attr]
    except WorkerError as error:
        return error.what, state.step
    return "", state.step


@pytest.mark.slow
@pytest.mark.process
def test_workers_whose_bodies_change_different_things_are_told(run_workers: Callable[..., list[Any]]) -> None:
    # The other one waits for the chief in its next exchange.
    told = run_workers(changed_on_the_chief_alone, 2, lost=[1])
    assert told[0] == ("The workers have not begun the same attempt.", 3)


class Paths(nn.Module):
    """Layers of which a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(192, 5) for _ in range(3))


def train_on_paths(paths: str, *, is_late: bool) -> tuple[list[str], bool]:
    """Train with the layer that each step's letter names, in every tower or, as a capital, in the first one alone.

    Returns what was told, and whether steps came to wait.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        state = ls.TrainState(Paths(), ls.optim.SGD(0.1, momentum=0.9, weight_decay=0.1))
    loader, towers, exchange = make_loader(), ls.Towers(2), ls.AllReduce("gloo", exact=True)

    def losses(model: Any, batch: ls.Batch) -> dict[str, Tensor]:
        path = paths[batch.position // BATCH_SIZE]
        layer = "abc".index(path.lower()) if path.islower() or batch.towers[0] == 0 else 0
        return {"cross_entropy": F.cross_entropy(model.layers[layer](batch["image"].flatten(1)), batch["label"])}

    end, told = ls.Steps(len(paths)), []
    batches = ls.batches(loader, towers, until=end)
    at_once = (ls.train_step(state, losses, batch, towers, exchange) for batch in batches)
    late = ls.train_steps(state, losses, loader, towers, exchange, until=end)
    for report in late if is_late else at_once:
        told += [facts(report), learned(state, loader)]
    return told, is_late and not bind(state, towers, exchange).runs_ahead


@pytest.mark.process
@pytest.mark.parametrize(
    "paths",
    [
        pytest.param("aaaabbbbaacaa", marks=pytest.mark.slow),
        "aaBBBBaabbcCC",
        pytest.param("abcabcabcabcabca", marks=pytest.mark.slow),
    ],
)
def test_whichever_parameters_have_no_gradient(paths: str, run_workers: Callable[..., list[Any]]) -> None:
    """Those that no tower of any worker had a gradient for stay as they are, also where that changes in the run."""
    late, at_once = (run_workers(partial(train_on_paths, paths, is_late=is_late), 2) for is_late in (True, False))
    assert [told for told, _ in late] == [told for told, _ in at_once]
    assert late == [late[0]] * 2
    assert late[0][1] == (paths[:3] == "abc"), "it changes too often"
    assert len(late[0][0]) == 2 * len(paths)
