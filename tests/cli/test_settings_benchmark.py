"""What other settings bring: each in turn with the recipe's own, the verdict, and the command as a user runs it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep.cli import benchmark, settings_benchmark
from lockstep.cli.main import main
from lockstep.cli.settings_benchmark import Built, MeasuredChange, MeasuredSettings, compare_settings, usual_changes
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import to_toml
from lockstep.runs.build import build
from lockstep.workers.rank import join


def compared(*ratios: float, setting: str = "towers.precision=bf16") -> MeasuredChange:
    return MeasuredChange((setting,), 1.0, ratios)


@pytest.mark.parametrize(
    ("ratios", "is_faster"),
    [((0.5, 0.6, 0.7, 0.9, 1.4), True), ((0.5, 0.6, 0.7, 0.98, 1.0), False), ((0.98, 0.99, 0.99), False), ((), False)],
)
def test_faster_is_what_three_quarters_of_the_rounds_say(ratios: tuple[float, ...], is_faster: bool) -> None:
    assert compared(*ratios).is_faster is is_faster


def test_the_best_is_the_fastest_of_those_that_are_faster_for_sure() -> None:
    sure, noise = compared(0.8, 0.8, 0.8, setting="num_threads=1"), compared(0.3, 0.3, 1.2)
    found = MeasuredSettings(
        "Net", "cpu", 1.0, (noise, sure, MeasuredChange(("towers.compile=true",), 0.0, (), "No compiler."))
    )
    assert found.best is sure
    assert found.verdict == (
        "With num_threads=1 a step takes 0.80 of its time. The rounds differ much: other processes compute here, too."
    )
    assert found.as_json()["best"] == ["num_threads=1"]
    assert MeasuredSettings("Net", "cpu", 1.0, ()).verdict == "No change is faster beyond the spread of the rounds."


def test_what_usually_matters_depends_on_the_model_and_the_device() -> None:
    recipe = find("mnist")
    parts = build(recipe, join("cpu"))
    on_cpu = ["towers.channels_last=false", "towers.precision=bf16", "num_threads=1", "towers.compile=true"]
    assert [*usual_changes(parts, torch.device("cpu"), num_threads=2)] == on_cpu
    assert "num_threads=1" not in usual_changes(parts, torch.device("cpu"), num_threads=1)
    assert {"towers.conv_tf32=true", "towers.cudnn_benchmark=true"} < {
        *usual_changes(parts, torch.device("meta"), num_threads=2)
    }
    timed = replace(parts, towers=replace(parts.towers, cudnn_benchmark=True))
    assert "towers.cudnn_benchmark=true" not in usual_changes(timed, torch.device("meta"), num_threads=2)
    parts.state.model = nn.Linear(2, 2)
    assert not any("channels_last" in each for each in usual_changes(parts, torch.device("cpu"), num_threads=1))


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe of one thread, measured by its CPU time, of which other processes take nothing away."""
    monkeypatch.setattr(settings_benchmark, "time", SimpleNamespace(perf_counter=time.process_time))
    path = tmp_path / "small.toml"
    path.write_text(to_toml(replace(find("mnist"), num_threads=1)))
    return str(path)


def run(*words: str, code: int = 0) -> None:
    assert main(["benchmark", "settings", *words, "--device", "cpu"]) == code


def test_a_recipe_is_measured(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    # A batch of a quarter is faster on any machine.
    run(small, "--seconds", "0.1", "--set", "batch_size=32", "--set", "data.scale=one")
    said, log = capsys.readouterr()
    lines = said.splitlines()
    assert lines[0].startswith(f"{small}: MnistNet, batches of 128 in 2 towers; one worker on cpu with ")
    assert lines[3].split()[:2] == ["the", "recipe"]
    assert lines[4].startswith("batch_size=32 ")
    assert float(lines[4].split()[2]) < 0.8
    assert lines[-1].startswith(f"- To train so: lockstep train {small} --set data.scale=one --set batch_size=32")
    assert "measuring batch_size=32" in log
    assert "measuring data.scale" not in log
    assert torch.get_num_threads() == threads


def test_what_cannot_be_built_is_told_and_the_others_are_measured() -> None:
    worker = join("cpu")

    def built(recipe: Recipe) -> Built:
        if recipe.towers.compile:
            raise RuntimeError("There is no C++ compiler.\nSet CXX.")
        return benchmark._trained(recipe, worker)

    small = replace(find("mnist"), batch_size=4)
    found = compare_settings(small, built, worker.device, ["towers.compile=true", "num_threads=1"], 0.1)
    compiled, alone = found.changes
    assert (compiled.failed, compiled.ratios, compiled.is_faster) == ("There is no C++ compiler.", (), False)
    assert len(alone.ratios) >= 3


def test_of_several_values_of_a_field_the_fastest_is_measured_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = {"batch_size=32": 0.5, "batch_size=16": 0.3, "batch_size=64": 0.8, "num_threads=1": 0.9}
    monkeypatch.setattr(
        settings_benchmark,
        "_compared",
        lambda as_is, recipe, settings, *_: MeasuredChange(settings, 1.0, (ratios.get(settings[0], 0.2),) * 3),
    )
    worker, small = join("cpu"), replace(find("mnist"), batch_size=4)
    found = compare_settings(small, lambda recipe: benchmark._trained(recipe, worker), worker.device, [*ratios], 0.1)
    assert [each.settings for each in found.changes[4:]] == [("batch_size=16", "num_threads=1")]


def test_json(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(small, "--seconds", "0.1", "--set", "batch_size=16", "--json")
    found = json.loads(capsys.readouterr().out)
    (change,) = found["changes"]
    assert (found["what"], found["best"], change["settings"]) == (small, ["batch_size=16"], ["batch_size=16"])
    assert change["ratios"] == sorted(change["ratios"])
    assert len(change["ratios"]) >= 3


def test_where_nothing_can_be_measured_the_steps_of_the_recipe_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    run("mnist", "--set", 'train_only=["nothing*"]', "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] > 0
    assert found["changes"][0]["failed"] == "A pattern of train_only matches no parameter."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["images"], ["A path to data has no training step", "lockstep benchmark input images"]),
        (["mnist", "--set", "towers.precisio=bf16"], ["precisio", "precision"]),
        (["mnist", "--set", "towers.precision=fp8"], ["fp8", "bf16"]),
        (["mnist", "--threads", "1"], ["given:    --threads"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_what_cannot_be_measured_is_refused(
    words: list[str],
    message: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    run(*words, code=2)
    said, log = capsys.readouterr()
    assert said == ""
    for part in message:
        assert part in log
