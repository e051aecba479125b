"""The law of resizing: an exact run that goes on with another number of workers has the bits of one that did not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_towers as towers

import lockstep as ls

pytestmark = pytest.mark.process

NUM_TOWERS, STEPS_OF_EACH = 8, 3


def train_on(workdir: Path, steps: int, exchange: ls.AllReduce) -> str:
    """Go on from the newest checkpoint up to so many steps, and save; returns a digest of all that is learned."""
    state, loader = towers.make_state(coupled=True), towers.make_loader()
    ls.resume(state, loader, workdir)
    ls.train(state, towers.losses, loader, ls.Towers(NUM_TOWERS), exchange, until=ls.Steps(steps))
    ls.save(state, loader, workdir)
    return towers.digest(state, [])


@pytest.mark.parametrize("transport", [pytest.param("gloo", marks=pytest.mark.slow), "shared_memory"])
def test_a_run_on_four_then_three_then_eight_workers(
    run_workers: Callable[..., list[Any]], tmp_path: Path, transport: Any
) -> None:
    exchange, splits = ls.AllReduce(transport, exact=True), (4, 3, 8)
    alone = train_on(tmp_path / "alone", len(splits) * STEPS_OF_EACH, exchange)
    for index, num_workers in enumerate(splits):
        steps = (index + 1) * STEPS_OF_EACH
        found = run_workers(train_on, num_workers, tmp_path / "run", steps, exchange)
    assert set(found) == {alone}
