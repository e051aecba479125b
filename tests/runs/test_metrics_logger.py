from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.data.order import Int64s
from lockstep.images.drawing import COLOURS
from lockstep.readers.reader import Cost
from lockstep.recipes.parts import Monitoring
from lockstep.reporting.chain import CHAIN, ChainFile, attempt_facts
from lockstep.reporting.jsonl import MetricsFile
from lockstep.runs.metrics_logger import MetricsLogger
from lockstep.types import Interval, Progress

BEGINNING = Progress(0, 0, 80)


def squared(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"squared": model(batch["x"]).square().mean()}


def make_state() -> ls.TrainState:
    return ls.TrainState(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), ls.optim.SGD(0.1))


def test_each_part_of_the_update_has_an_interval_of_its_own(tmp_path: Path) -> None:
    state = make_state()
    watch = Monitoring(
        summaries=Interval(0), gradients=Interval(2), variables=Interval(3), activations=Interval(0.5, "epochs")
    )
    logger = MetricsLogger(tmp_path, watch, BEGINNING)
    hooks = logger.observe(state, ls.Towers(), 8)
    for step in range(6):
        batch = ls.Batch({"x": torch.ones(8, 3)}, position=8 * step, batch_size=8, towers=range(1), epoch_size=80)
        report = ls.train_step(state, squared, batch)
        for hook in hooks:
            hook(report)
    logger.close()
    events = EventAccumulator(str(tmp_path / "summaries"), size_guidance={"histograms": 0}).Reload()
    tags = ["gradients/0.weight", "variables/0.weight", "activations/1"]
    assert [[event.step for event in events.Histograms(tag)] for tag in tags] == [[2, 4, 6], [3, 6], [5]]


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def make_reports(count: int) -> list[ls.StepReport]:
    state = make_state()
    batches = [
        ls.Batch({"x": torch.ones(8, 3)}, position=8 * step, batch_size=8, towers=range(1), epoch_size=80)
        for step in range(count)
    ]
    return [ls.train_step(state, squared, batch) for batch in batches]


@pytest.mark.parametrize("is_ahead", [0, 1], ids=["together", "the chain is ahead"])
@pytest.mark.parametrize(("interval", "last", "written"), [(1, 4, [4, 5, 6]), (1, 6, [6]), (3, 3, [3, 6]), (4, 4, [4])])
def test_what_a_lost_chief_has_not_written_is_made_up_for(
    tmp_path: Path, interval: int, last: int, written: list[int], is_ahead: int
) -> None:
    reports = make_reports(6)
    metrics = MetricsFile(tmp_path / "metrics.jsonl", from_position=0)
    metrics.write(reports[last - 1])
    metrics.close()
    chain = ChainFile(tmp_path / CHAIN, from_position=0)
    for report in reports[: min(max(last, 4) + is_ahead, 6)]:
        chain.write(attempt_facts(report, in_metrics=report.step % interval == 0))
    chain.close()
    watch = Monitoring(summaries=Interval(0), metrics=Interval(interval))
    logger = MetricsLogger(tmp_path, watch, reports[-1].progress)
    logger.write_missed(reports[-2:])
    logger.close()
    assert steps_in(tmp_path / "metrics.jsonl") == written
    assert steps_in(tmp_path / CHAIN) == [1, 2, 3, 4, 5, 6]


def test_missed_reports_from_before_a_rollback_are_not_written(tmp_path: Path) -> None:
    stale, again = make_reports(3), make_reports(3)
    logger = MetricsLogger(tmp_path, Monitoring(summaries=Interval(0), metrics=Interval(1)), again[1].progress)
    logger.write_missed([stale[1], stale[2], again[1]])
    logger.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [again[1].step]


def test_nobody_looks_where_nothing_is_asked_for(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, Monitoring(), BEGINNING)
    assert list(logger.observe(make_state(), ls.Towers(compile=True), 8)) == []
    logger.close()


def test_closing_leaves_the_state_alone(tmp_path: Path) -> None:
    state = make_state()
    logger = MetricsLogger(tmp_path, Monitoring(gradients=Interval(1)), BEGINNING)
    logger.observe(state, ls.Towers(), 8)
    assert state.gradient_hooks
    logger.close()
    assert not state.gradient_hooks


def test_activations_of_compiled_towers_are_refused(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, Monitoring(gradients=Interval(1), activations=Interval(1)), BEGINNING)
    state = make_state()
    with pytest.raises(ls.InputError, match="A compiled model does not show its activations"):
        logger.observe(state, ls.Towers(compile=True), 8)
    assert not state.gradient_hooks
    logger.close()


class WithObjects:
    """Black images, each with one box over all of it if `boxes`."""

    cost: Cost = "memory"

    def __init__(self, boxes: bool) -> None:
        self._boxes = boxes

    def __len__(self) -> int:
        return 5

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        boxes = {"boxes": [torch.tensor([[0.0, 0.0, 1.0, 1.0]]) for _ in indices]}
        images = torch.zeros(len(indices), 1, 8, 9, dtype=torch.uint8)
        return {"image": images, **(boxes if self._boxes else {})}

    def example_id(self, index: int) -> str:
        return str(index)


@pytest.mark.parametrize("boxes", [True, False], ids=["with boxes", "without"])
def test_logged_images_show_boxes_where_there_are_some(tmp_path: Path, boxes: bool) -> None:
    logger = MetricsLogger(tmp_path, Monitoring(images=2), Progress(0, 0, 5))
    logger.show_images(Loader(WithObjects(boxes), batch_size=4), 2, 7)
    logger.close()
    events = EventAccumulator(str(tmp_path / "summaries")).Reload()
    assert events.Tags()["images"] == ["input/0", "input/1"]
    for tag in events.Tags()["images"]:
        (event,) = events.Images(tag)
        assert event.step == 7
        pixels = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
        assert pixels.shape == ((8, 9, 3) if boxes else (8, 9))
        assert pixels[0].tolist() == ([[*COLOURS[0]]] * 9 if boxes else [0] * 9)
