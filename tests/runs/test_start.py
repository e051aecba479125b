"""What a run by a recipe starts from: weights of another file, the full state of another run, or its own checkpoint."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parts_by_hand import parts_by_hand
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import CheckpointError
from lockstep.models.layers import FrozenBatchNorm2d
from lockstep.recipes.pipeline_config import import_pipeline
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.runs import stages, start
from lockstep.runs.build import Parts
from lockstep.runs.run import Run
from lockstep.runs.start import _check_activations, _check_fresh_norms, _thawing
from lockstep.workers.rank import Worker


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def tiny(given: Recipe, worker: Worker, reader: None, metrics: object) -> Parts:
    generator = torch.Generator().manual_seed(given.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(given.seed)
        model = nn.Linear(3, 1)
    fields = {"x": torch.randn(40, 3, generator=generator)}
    loader = ls.data.Loader(ls.data.Arrays(fields), batch_size=given.batch_size)
    return parts_by_hand(ls.TrainState(model, ls.optim.SGD(0.05, momentum=0.9)), loader, given.towers_for(1), losses)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(stages, "build", tiny)

    def began(workdir: Path, *settings: str, fork_from: str | None = None) -> dict[str, bytes]:
        torch.set_num_threads(1)
        given = with_settings(
            find("mnist"),
            ["batch_size=4", "num_towers=1", "evaluate.every=0", "watch.metrics=1 steps", "watch.summaries=0",
             "checkpoints.every=2 steps", "end.kind=steps", "end.count=6", *settings],
        )  # fmt: skip
        Run(given, workdir, ls.join("cpu"), fork_from=fork_from).run()
        newest = max((workdir / "checkpoints").iterdir())
        return {path.name: path.read_bytes() for path in newest.iterdir() if path.name != "manifest.json"}

    return began


def steps(workdir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def history(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "history.jsonl").read_text().splitlines()]


def test_a_fork_goes_on_as_the_run_that_it_left(tmp_path: Path, run: Any) -> None:
    whole = run(tmp_path / "whole")
    assert run(tmp_path / "fork", fork_from=f"{tmp_path / 'whole'}@2") == whole
    assert steps(tmp_path / "fork") == [3, 4, 5, 6]
    assert history(tmp_path / "fork")[0]["forked_from"] == f"{tmp_path / 'whole'}@2"
    assert steps(tmp_path / "whole") == [1, 2, 3, 4, 5, 6], "the other run is as it was"


def test_a_fork_that_is_started_again_goes_on_with_its_own(
    tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(tmp_path / "whole")
    run(tmp_path / "fork", "end.count=4", fork_from=f"{tmp_path / 'whole'}@2")
    run(tmp_path / "fork", fork_from=f"{tmp_path / 'whole'}@2")
    assert "not forked again: the run goes on from its own checkpoint of step 4" in caplog.messages
    assert steps(tmp_path / "fork") == [3, 4, 5, 6]


def test_where_there_is_nothing_to_fork_from_nothing_is_begun(tmp_path: Path, run: Any) -> None:
    (tmp_path / "empty").mkdir()
    for other, message in {"nowhere": "There is no run .*nowhere to fork from", "empty": "no checkpoint in "}.items():
        with pytest.raises(ls.InputError, match=message):
            run(tmp_path / "fork", fork_from=str(tmp_path / other))
    assert not (tmp_path / "fork/recipe.toml").exists()
    run(tmp_path / "fork")


def test_weights_of_another_run_start_this_one_and_are_reported(tmp_path: Path, run: Any) -> None:
    run(tmp_path / "donor", "seed=7")
    run(tmp_path / "new", f"warm_start.path={tmp_path / 'donor'}", "end.count=1")
    report = json.loads((tmp_path / "new" / "warm_start.json").read_text())
    assert (report["share"], report["counts"]["loaded"]) == (1.0, 2)
    first, donor = (ls_weights(tmp_path / name, step) for name, step in (("new", 0), ("donor", 6)))
    assert first == donor
    assert steps(tmp_path / "new") == [1]


def test_a_checkpoint_in_the_workdir_wins(tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run(tmp_path / "donor", "seed=7")
    setting = f"warm_start.path={tmp_path / 'donor'}"
    run(tmp_path / "new", setting, "end.count=2")
    whole = run(tmp_path / "other", setting)
    assert run(tmp_path / "new", setting) == whole
    assert f"{tmp_path / 'donor'} is not loaded: the run goes on from its own checkpoint of step 2" in caplog.messages


def test_too_little_loaded_is_a_start_that_is_refused(tmp_path: Path, run: Any) -> None:
    run(tmp_path / "donor")
    wanted = [f"warm_start.path={tmp_path / 'donor'}", "warm_start.mapping.skip=['weight']"]
    with pytest.raises(CheckpointError, match=r"25\.00 % of the parameters"):
        run(tmp_path / "new", *wanted, "warm_start.mapping.require_loaded=0.95")
    assert not (tmp_path / "new" / "recipe.toml").exists()


def test_how_idle_threads_wait_is_no_choice_of_an_exact_run(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = "exchange.exact=true"
    whole = run(tmp_path / "whole", exact)
    run(tmp_path / "parts", exact, "end.count=4")
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert run(tmp_path / "parts", exact) == whole
    assert history(tmp_path / "parts")[2]["changed"] == ["end.count: saved 4, given 6"]


def ls_weights(workdir: Path, step: int) -> list[float]:
    from safetensors.torch import load_file

    tensors = load_file(workdir / f"checkpoints/step-{step:08d}/parameters.safetensors")
    return [value for name in sorted(tensors) for value in tensors[name].flatten().tolist()]


@pytest.mark.parametrize("left", [0, 1, 3])
def test_lines_that_the_metrics_have_lost_are_told(
    tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    run(tmp_path, "end.count=4")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:left]))
    run(tmp_path)
    warned = [record.getMessage() for record in caplog.records if "metrics.jsonl" in record.getMessage()]
    assert warned == [
        f"metrics.jsonl has {left} of the 4 lines that it had at step 4; the run goes on without the others"
    ]
    resumed = [event for event in history(tmp_path) if event["event"] == "resume"]
    assert [event.get("lost_metrics_lines") for event in resumed] == [4 - left]
    assert steps(tmp_path) == [*range(1, left + 1), 5, 6]
    caplog.clear()
    run(tmp_path, "end.count=8")
    assert "metrics.jsonl has" not in caplog.text, "it is told once"


def test_metrics_that_are_whole_are_told_of_by_nobody(
    tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, "end.count=4")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "position": 20, "losses"')  # torn: of no step that a checkpoint holds
    (tmp_path / "checkpoints" / "step-00000004" / "manifest.json").write_text("damaged")  # so that it falls back to 2
    run(tmp_path)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert "metrics.jsonl has" not in caplog.text
    assert not any("lost_metrics_lines" in event for event in history(tmp_path))


def test_activations_are_refused_where_the_chief_runs_no_modules() -> None:
    watched = with_settings(find("mnist"), ["watch.activations='5 steps'", "exchange.kind=backups"])
    worker = replace(ls.join("cpu"), num_workers=3)
    with pytest.raises(ls.InputError, match=r"it sees no activations.\n.*Backups\(\), 3 workers"):
        _check_activations(watched, worker)
    _check_activations(watched, ls.join("cpu"))
    _check_activations(replace(watched, exchange=ls.AllReduce()), worker)


def normed(given: Recipe, worker: Worker, reader: None, metrics: object) -> Parts:
    made = tiny(given, worker, reader, metrics)
    model = nn.Sequential(FrozenBatchNorm2d(2), nn.BatchNorm2d(2), nn.BatchNorm2d(2))
    model[2].running_mean += 0.5  # of trained weights
    return replace(made, state=ls.TrainState(model, ls.optim.SGD(0.05)))


def test_batch_norm_that_keeps_fresh_statistics_is_told_or_refused(caplog: Any) -> None:
    def check(*settings: str) -> None:
        given = with_settings(find("mnist"), ["batch_size=4", "num_towers=1", *settings])
        _check_fresh_norms(given, normed(given, ls.join("cpu"), None, None), ls.join("cpu"))

    check()  # no setting of the recipe frees it
    assert caplog.messages == [
        "1 of 3 batch norms keep their statistics, and have those of a fresh model: with mean 0 and variance 1 "
        "nothing is normalised, and losses may be in the millions: 0; start from trained weights "
        "(--set warm_start.path=FILE), or let the model train them"
    ]
    caplog.clear()
    check("towers.batch_norm=frozen")  # one of the three has been trained
    (line,) = caplog.messages
    assert line.startswith("2 of 3 batch norms")
    assert line.endswith("or let them learn: --set towers.batch_norm=mean")


def test_frozen_batch_norm_over_fresh_weights_is_refused_before_the_first_step_and_not_on_a_resume(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def frozen(given: Recipe, worker: Worker, reader: None, metrics: object) -> Parts:
        parts = tiny(given, worker, reader, metrics)
        with torch.random.fork_rng():
            model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        return replace(parts, state=ls.TrainState(model, ls.optim.SGD(0.05)))

    monkeypatch.setattr(stages, "build", frozen)
    with pytest.raises(ls.InputError, match=r"(?s)1 of 1 batch norms.*let them learn: --set towers.batch_norm=mean"):
        run(tmp_path / "run", "towers.batch_norm=frozen", "end.count=2")
    assert not (tmp_path / "run" / "checkpoints").exists()
    with monkeypatch.context() as patch:
        patch.setattr(start, "_check_fresh_norms", lambda *_: None)
        run(tmp_path / "run", "towers.batch_norm=frozen", "end.count=2")
    run(tmp_path / "run", "towers.batch_norm=frozen", "end.count=4")
    assert steps(tmp_path / "run") == [1, 2, 3, 4]


def test_the_settings_that_freeze_batch_norm_are_named() -> None:
    assert _thawing(find("faster_rcnn_coco")) == ["model.freeze_batchnorm=false"]
    imported = Path(__file__).parent.parent / "fixtures/odapi_configs/faster_rcnn_resnet101_atrous_coco.config"
    made = import_pipeline(imported.read_text(), imported.name, imported.stem).recipe
    assert _thawing(made) == ["model.feature_extractor.batch_norm_trainable=true"]
    assert _thawing(find("ssdlite_coco")) == []
