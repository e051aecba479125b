"""What a run by a recipe does about batches that are not finite: stop, skip, roll back; and what it keeps of them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parts_by_hand import parts_by_hand
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import lockstep as ls
from lockstep.metrics.metric import NO_METRICS, Metric
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.runs import skipped, stages
from lockstep.runs.build import Parts
from lockstep.runs.run import Run
from lockstep.runs.workdir import Result
from lockstep.types import NonFiniteReport
from lockstep.workers.rank import Worker

BATCH_SIZE, STEPS = 4, 9
BAD = [8, 24, 28]
"""Positions of batches that are bad for the last of two towers."""


class Named:
    cost = "memory"

    def __len__(self) -> int:
        return 30

    def read_batch(self, indices: Any) -> dict[str, Any]:
        numbers = torch.from_numpy(indices).float()
        return {"x": torch.stack([numbers.sin(), (numbers * 7).cos()], 1), "name": [f"n{index}" for index in indices]}

    def example_id(self, index: int) -> str:
        return f"n{index}"


def make_build(bad: Sequence[int], skipped: Sequence[int] = (), attempted: Any = None, score: Any = None) -> Any:
    """A `build` of a tiny run; `attempted(position)` is called in each attempt."""

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        if attempted and batch.towers.start == 0:
            attempted(batch.position)
        is_bad = batch.position in bad and batch.towers.stop == 2
        return {"square": model(batch["x"]).square().mean() * (math.nan if is_bad else 1.0)}

    def build(
        recipe: Recipe, worker: Worker, reader: object = None, metrics: Mapping[str, Metric] = NO_METRICS, **_: object
    ) -> Parts:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(3, 1))
        state = ls.TrainState(
            model,
            ls.optim.SGD(0.1, momentum=0.9),
            nonfinite=recipe.nonfinite,
            nonfinite_budget=recipe.nonfinite_budget,
        )
        loader = ls.data.Loader(Named(), batch_size=recipe.batch_size, order="sequential")
        for position in skipped:
            loader.skip(position)
        held_out = ls.data.Loader(Named(), batch_size=8, order="sequential") if score else None
        return parts_by_hand(state, loader, recipe.towers_for(worker.num_workers), losses, score, held_out, metrics)

    return build


def make_recipe(policy: str, *more: str) -> Recipe:
    return with_settings(
        find("mnist"),
        [
            f"nonfinite={policy}", f"batch_size={BATCH_SIZE}", "num_towers=2", "evaluate.every=0",
            "watch.metrics=1 steps", "watch.summaries=1 steps", "checkpoints.every=3 steps", "exchange.exact=true",
            "end.kind=steps", f"end.count={STEPS}", *more,
        ],
    )  # fmt: skip


def run(workdir: Path | None, given: Recipe, build: Any) -> Result:
    """A start of a run on this worker."""
    before, stages.build = stages.build, build
    try:
        return Run(given, workdir, ls.join("cpu")).run()
    finally:
        stages.build = before


def contents(workdir: Path) -> dict[str, bytes]:
    newest = workdir / f"checkpoints/step-{STEPS:08d}"
    files = [path for path in newest.iterdir() if path.name != "manifest.json"]
    return {path.name: path.read_bytes() for path in [*files, workdir / "metrics.jsonl"]}


def history(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "history.jsonl").read_text().splitlines()]


def events(workdir: Path) -> list[str]:
    return [line["event"] for line in history(workdir) if line["event"] != "verdict"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run leaves that was told from the start what to skip."""
    workdir = tmp_path_factory.mktemp("told")
    torch.set_num_threads(1)
    run(workdir, make_recipe("rollback"), make_build([], skipped=BAD))
    return contents(workdir)


# Rollback -------------------------------------------------------------------------------------------------------------


