from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import lockstep as ls
from lockstep.progress import Interval, Progress
from lockstep.recipes.parts import Watch
from lockstep.runs.records import Records

BEGINNING = Progress(0, 0, 80)


def squared(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"squared": model(batch["x"]).square().mean()}


def make_state() -> ls.TrainState:
    return ls.TrainState(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), ls.optim.SGD(0.1))


def test_each_part_of_the_update_has_an_interval_of_its_own(tmp_path: Path) -> None:
    state = make_state()
    watch = Watch(
        summaries=Interval(0), gradients=Interval(2), variables=Interval(3), activations=Interval(0.5, "epochs")
    )
    records = Records(tmp_path, watch, BEGINNING)
    hooks = records.observe(state, ls.Towers(), BEGINNING, 8)
    for step in range(6):
        batch = ls.Batch({"x": torch.ones(8, 3)}, position=8 * step, batch_size=8, towers=range(1), epoch_size=80)
        report = ls.train_step(state, squared, batch)
        for hook in hooks:
            hook(report)
    records.close()
    events = EventAccumulator(str(tmp_path / "summaries"), size_guidance={"histograms": 0}).Reload()
    tags = ["gradients/0.weight", "variables/0.weight", "activations/1"]
    assert [[event.step for event in events.Histograms(tag)] for tag in tags] == [[2, 4, 6], [3, 6], [5]]


def test_nobody_looks_where_nothing_is_asked_for(tmp_path: Path) -> None:
    records = Records(tmp_path, Watch(), BEGINNING)
    assert list(records.observe(make_state(), ls.Towers(compile=True), BEGINNING, 8)) == []
    records.close()


def test_closing_leaves_the_state_alone(tmp_path: Path) -> None:
    state = make_state()
    records = Records(tmp_path, Watch(gradients=Interval(1)), BEGINNING)
    records.observe(state, ls.Towers(), BEGINNING, 8)
    assert state.watcher is not None
    records.close()
    assert state.watcher is None


def test_activations_of_compiled_towers_are_refused(tmp_path: Path) -> None:
    records = Records(tmp_path, Watch(gradients=Interval(1), activations=Interval(1)), BEGINNING)
    state = make_state()
    with pytest.raises(ls.InputError, match="A compiled model does not show its activations"):
        records.observe(state, ls.Towers(compile=True), BEGINNING, 8)
    assert state.watcher is None
    records.close()
