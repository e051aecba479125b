"""What limits a run, told from costs made up so that it is known; and one that is measured."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_costs import COST, make_costs

from lockstep.cli import run_limits
from lockstep.cli.main import main
from lockstep.cli.run_limits import limits_of, measured_limits
from lockstep.doctor.check_result import CheckResult
from lockstep.errors import InputError
from lockstep.planning.model import Link, RunCosts, predict_step
from lockstep.planning.start import ProbeRequest
from lockstep.recipes.parts import Checkpoints
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.towers.towers import Precision, Towers
from lockstep.types import Interval

ROOT = Path(__file__).parent.parent.parent
GB = 10**9
COSTS = make_costs()
RECIPE = find("mnist")


def look(costs: RunCosts, recipe: Recipe = RECIPE, usable: int = 8 * GB) -> dict[str, CheckResult]:
    found = limits_of("mine.toml", recipe, costs, predict_step(costs, recipe, 2), usable)
    return {each.checked: each for each in found}


def with_cost(**changes: float) -> RunCosts:
    return replace(COSTS, workers=(replace(COST, **changes),))  # type: ignore[arg-type]


def test_compute_as_the_limit_is_good_and_says_what_would_be_faster() -> None:
    found = look(COSTS)
    assert list(found) == ["step", "compute", "input", "update", "exchange", "save", "memory of the run", "time"]
    assert {each.verdict for each in found.values()} == {"OK"}
    assert found["step"].found == "113 ms on 2 workers, 1133 examples/s: compute is the limit"
    assert found["compute"].numbers["share"] == pytest.approx(0.1 / 0.113)
    assert "lockstep plan mine.toml" in found["compute"].mend
    assert [name for name, each in found.items() if each.mend] == ["compute"]


@pytest.mark.parametrize(
    ("seconds", "precision", "said"),
    [
        (0.1, "fp32", "towers.precision=bf16"),
        (0.1, "bf16", "(lockstep plan mine.toml says how much)"),
        (0.004, "fp32", "a larger batch_size"),
    ],
)
def test_what_makes_a_step_on_a_gpu_faster(seconds: float, precision: Precision, said: str) -> None:
    on_gpu = replace(with_cost(first_seconds=seconds, update_seconds=0.001), is_cpu=False, messages=Link(0.0, 1e-10))
    found = look(on_gpu, replace(RECIPE, towers=Towers(precision=precision)))["compute"]
    assert (found.verdict, found.lines()[1].startswith("       advice: ")) == ("OK", True)
    assert said in found.mend
    assert ("bf16" in found.mend) == (said == "towers.precision=bf16")


@pytest.mark.parametrize(
    ("part", "costs", "mend"),
    [
        ("input", with_cost(input_seconds=0.3), "lockstep benchmark input mine.toml"),
        ("input", replace(with_cost(input_seconds=0.3), reads_ahead=True), "lockstep benchmark input mine.toml"),
        ("update", with_cost(update_seconds=0.3), "a larger batch_size"),
        ("exchange", replace(COSTS, shared_memory=Link(0.2, 1e-10)), "lockstep plan mine.toml"),
    ],
)
def test_another_limit_is_a_warning_with_what_to_change(part: str, costs: RunCosts, mend: str) -> None:
    found = look(costs)
    assert [name for name, each in found.items() if each.verdict == "warn"] == [part]
    assert mend in found[part].mend
    assert found["step"].found.endswith(f": {part} is the limit")


def test_an_exchange_that_takes_much_of_a_step_is_a_warning_though_compute_takes_more() -> None:
    found = look(replace(COSTS, shared_memory=Link(0.05, 1e-10)))
    assert (found["step"].found.endswith("compute is the limit"), found["exchange"].verdict) == (True, "warn")


def test_one_worker_sends_nothing() -> None:
    [found] = [
        each
        for each in limits_of("mnist", RECIPE, COSTS, predict_step(COSTS, RECIPE, 1), 8 * GB)
        if each.checked == "exchange"
    ]
    assert (found.verdict, found.found) == ("OK", "0 ms, 0 % of a step: of one worker, which sends nothing")


def test_cores_that_are_too_few_are_told() -> None:
    busy = replace(with_cost(input_cpu_seconds=0.5), num_cores=2, reads_ahead=True)
    found = look(busy)["step"]
    assert (found.verdict, "the cores, too few for all that computes, are the limit" in found.found) == ("warn", True)


@pytest.mark.parametrize(
    ("every", "verdict"),
    [
        (Interval(1), "warn"),
        (Interval(1000), "OK"),
        (Interval(600, "seconds"), "OK"),
        (Interval(0.1, "epochs"), "warn"),
    ],
)
def test_saves_that_are_not_done_when_the_next_one_begins(every: Interval, verdict: str) -> None:
    found = look(COSTS, replace(RECIPE, checkpoints=Checkpoints(every=every)))["save"]
    assert (found.verdict, "checkpoints.every" in found.mend) == (verdict, verdict == "warn")
    assert found.found.startswith("26.0 MB, safe after 500 ms; steps wait 10 ms")


def test_a_run_that_saves_at_its_end_alone() -> None:
    found = look(COSTS, replace(RECIPE, checkpoints=Checkpoints(every=Interval(0))))["save"]
    assert (found.verdict, found.numbers["share"]) == ("OK", 0.0)
    assert all(math.isfinite(number) for number in found.numbers.values())


@pytest.mark.parametrize(("usable", "verdict"), [(8 * GB, "OK"), (950_000_000, "warn"), (GB // 2, "fails")])
def test_memory_of_all_workers_of_a_host(usable: int, verdict: str) -> None:
    found = look(COSTS, usable=usable)["memory of the run"]
    assert (found.verdict, found.numbers["bytes"]) == (verdict, 2 * found.numbers["bytes_a_worker"])


def test_on_accelerators_each_worker_has_its_own_memory() -> None:
    found = look(replace(COSTS, is_cpu=False, shared_memory=None, messages=Link(1e-4, 1e-10)), usable=450_000_000)
    assert found["memory of the run"].verdict == "warn"
    assert found["memory of the run"].numbers["bytes"] == 436_000_000


def test_what_the_probe_says_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: ProbeRequest) -> RunCosts:
        raise InputError("It cannot be.", given="this", expected="that", hint="another one")

    answers = {"fails": lambda _: 1, "warn": refuse}
    for verdict, answer in answers.items():
        monkeypatch.setattr(run_limits, "probe_on_workers", answer)
        [found] = measured_limits("mnist", RECIPE, 2, 1.0)
        assert (found.checked, found.verdict) == ("measurement", verdict)
    monkeypatch.setattr(run_limits, "probe_on_workers", lambda _: 130)
    with pytest.raises(KeyboardInterrupt):
        list(measured_limits("mnist", RECIPE, 2, 1.0))


def test_the_command_asks_for_the_workers_that_would_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[ProbeRequest] = []
    monkeypatch.setattr(run_limits, "probe_on_workers", lambda request: asked.append(request) or COSTS)
    monkeypatch.setattr("lockstep.doctor.libraries.library_results", lambda: iter([CheckResult("torch", "2.13")]))
    monkeypatch.setattr("lockstep.cli.doctor._try_start", lambda run, workers: "from step 0")
    words = ["doctor", "mnist", "--workdir", "none", "--workers", "2", "--device", "cpu", "--seconds", "7", "--json"]
    assert main(words) == 0
    [request] = asked
    assert (request.num_workers, request.per_host, request.seconds) == ((2,), 2, 7.0)
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [each["checked"] for each in findings][-8:] == list(look(COSTS))
    assert main(["doctor", "--seconds", "-1"]) == 2
    assert "--seconds -1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.process
def test_a_recipe_is_measured(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)  # where data/mnist is
    assert main(["doctor", "mnist", "--workdir", "none", "--device", "cpu", "--seconds", "2", "--json"]) == 0
    findings = {each["checked"]: each for each in json.loads(capfd.readouterr().out)["findings"]}
    assert findings["step"]["numbers"]["seconds"] > 0
    assert 0 < findings["compute"]["numbers"]["share"] <= 1
    assert findings["save"]["numbers"]["bytes"] > 10_000_000