def test_a_run_that_is_rolled_back_equals_one_told_from_the_start(
    told: dict[str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(tmp_path, make_recipe("rollback"), make_build(BAD))
    assert contents(tmp_path) == told
    assert events(tmp_path) == ["start", "rollback", "rollback", "rollback", "end"]
    first, second, third = [line for line in history(tmp_path) if line["event"] == "rollback"]
    assert (first["from_step"], first["step"], first["skipped"]) == (2, 0, 8)
    assert (second["from_step"], second["step"], second["skipped"]) == (5, 3, 24)
    assert (third["from_step"], third["step"], third["skipped"]) == (5, 4, 28), "saved after its first new step"
    assert first["why"][0] == "loss 'square' is nan"
    assert first["why"][-1].startswith("tower 1 on worker 0 (positions 10 to 11 of the stream): loss 'square' is nan")
    said = [record.message for record in caplog.records if "Going back" in record.message]
    assert len(said) == 3
    assert said[0].startswith(
        "The update after step 2 is not finite; nothing was changed. "
        "Going back to step 0, position 0, and on without the batch at position 8 (1 of at most 10): "
        "loss 'square' is nan and 6 more; from tower 1 on worker 0 (positions 10 to 11 of the stream): "
    )


def test_the_summaries_of_what_was_taken_back_are_cut(tmp_path: Path) -> None:
    run(tmp_path, make_recipe("rollback"), make_build(BAD))
    scalars = EventAccumulator(str(tmp_path / "summaries")).Reload().Scalars("losses/total")
    assert [event.step for event in scalars] == list(range(1, STEPS + 1))


class KilledError(Exception):
    """The end of a start that was killed."""


@pytest.mark.parametrize(("kill_at", "rollbacks"), [(0, 4), (4, 3), (20, 3), (36, 3)])
def test_what_is_skipped_survives_a_kill(told: dict[str, bytes], tmp_path: Path, kill_at: int, rollbacks: int) -> None:
    """Only a kill before the first new step has a rollback made twice."""
    seen: list[int] = []

    def die(position: int) -> None:
        seen.append(position)
        if position == kill_at and seen.count(0) > 1:  # after the first rollback
            raise KilledError

    with pytest.raises(KilledError):
        run(tmp_path, make_recipe("rollback"), make_build(BAD, attempted=die))
    run(tmp_path, make_recipe("rollback"), make_build(BAD))
    assert contents(tmp_path) == told
    assert events(tmp_path).count("rollback") == rollbacks


def on_two_workers(workdir: Path) -> list[int]:
    parts: list[Parts] = []

    def build(recipe: Recipe, worker: Worker, *_: object, **__: object) -> Parts:
        parts.append(make_build(BAD)(recipe, worker))
        return parts[0]

    run(workdir, make_recipe("rollback"), build)
    return parts[0].loader.skipped


@pytest.mark.process
def test_all_workers_go_back_together(
    told: dict[str, bytes], tmp_path: Path, run_workers: Callable[..., list[Any]]
) -> None:
    assert run_workers(on_two_workers, 2, tmp_path) == [BAD, BAD]
    assert contents(tmp_path) == told
    kept = tmp_path / "refused/position-000000008"
    assert sorted(path.name for path in kept.iterdir()) == ["report.json", "worker-1.json", "worker-1.safetensors"]


def test_the_budget_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ls.NonFiniteError, match="Another batch is not finite, and no more than 2 may be"):
        run(tmp_path, make_recipe("rollback", "nonfinite_budget=2"), make_build(BAD))
    assert events(tmp_path) == ["start", "rollback", "rollback", "failed"]
    assert (tmp_path / "refused/position-000000028/report.json").exists()


def slow_attempts(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Callable[[int], None]]:
    """Return the positions that will be attempted, and an observer for whom each attempt takes ten minutes."""
    clock = SimpleNamespace(now=0.0)
    for module in ("training.step", "runs.run"):
        monkeypatch.setattr(f"lockstep.{module}.time", SimpleNamespace(perf_counter=lambda: clock.now))
    positions: list[int] = []

    def ten_minutes(position: int) -> None:
        positions.append(position)
        clock.now += 600.0

    return positions, ten_minutes


def test_hours_go_on_whatever_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    positions, ten_minutes = slow_attempts(monkeypatch)
    hour = ["end.kind=hours", "end.count=1"]
    run(tmp_path / "plain", make_recipe("rollback", *hour), make_build([], attempted=ten_minutes))
    assert positions == [0, 4, 8, 12, 16, 20, 24]
    positions.clear()
    # What was taken back has taken fifty minutes, and ten to be made again.
    run(tmp_path / "bad", make_recipe("rollback", *hour), make_build([16], attempted=ten_minutes))
    assert positions == [0, 4, 8, 12, 16, 16, 12, 20]


def test_hours_go_on_when_the_launcher_starts_the_workers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions, ten_minutes = slow_attempts(monkeypatch)
    monkeypatch.setattr(ls.join().pulse, "earlier_seconds", 3000.0)
    run(tmp_path, make_recipe("rollback", "end.kind=hours", "end.count=1"), make_build([], attempted=ten_minutes))
    assert positions == [0, 4]


def test_a_rollback_needs_a_workdir() -> None:
    off = ["checkpoints.every=0", "watch.summaries=0", "watch.metrics=0"]
    with pytest.raises(ls.WorkdirError) as caught:
        run(None, make_recipe("rollback", *off), make_build([]))
    assert str(caught.value) == (
        "Without a workdir there is no checkpoint to go back to.\n"
        "  given:    nonfinite=rollback\n"
        "  expected: a workdir, or another policy\n"
        "  hint:     name a --workdir, or add --set nonfinite=skip"
    )
    with pytest.raises(ls.NonFiniteError):
        run(None, make_recipe("stop", *off), make_build(BAD))


# What is kept ---------------------------------------------------------------------------------------------------------


def test_a_stop_keeps_the_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(ls.NonFiniteError, match="after step 2 is not finite; nothing was changed"):
        run(tmp_path, make_recipe("stop"), make_build(BAD))
    folder = tmp_path / "refused/position-000000008"
    assert f"the nonfinite batch is kept in {folder}" in caplog.text
    report = json.loads((folder / "report.json").read_text())
    assert (report["step"], report["position"]) == (2, 8)
    assert report["reasons"][0] == "loss 'square' is nan"
    assert len(report["culprits"]) == 1
    assert (report["verdict"]["cause"], report["verdict"]["step"], report["verdict"]["position"]) == ("data", 2, 8)
    [line] = [line for line in history(tmp_path) if line["event"] == "verdict"]
    assert {name: line[name] for name in report["verdict"]} == report["verdict"]
    assert report["examples"] == ["n8", "n9", "n10", "n11"]
    tensors = load_file(folder / "worker-0.safetensors")
    numbers = torch.arange(8.0, 12.0)
    assert torch.equal(tensors["x"], torch.stack([numbers.sin(), (numbers * 7).cos()], 1))
    rest = json.loads((folder / "worker-0.json").read_text())
    assert rest["fields"] == {"name": ["n8", "n9", "n10", "n11"]}
    assert (rest["position"], rest["batch_size"], rest["towers"]) == (8, 4, [0, 1])
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2
    assert events(tmp_path) == ["start", "failed"]


def test_a_skip_keeps_the_batches_and_goes_on(tmp_path: Path) -> None:
    result = run(tmp_path, make_recipe("skip"), make_build(BAD))
    assert (result.step, result.epochs) == (STEPS, (STEPS + len(BAD)) * BATCH_SIZE / len(Named()))
    assert sorted(path.name for path in (tmp_path / "refused").iterdir()) == [
        "position-000000008",
        "position-000000024",
        "position-000000028",
    ]


def test_only_so_many_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(skipped, "MAX_KEPT", 2)
    run(tmp_path, make_recipe("skip"), make_build(BAD))
    assert len(list((tmp_path / "refused").iterdir())) == 2
    assert f"{tmp_path / 'refused'} holds 2 nonfinite batches; this one is not kept" in caplog.text


def test_what_cannot_be_kept_hides_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build = make_build(BAD, attempted=lambda position: (tmp_path / "run/refused").touch())
    with pytest.raises(ls.NonFiniteError):
        run(tmp_path / "run", make_recipe("stop"), build)
    assert "the nonfinite batch cannot be kept in" in caplog.text


def test_fields_of_any_kind_are_kept(tmp_path: Path) -> None:
    fields = {
        "boxes": [{"xyxy": torch.tensor([[0.0, math.inf]]), "shape": (1, 2)}, {"path": Path("a.png")}],
        "labels": ls.Ragged.of([torch.arange(3), torch.arange(0)]),
        "empty": torch.zeros(2, 0),
        "half": torch.tensor([1.0, math.nan], dtype=torch.bfloat16),
    }
    batch = ls.Batch(fields, position=4, batch_size=2, towers=range(1))
    loader = ls.data.Loader(Named(), batch_size=2, order="sequential")
    nonfinite = NonFiniteReport(4, ("a",), ("b",), batch)
    skipped.keep_batch(tmp_path, nonfinite, 1, loader, ls.join("cpu"))  # type: ignore[arg-type]
    folder = tmp_path / "position-000000004"
    tensors = load_file(folder / "worker-0.safetensors")
    assert tensors["empty"].shape == (2, 0)
    assert tensors["half"].isnan().tolist() == [False, True]
    assert (tensors["labels.values"].tolist(), tensors["labels.lengths"].tolist()) == ([0, 1, 2], [3, 0])
    boxes = json.loads((folder / "worker-0.json").read_text())["fields"]["boxes"]
    assert boxes == [{"xyxy": [[0.0, math.inf]], "shape": [1, 2]}, {"path": repr(Path("a.png"))}]
