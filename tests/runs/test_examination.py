"""Files of a run whose host was lost, or that somebody has made up, beside its chain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.recipes.parts import Monitoring
from lockstep.reporting.chain import CHAIN
from lockstep.run_files import METRICS
from lockstep.runs.examination import examine
from lockstep.runs.metrics_logger import MetricsLogger
from lockstep.types import Interval, Progress

GROUND = {
    "history": "", "skipped": [], "stage": 1, "workers": 2, "sums": "gloo", "recipe": "", "data": "", "choices": {},
}  # fmt: skip
WATCH = Monitoring(summaries=Interval(0), metrics=Interval(1))


def make_reports(count: int) -> list[ls.StepReport]:
    state = ls.TrainState(nn.Linear(3, 4), ls.optim.SGD(0.1))
    return [
        ls.train_step(
            state,
            lambda model, batch: {"squared": model(batch["x"]).square().mean()},
            ls.Batch({"x": torch.ones(8, 3)}, position=8 * step, batch_size=8, towers=range(1), epoch_size=80),
        )
        for step in range(count)
    ]


def write(folder: Path, name: str, start: Progress, reports: Sequence[ls.StepReport], last: str = "") -> MetricsLogger:
    logger = MetricsLogger(folder, WATCH, start)
    logger.chain.write_event({"step": start.step, "event": name, **GROUND, "from_position": start.position})
    for report in reports:
        logger.hooks()[1](report)
    if last:
        logger.chain.write_event({"step": reports[-1].step, "event": last, "from_position": 8 * reports[-1].step})
    logger.close()
    return logger


def cut(path: Path, count: int) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:count]))


def problems(folder: Path) -> tuple[list[str], list[str]]:
    """What is wrong with chain and metrics, and the notes on them."""
    found = examine(folder, lambda done, total: None)
    return tuple([each for each in kind if each.startswith((CHAIN, METRICS))] for kind in (found.problems, found.notes))  # type: ignore[return-value]


@pytest.mark.parametrize("kept_metrics", [3, 5])
def test_a_gap_that_a_lost_chief_has_left(tmp_path: Path, kept_metrics: int) -> None:
    reports = make_reports(9)
    write(tmp_path, "start", Progress(0, 0, 80), reports[:7])
    cut(tmp_path / CHAIN, 1 + 3)
    cut(tmp_path / METRICS, kept_metrics)
    logger = MetricsLogger(tmp_path, WATCH, reports[8].progress)
    logger.write_missed(reports[7:])
    logger.chain.write_event({"step": 9, "event": "continue", **GROUND, "from_position": 72})
    logger.chain.write_event({"step": 9, "event": "end"})
    logger.close()
    wrong, notes = problems(tmp_path)
    assert wrong == []
    assert notes[0] == "chain.jsonl lacks the updates 4 to 7: they were lost"
    assert len(notes) == 1 + kept_metrics - 3


def test_lines_that_a_loss_of_power_has_taken(tmp_path: Path) -> None:
    write(tmp_path, "start", Progress(0, 0, 80), make_reports(5))
    chain = (tmp_path / CHAIN).read_bytes()
    cut(tmp_path / CHAIN, 1 + 3)
    wrong, notes = problems(tmp_path)
    assert (wrong, len(notes)) == ([], 2)
    assert "metrics.jsonl, line 4 (step 4): the chain has no such line" in notes
    (tmp_path / CHAIN).write_bytes(chain)
    cut(tmp_path / METRICS, 2)
    assert problems(tmp_path) == (
        [],
        ["metrics.jsonl lacks the last 3 lines: they were lost with the host, or yet come"],
    )


@pytest.mark.parametrize("last", ["", "end"])
def test_lines_of_metrics_that_nobody_has_lost(tmp_path: Path, last: str) -> None:
    write(tmp_path, "start", Progress(0, 0, 80), make_reports(5), last)
    lines = (tmp_path / METRICS).read_text().splitlines(keepends=True)
    (tmp_path / METRICS).write_text("".join([lines[0], *lines[2:], lines[4]]))
    wrong, _ = problems(tmp_path)
    assert wrong == [
        "metrics.jsonl, line 5 (step 5): the chain has no such line",
        "metrics.jsonl lacks the line of step 2",
    ]


def test_an_evaluation_made_again_by_other_workers(tmp_path: Path) -> None:
    reports = make_reports(3)
    write(tmp_path, "start", Progress(0, 0, 80), reports)
    for score in (0.1234567, 0.1234568):
        logger = MetricsLogger(tmp_path, WATCH, reports[-1].progress)
        logger.chain.write_event({"step": 3, "event": "continue", "from_position": 24})
        logger.write_evaluation(3, "validation", {"loss": score})
        logger.close()
    write(tmp_path, "end", reports[-1].progress, [])
    assert problems(tmp_path) == ([], [])


def test_a_line_that_is_two_at_once(tmp_path: Path) -> None:
    write(tmp_path, "start", Progress(0, 0, 80), make_reports(2), "end")
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    lines[0]["evaluation"] = []
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    wrong, _ = problems(tmp_path)
    assert wrong == ["metrics.jsonl, line 1 (evaluation [], step 1): evaluation is [], and in the chain None"]
