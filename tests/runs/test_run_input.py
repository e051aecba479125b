"""What a run by a recipe says and keeps of examples that cannot be read, and of the time its data took."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parts_by_hand import parts_by_hand
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import DataError
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.runs import stages
from lockstep.runs.build import Parts, build
from lockstep.runs.run import Run
from lockstep.workers.rank import Worker

Int64s = np.ndarray[Any, np.dtype[np.int64]]


class Damaged:
    cost = "decode"
    decoder = "a decoder 1.0"

    def __len__(self) -> int:
        return 20

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        if found := {2, 9}.intersection(indices.tolist()):
            raise DataError(f"file-{min(found)} is torn.", given="half a file", expected="a whole one", hint="none")
        return {"x": torch.from_numpy(indices).float()[:, None]}

    def example_id(self, index: int) -> str:
        return f"file-{index}"


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def tiny(given: Recipe, worker: Worker, reader: None, metrics: object) -> Parts:
    feed = given.feed
    loader = ls.data.Loader(
        Damaged(), batch_size=given.batch_size, order=feed.order, num_processes=feed.num_processes,
        num_threads=feed.num_threads, bad_examples=feed.bad_examples, bad_budget=feed.bad_budget,
    )  # fmt: skip
    torch.manual_seed(0)
    return parts_by_hand(ls.TrainState(nn.Linear(1, 1), ls.optim.SGD(1e-3)), loader, given.towers_for(1), losses)


def run(workdir: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> None:
    monkeypatch.setattr(stages, "build", tiny)
    given = with_settings(
        find("mnist"),
        [
            "batch_size=4", "num_towers=1", "evaluate.every=0", "watch.metrics=1 steps", "end.kind=steps",
            "end.count=5", "feed.order=sequential", "feed.bad_examples=skip", *settings,
        ],
    )  # fmt: skip
    Run(given, workdir, ls.join("cpu")).run()


@pytest.mark.process
def test_bad_examples_are_named_counted_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(tmp_path, monkeypatch, "feed.num_processes=2")
    run(tmp_path, monkeypatch, "feed.num_threads=2", "feed.num_processes=0", "end.count=11")
    listed = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert listed == [
        {"example": "file-2", "reason": "file-2 is torn. half a file"},
        {"example": "file-9", "reason": "file-9 is torn. half a file"},
    ]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("bad_examples", 0) for line in lines] == [1, 0, 1, 0, 0] * 2 + [1]
    said = [record.message for record in caplog.records]
    assert said.count("file-9 cannot be read; file-10 stands in. file-9 is torn. half a file") == 1
    assert said.count("2 bad examples so far, of at most 100") == 1
    assert "2 loader processes a worker" in said
    assert "2 loader threads a worker" in said
    assert sum(line.startswith("waited for data ") and "bad examples replaced: 2" in line for line in said) == 1
    assert "a decoder 1.0" in (tmp_path / "choices.json").read_text()
    assert [line for line in said if "a decoder 1.0" in line] == 2 * ["images are decoded by a decoder 1.0"]


def test_a_budget_that_is_used_up_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"2 examples cannot be read: more than the budget of 1\."):
        run(tmp_path, monkeypatch, "feed.bad_budget=1", "feed.num_processes=0")


def test_the_split_and_the_feed_of_a_recipe_make_the_loader() -> None:
    given = with_settings(
        find("mnist"),
        ["data.split=validation", "feed.order.kind=block_shuffled", "feed.order.block_size=16", "feed.prefetch=3"],
    )
    loader = build(given, ls.join("cpu")).loader
    assert loader.epoch_size == 5_000
    assert loader.order == ls.data.BlockShuffled(16)
    assert loader.pool.prefetch == 3


def test_a_feed_of_processes_and_threads_is_refused() -> None:
    with pytest.raises(ls.errors.InputError, match=r"feed in --set: Either processes or threads read ahead\."):
        with_settings(find("mnist"), ["feed.num_processes=1", "feed.num_threads=1"])
