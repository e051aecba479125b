"""What the furthest worker has in memory is handed to all others, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lockstep as ls
from lockstep.checkpoints.store import Checkpoint
from lockstep.data.loader import Loader
from lockstep.exchange.exchange import TransportName
from lockstep.readers.reader import Arrays
from lockstep.training import handing_over
from lockstep.training.handing_over import hand_over
from lockstep.training.regrouping import BodyPlace, SavePoint, furthest, may_go_on
from lockstep.training.saving import load_run, snapshot
from tests.worker_processes import run_workers

PLACES = st.builds(SavePoint, st.integers(1, 2), st.integers(0, 2), st.integers(0, 2), st.sampled_from("ab"))


@given(st.lists(st.none() | PLACES, min_size=1, max_size=5))
def test_the_furthest_is_gone_on_from_where_all_that_stand_there_are_alike(points: list[SavePoint | None]) -> None:
    source, known = furthest(points), [each for each in points if each]
    best = max((each[:3] for each in known), default=None)
    alike = {each.digest for each in known if each[:3] == best}
    if len(alike) == 1:
        assert source is not None
        assert points[source] in [each for each in known if each[:3] == best]
    else:
        assert source is None


def make_run() -> tuple[ls.TrainState, Loader]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Linear(40, 1))
    state = ls.TrainState(model, ls.optim.Adam(0.01), average=ls.optim.MovingAverage(0.9))
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    return state, Loader(Arrays({"x": inputs}), batch_size=8, seed=3)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def step_alone(state: ls.TrainState, loader: Loader) -> None:
    """An update that this worker makes alone."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in state.sections()["parameters"].values():
            tensor.add_(torch.randn(tensor.shape, generator=generator))
    next(iter(state.sections()["parameters"].values())).view(-1)[0] = -0.0  # a bit that an addition of zeros would lose
    state.step += 1
    loader.position += loader.batch_size


def hand_over_in_worker(transport: TransportName | None, piece_bytes: int) -> Any:
    handing_over.PIECE_BYTES = piece_bytes
    here, (state, loader) = ls.join("cpu"), make_run()
    for _ in ls.train_steps(state, losses, loader, ls.Towers(4), ls.AllReduce(transport), until=ls.Steps(2)):
        pass
    if here.rank == 1:
        step_alone(state, loader)
    mine = SavePoint.of(state, loader)
    assert mine is not None
    told = [SavePoint(*each) for each in here.group.gather(mine)]
    source = furthest(told)
    assert source == 1
    step, tensors, values = snapshot(state, loader)
    own = Checkpoint(step, Path(), tensors, values) if here.rank == source else None
    checkpoint = hand_over(own, here, source, transport)
    if mine != told[source]:
        load_run(checkpoint, {"": state}, loader)
    return told, SavePoint.of(state, loader), [p.flatten()[0].item().hex() for p in state.model.parameters()]


@pytest.mark.process
@pytest.mark.parametrize(("transport", "piece_bytes"), [(None, 1000), ("gloo", 16 << 20)])
def test_the_memory_of_one_worker_goes_to_the_others(transport: TransportName | None, piece_bytes: int) -> None:
    (told, after, values), *others = run_workers(hand_over_in_worker, 3, transport, piece_bytes)
    assert [each.step for each in told] == [2, 3, 2]
    assert after == told[1]
    assert values[0] == (-0.0).hex()
    assert others == [(told, after, values)] * 2


def test_memory_with_an_attempt_half_done_does_not_count() -> None:
    state, loader = make_run()
    assert SavePoint.of(state, loader) is not None
    state.is_settled = False
    assert SavePoint.of(state, loader) is None


@pytest.mark.parametrize(
    ("places", "may"),
    [
        ([(1, 20, 20), (1, 20, 20)], True),  # all are through with the body
        ([(1, 10, 10), (1, 20, 20)], True),  # one is an update behind
        ([(1, 20, 10), (1, 20, 10)], True),  # all were cut off in it
        ([(1, 20, 10), (1, 10, 10)], True),  # one has still to begin it
        ([(1, 20, 10), (1, 20, 20)], False),  # who is through with it would not make the same calls
        ([(1, 10, 0), (1, 10, 0)], False),  # cut off in the body before
    ],
)
def test_workers_go_on_where_they_would_make_the_same_calls(places: list[tuple[int, int, int]], may: bool) -> None:
    assert may_go_on([BodyPlace(*each) for each in places], 20) is may
