"""`lockstep plan` as a user runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_costs import COST, make_costs

from lockstep.cli import plan
from lockstep.cli.main import main, parse
from lockstep.planning import start
from lockstep.planning.model import Link, RunCosts, SentBucket
from lockstep.planning.start import ProbeRequest

NET = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

def build():
    return nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 64), nn.Linear(64, 10))

def reader(split):
    return {"x": torch.randn(32, 16), "y": torch.arange(32) % 10} if split == "train" else None

def losses(model, batch):
    return {"loss": cross_entropy(model(batch["x"]), batch["y"])}
"""
RECIPE = """
name = "mine"
batch_size = 16
num_towers = 4
end = { kind = "steps", count = 100 }
model = { kind = "python", function = "planned_net:build" }
task = { losses = "planned_net:losses" }
data = { kind = "python", function = "planned_net:reader" }
optimizer = { kind = "sgd", lr = 1e-3 }
"""
COSTS = make_costs(
    num_cores=2,
    per_host=1,
    epoch_size=55_000,
    workers=(replace(COST, first_cpu_seconds=0.2, further_cpu_seconds=0.16),),
    buckets=(SentBucket(13_000_000, 0.05),),
    shared_memory=None,
    messages=Link(0.0001, 1e-9),
)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[ProbeRequest]:
    """What was asked; nothing is measured."""
    asked: list[ProbeRequest] = []

    def probe(request: ProbeRequest) -> RunCosts:
        asked.append(request)
        return COSTS

    monkeypatch.setattr(start, "probe_on_workers", probe)
    return asked


def test_a_table_says_what_each_number_of_workers_takes(
    planned: list[ProbeRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "mnist", "--workers", "1,2,3", "--workers-per-host", "1", "--device", "cpu", "--epochs", "1"]
    assert main([*words, "--set", "nonfinite=rollback", "--set", "warm_start.path=nowhere"]) == 0
    [request] = planned
    assert (request.num_workers, request.per_host, request.seconds) == ((1, 2, 3), 1, 60.0)
    lines = capsys.readouterr().out.splitlines()
    heads = next(line for line in lines if "efficiency" in line)
    one, two = (lines[lines.index(heads) + number] for number in (1, 2))
    assert one.split()[:6] == ["1", "1", "2", "192", "667", "100"]
    assert two.split()[:3] == ["2", "2", "1"]
    assert "3 workers: Some workers would have no tower to run. start at most 2 (--workers)" in "\n".join(lines)
    assert "- All hosts are like this one, 1 worker on each, and do nothing else." in lines
    assert any("a network is slower: --latency MS --bandwidth GBIT" in line for line in lines)


def test_why_several_numbers_of_workers_are_refused_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "probe_on_workers", lambda _: replace(COSTS, num_probed=1, messages=None))
    words = ["plan", "mnist", "--towers", "2", "--workers", "1,2,3,4", "--device", "cpu", "--latency", "1"]
    assert main(words) == 0
    refused = [line for line in capsys.readouterr().out.splitlines() if "workers: " in line]
    assert [line.partition(":")[0] for line in refused] == ["2 workers", "3, 4 workers"]
    assert "--latency 0.05 --bandwidth 25" in refused[0]


def test_a_network_that_is_given_makes_the_exchange_slower(
    planned: list[ProbeRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = []
    for network in ([], ["--latency", "5", "--bandwidth", "0.1"]):
        assert main(["plan", "mnist", "--workers", "2", "--device", "cpu", "--json", *network]) == 0
        found = json.loads(capsys.readouterr().out)
        seconds.append(found["plan"][0]["exchange_seconds"])
    assert found["measured"]["network"] == {
        "latency_seconds": pytest.approx(0.0051),
        "seconds_per_byte": pytest.approx(8e-8),
        "cpu_latency_seconds": 0.0,
        "cpu_seconds_per_byte": 0.0,
    }
    assert seconds[1] == pytest.approx(2 * 0.0051 + 13e6 * 8e-8 - 0.05)
    assert seconds[0] == 0.0, "it ends before the backward pass does"
    assert "gloo and the network together" in "\n".join(found["assumed"])


def test_towers_that_cannot_be_dealt_evenly_are_told(
    planned: list[ProbeRequest], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plan", "mnist", "--towers", "8", "--set", "batch_size=512", "--workers", "3"]) == 0
    assert "3 workers: the towers cannot be dealt evenly, 2 or 3 each; those that" in capsys.readouterr().out


def test_on_a_narrow_terminal_each_row_is_a_paragraph(
    planned: list[ProbeRequest], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "width_of", lambda _: 40)
    assert main(["plan", "mnist", "--workers", "1,2", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "workers 1 | hosts 1 | towers 2" in lines
    assert not any("ms a step" in line and "efficiency" in line and len(line) > 40 for line in lines)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nothing_of_this_name"], "is neither data, nor a recipe"),
        (["mnist", "--workers", "1,x"], "These are no numbers of workers."),
        (["mnist", "--workers", ""], "These are no numbers of workers."),
        (["mnist", "--workers", "-1"], "These are no numbers of workers."),
        (["mnist", "--workers", "1,,2"], "These are no numbers of workers."),
        (["mnist", "--workers", "1,0"], "--workers"),
        (["mnist", "--workers", "99999999999"], "--workers"),
        (["mnist", "--workers-per-host", "0"], "--workers-per-host"),
        (["mnist", "--latency", "-1"], "--latency"),
        (["mnist", "--bandwidth", "nan"], "--bandwidth"),
        (["mnist", "--seconds", "0"], "--seconds"),
        (["mnist", "--workers", "64,3"], "Some workers would have no tower to run."),
        (["mnist", "--towers", "0"], "--towers"),
        (["mnist", "--towers", "7"], "The batch cannot be split evenly over the towers."),
        (["mnist", "--steps", "0"], "has no step to do"),
        (["mnist", "--set", "nothing=1"], "nothing"),
        (["flowers", "--set", "data.train=nowhere/*.tfrecord"], "nowhere"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_is_measured(
    words: list[str], text: str, planned: list[ProbeRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert text in capsys.readouterr().err
    assert not planned


def test_what_ends_the_workers_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "probe_on_workers", lambda _: 130)
    assert main(["plan", "mnist"]) == 130


def test_by_default_a_minute_is_measured() -> None:
    arguments = parse(["plan", "mnist"])
    assert (arguments.seconds, arguments.numbers) == (60.0, "1,2,4,8")


@pytest.mark.process
def test_two_workers_measure_a_recipe_of_ones_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "planned_net.py").write_text(NET)
    (tmp_path / "mine.toml").write_text(RECIPE)
    words = ["--workers", "1,2,4,8", "--workers-per-host", "2", "--seconds", "1", "--device", "cpu", "--json"]
    assert main(["plan", str(tmp_path / "mine.toml"), *words]) == 0
    out, log = capfd.readouterr()
    found = json.loads(out)
    assert [row.get("exchange") for row in found["plan"]] == ["nothing", "shared memory", "all-reduce", None]
    assert "start at most 4" in found["plan"][3]["refused"]
    steps = [row["step_seconds"] for row in found["plan"][:3]]
    assert all(0 < seconds < row["finish_seconds"] for seconds, row in zip(steps, found["plan"], strict=False))
    measured = RunCosts.read(found["measured"])
    assert [cost.num_local for cost in measured.workers] == [1, 2]
    assert measured.shared_memory is not None
    assert measured.messages is not None
    assert measured.buckets[0].early_seconds > 0
    assert "measuring a save" in log
    assert [path.name for path in Path.cwd().iterdir()] == ["data"], "nothing is left"
