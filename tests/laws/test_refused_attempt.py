"""The law of the refused attempt: a batch that is not finite leaves the run as one told from the start to skip it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.exchange import bucketed
from lockstep.readers.reader import Arrays

pytestmark = pytest.mark.usefixtures("each_device")

BAD_POSITIONS = {24, 56}
BATCH_SIZE, STEPS = 8, 10


def make_state() -> ls.TrainState:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    return ls.TrainState(
        model,
        ls.optim.SGD(ls.optim.Cosine(0.1, 20), momentum=0.9),
        average=ls.optim.MovingAverage(0.9),
        gradient_transforms=[ls.optim.ClipGlobalNorm(0.5)],
        nonfinite="skip",
    )


def make_loader() -> Loader:
    return Loader(Arrays({"x": torch.randn(64, 5, generator=torch.Generator().manual_seed(1))}), batch_size=BATCH_SIZE)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    # Only the last tower sees the bad number: all have to refuse.
    spoil = float("nan") if batch.position in BAD_POSITIONS and batch.towers.stop == 2 else 1.0
    return {"square": model(batch["x"]).square().mean() * spoil}


def learned(state: ls.TrainState) -> list[Any]:
    numbers = [t.flatten().tolist() for _, members in sorted(state.sections().items()) for t in members.values()]
    return [numbers, {**state.values(), "num_refused": 0}]


def refusing() -> tuple[list[Any], int, int]:
    state, loader = make_state(), make_loader()
    reports = list(ls.train_steps(state, losses, loader, ls.Towers(2), until=ls.Steps(STEPS)))
    return learned(state), sum(report.skipped for report in reports), loader.position


def skipping() -> list[Any]:
    state = make_state()
    for batch in ls.batches(make_loader(), ls.Towers(2)):
        if batch.position in BAD_POSITIONS:
            continue
        if ls.train_step(state, losses, batch, ls.Towers(2)).step == STEPS:
            break
    return learned(state)


def test_alone() -> None:
    found, skipped, position = refusing()
    assert skipped == len(BAD_POSITIONS)
    assert position == (STEPS + skipped) * BATCH_SIZE
    assert found == skipping()


@pytest.mark.process
def test_on_two_workers(run_workers: Callable[..., list[Any]]) -> None:
    for found, skipped, position in run_workers(refusing, 2):
        assert skipped == len(BAD_POSITIONS)
        assert position == (STEPS + skipped) * BATCH_SIZE
        assert found == skipping()


def refusing_over_gloo() -> tuple[list[Any], int, list[str]]:
    bucketed.SMALL_ELEMENTS, bucketed.FIRST_BUCKET_BYTES = (
        0,
        64,
    )  # of this process alone: the gradients are sent as they come
    state, found = make_state(), []
    for report in ls.train_steps(
        state, losses, make_loader(), ls.Towers(2), ls.AllReduce("gloo"), until=ls.Steps(STEPS)
    ):
        found += report.nonfinite.culprits if report.nonfinite else []
    return learned(state), state.num_skipped, found


@pytest.mark.process
def test_gradients_that_were_sent_before_the_loss_was_known_are_refused_too(
    run_workers: Callable[..., list[Any]],
) -> None:
    for found, skipped, culprits in run_workers(refusing_over_gloo, 2):
        assert skipped == len(BAD_POSITIONS)
        assert found == skipping()
        assert [line.partition(":")[0] for line in culprits] == [
            f"tower 1 on worker 1 (positions {position + 4} to {position + 7} of the stream)"
            for position in sorted(BAD_POSITIONS)
        ]


def facts(report: ls.StepReport) -> tuple[Any, ...]:
    """What a log says of an attempt."""
    return (
        report.progress[:3],
        dict(report.losses),
        dict(report.smoothed),
        report.gradient_norm,
        report.learning_rate,
    )


def attempts(policy: str, bad: set[int], end: int = 80, *, told: bool = False) -> tuple[list[Any], list[Any], int]:
    """Attempts up to a position, of which some are bad, or skipped where the loader was told so beforehand.

    Returns what was learned, the log, and where the first attempt that ended the run was (-1: none).
    """
    torch.manual_seed(0)
    state = ls.TrainState(
        nn.Linear(1, 1),
        ls.optim.SGD(ls.optim.Cosine(0.1, 40), momentum=0.9),
        average=ls.optim.MovingAverage(0.9),
        nonfinite=policy,  # type: ignore[arg-type]
        nonfinite_budget=len(bad),
    )
    loader = Loader(Arrays({"x": torch.linspace(-1, 1, 11)[:, None]}), batch_size=2)
    for position in bad if told else ():
        loader.skip(position)

    def spoiled(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        is_bad = not told and batch.position in bad and batch.towers.start == 1
        return {"square": model(batch["x"]).square().mean() * (float("inf") if is_bad else 1.0)}

    log = []
    stopped_at = -1
    try:
        for batch in takewhile(lambda batch: batch.position < end, ls.batches(loader, ls.Towers(2))):
            report = ls.train_step(state, spoiled, batch, ls.Towers(2))
            if not report.skipped:
                log.append(facts(report))
    except ls.NonFiniteError as error:
        stopped_at = error.nonfinite.position if error.nonfinite else -2
    return learned(state), log, stopped_at


bad_positions = st.sets(st.sampled_from(range(0, 80, 2)), min_size=1, max_size=10)


@settings(max_examples=8, deadline=None)
@given(bad=bad_positions)
def test_whatever_batches_are_bad_skipping_them_equals_never_seeing_them(bad: set[int]) -> None:
    assert attempts("skip", bad) == attempts("skip", bad, told=True)


@settings(max_examples=8, deadline=None)
@given(bad=bad_positions)
def test_whatever_batches_are_bad_a_stop_leaves_what_was_there_before_the_first(bad: set[int]) -> None:
    first = min(bad)
    assert attempts("stop", bad) == (*attempts("stop", set(), end=first)[:2], first)
