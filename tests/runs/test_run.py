"""A script of a user's own that trains by a recipe: alone, on two workers, resumed, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import own_script
import pytest
import torch
from own_script import TEST, stripes
from worker_processes import HANG_SECONDS

import lockstep as ls
from lockstep.cli import train
from lockstep.recipes.recipe import Recipe
from lockstep.runs.run import Run
from lockstep.runs.segment import RunEvent
from lockstep.workers import stragglers
from lockstep.workers.rank import leave

SCRIPT = Path(__file__).parent / "own_script.py"


def run_script(workdir: Path, steps: int, num_workers: int) -> str:
    """What the script prints under the launcher."""
    command = ["-m", "lockstep", "run", "--workers", num_workers, SCRIPT, workdir, steps]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=HANG_SECONDS, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


STUCK = """
import threading
from dataclasses import replace

import numpy as np
import own_script

import lockstep as ls

class Stuck(ls.data.Arrays):
    num_reads = 0

    def read_batch(self, indices):
        self.num_reads += 1
        if self.num_reads == 6:
            threading.Event().wait()
        return super().read_batch(indices)

def stripes(split):
    reader = own_script.stripes(split)
    return Stuck(reader.read_batch(np.arange(own_script.TRAIN))) if split == "train" else reader

recipe = ls.recipes.find("mnist")
ls.run(
    replace(
        recipe,
        model=ls.models.LeNet(num_classes=2),
        data=ls.recipes.ImageData(image_size=28, preprocessing=ls.recipes.preprocessing.Lenet()),
        optimizer=ls.optim.SGD(0.01),
        batch_size=8,
        num_towers=1,
        end=ls.Steps(20),
        device="cpu",
        nonfinite="stop",
        watch=replace(recipe.watch, hang_seconds=10.0, probe_memory=False),
    ),
    None,
    reader=stripes,
)
"""


@pytest.mark.slow
@pytest.mark.process
def test_how_long_the_recipe_of_a_script_lets_its_workers_stand_still(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    command = [sys.executable, "-m", "lockstep", "run", "--workers", "1", "--device", "cpu", str(tmp_path / "stuck.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, env=environment, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "(phase data) for 15 s, and was killed" in done.stderr
    assert "The limit in this phase is 15 s, 1.5 times watch.hang_seconds" in done.stderr
    assert "in read_batch" in done.stderr, "its stack is shown before"


def recipe_of(workdir: Path) -> str:
    return (workdir / "recipe.toml").read_text()


def contents(workdir: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"result": json.loads((workdir / "result.json").read_text())}
    del found["result"]["times"]
    newest = max((workdir / "checkpoints").iterdir())
    return found | {path.name: path.read_bytes() for path in newest.iterdir() if path.name != "manifest.json"}


@pytest.mark.slow
@pytest.mark.process
def test_a_script_alone_is_a_script_resumed_on_two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_alone(workdir: Path, steps: int) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(workdir), str(steps)])
        own_script.main()
        return capsys.readouterr().out

    alone, resumed = tmp_path / "alone", tmp_path / "resumed"
    said = run_alone(alone, 6)
    assert said.startswith(f"end 6 test {TEST} ")
    run_alone(resumed, 4)
    assert run_script(resumed, 6, num_workers=2) == said
    assert contents(resumed) == contents(alone)
    assert set(contents(alone)["result"]["evaluations"]["test"]["scores"]) == {"top1", "margin"}
    events = [json.loads(line) for line in (resumed / "history.jsonl").read_text().splitlines()]
    assert [(line["event"], line["workers"]) for line in events] == [
        ("start", 1),
        ("end", 1),
        ("resume", 2),
        ("end", 2),
    ]
    with pytest.raises(ls.InputError) as raised:
        train.plan_train(["train", str(resumed / "recipe.toml"), "--workdir", str(resumed)])
    assert raised.value.what == "stripes is a part of the script of this run, which alone can call it."


@pytest.fixture
def own() -> Recipe:
    return replace(
        ls.recipes.find("mnist"),
        model=ls.models.LeNet(num_classes=2),
        data=ls.recipes.ImageData(image_size=28, preprocessing=ls.recipes.preprocessing.Lenet()),
        batch_size=8,
        end=ls.Steps(1),
    )


def test_the_recipe_of_the_run_goes_by_the_names_of_the_library(tmp_path: Path, own: Recipe) -> None:
    result = ls.run(own, tmp_path, reader=stripes)
    assert (result.step, result.reason, result.split) == (1, "end", "test")
    assert re.search(r'function = ".*own_script:stripes in .*/own_script.py, source \w{16}"', recipe_of(tmp_path))


def test_another_function_is_another_recipe(tmp_path: Path, own: Recipe) -> None:
    def other(split: str) -> ls.data.Reader | None:
        return stripes(split)

    ls.run(own, tmp_path, reader=stripes)
    with pytest.raises(ls.WorkdirError, match=r"data\.function\.name: saved 'stripes', given .*other'"):
        ls.run(own, tmp_path, reader=other)
    assert ls.run(own, tmp_path, reader=other, accept_changes=True).step == 1


def sized(count: int, split: str) -> ls.data.Reader | None:
    return stripes(split) if count else None


@pytest.mark.parametrize("reader", [partial(sized, 1), partial(partial(sized, 1))])
def test_a_function_with_some_arguments_given_goes_by_its_name(
    tmp_path: Path, own: Recipe, reader: partial[ls.data.Reader | None]
) -> None:
    ls.run(own, tmp_path, reader=reader)
    assert ":sized(...) in " in recipe_of(tmp_path)


def test_a_function_is_asked_once_whatever_the_stages(tmp_path: Path, own: Recipe) -> None:
    asked = []

    def reader(split: str) -> ls.data.Reader | None:
        asked.append(split)
        return stripes(split)

    staged = replace(own, end=None, stages=(ls.recipes.Stage(ls.Steps(1)),) * 3)
    assert ls.run(staged, tmp_path, reader=reader).step == 3
    assert sorted(asked) == ["test", "train", "validation"]


@pytest.mark.parametrize("given", [[1, 2], "photos", 3])
def test_a_function_that_gives_no_reader(tmp_path: Path, own: Recipe, given: Any) -> None:
    with pytest.raises(ls.InputError, match=r"expected: .*a reader: it has a length, and read"):
        ls.run(own, tmp_path, reader=lambda split: given)
    assert not list(tmp_path.iterdir())


class Signalling:
    """A reader that sends this process a signal as it is read."""

    cost = "memory"

    def __init__(self, inner: ls.data.Reader) -> None:
        self._inner = inner
        self.example_id = inner.example_id

    def __len__(self) -> int:
        return len(self._inner)

    def read_batch(self, indices: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return self._inner.read_batch(indices)


def test_a_signal_ends_the_run_of_a_script_after_its_step(tmp_path: Path, own: Recipe) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the signal comes to the script")

    def reader(split: str) -> Any:
        given = stripes(split)
        return given and Signalling(given)

    leave()
    before = signal.signal(signal.SIGTERM, refuse)
    try:
        result = ls.run(replace(own, end=ls.Steps(9)), tmp_path, reader=reader)
        assert signal.getsignal(signal.SIGTERM) is refuse
    finally:
        signal.signal(signal.SIGTERM, before)
        leave()
    assert (result.step, result.reason) == (1, "stopped")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000000", "step-00000001"]
    assert not (tmp_path / "result.json").exists()


def test_another_thread_may_run(tmp_path: Path, own: Recipe) -> None:
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(ls.run, own, tmp_path, reader=stripes).result().reason == "end"


def on_two_workers(own: Recipe, counts: dict[str, list[int]]) -> str:
    rank = ls.join("cpu").rank

    def reader(split: str) -> ls.data.Reader | None:
        count = counts[split][rank]
        images = torch.zeros(count, 1, 28, 28, dtype=torch.uint8)
        return ls.data.Arrays({"image": images, "label": torch.zeros(count).long()}) if count else None

    off = {"checkpoints": ls.recipes.Checkpoints(ls.Interval(0))}
    watch = ls.recipes.Monitoring(ls.Interval(0), ls.Interval(0), ls.Interval(0))
    try:
        recipe = replace(own, **off, watch=watch, seed=counts["seed"][rank])
        return ls.run(recipe, None, reader=reader).reason
    except ls.WorkerError as error:
        return f"{error.what} {error.given}"


@pytest.mark.process
@pytest.mark.parametrize(
    ("differing", "what", "said"),
    [
        pytest.param(
            {"train": [8, 16]},
            "the numbers of examples",
            "to train on: 16 instead of 8",
            marks=pytest.mark.slow,
        ),
        (
            {"validation": [4, 0]},
            "the numbers of examples",
            '{"to train on": 8} instead of {"to train on": 8, "validation": 4}',
        ),
        ({"seed": [0, 3]}, "the recipe", "seed: 3 instead of 0"),
    ],
    ids=["more of them", "none of them", "another recipe"],
)
def test_workers_with_other_examples_or_recipes_are_refused(
    own: Recipe, run_workers: Callable[..., list[Any]], differing: dict[str, list[int]], what: str, said: str
) -> None:
    """They would wait for one another, or train on batches that do not belong together."""
    counts = {"train": [8, 8], "validation": [4, 4], "test": [0, 0], "seed": [0, 0], **differing}
    told = f"The workers do not agree on {what}: worker 1 differs. worker 1: {said}"
    assert run_workers(on_two_workers, 2, own, counts) == [told] * 2


def test_best_checkpoints_need_examples_to_validate(tmp_path: Path, own: Recipe) -> None:
    best = ls.recipes.Checkpoints(retention=ls.recipes.Retention(best="validation/top1"))
    with pytest.raises(ls.InputError, match="Nothing would say which checkpoints are the best"):
        ls.run(replace(own, checkpoints=best), tmp_path, reader=stripes)
    assert not list(tmp_path.iterdir())


def test_a_function_without_examples_to_train_on(tmp_path: Path, own: Recipe) -> None:
    with pytest.raises(ls.DataError) as raised:
        ls.run(own, tmp_path, reader=lambda split: None)
    assert str(raised.value) == (
        "The function of this run gives no train examples.\n"
        f"  given:    {__name__}:test_a_function_without_examples_to_train_on.<locals>.<lambda>('train') is None\n"
        "  expected: a reader\n"
        "  hint:     return a reader for 'train'"
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"recipe": "mnist"}, "expected: a Recipe\n"),
        ({"reader": 3}, "expected: a function of the split that returns a reader\n"),
        ({"recipe": ls.recipes.find("mnist")}, "A function can give no examples to MnistData."),
    ],
)
def test_what_cannot_be_run(tmp_path: Path, own: Recipe, wrong: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"recipe": own, "reader": stripes, **wrong}
    with pytest.raises(ls.InputError) as raised:
        ls.run(given["recipe"], tmp_path, reader=given["reader"])
    assert message in str(raised.value)


def test_an_exchange_that_does_not_fit_is_refused_before_the_run_is_written(tmp_path: Path, own: Recipe) -> None:
    synchronised = replace(own, towers=ls.Towers(batch_norm="sync"), exchange=ls.AllReduce(exact=True))
    with pytest.raises(ls.InputError, match="Synchronised batch norm cannot be exact"):
        ls.run(synchronised, tmp_path, reader=stripes)
    assert not (tmp_path / "recipe.toml").exists()
    assert not (tmp_path / "history.jsonl").exists()


class _SlowOnWorker1(ls.data.Arrays):
    def read_batch(self, indices: Any) -> Any:
        time.sleep(0.03 * ls.join().rank)
        return super().read_batch(indices)


def told_with_a_slow_reader(own: Recipe) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    logging.getLogger("lockstep").setLevel(logging.INFO)

    def reader(split: str) -> ls.data.Reader | None:
        images = torch.zeros(8, 1, 28, 28, dtype=torch.uint8)
        return _SlowOnWorker1({"image": images, "label": torch.zeros(8).long()}) if split == "train" else None

    ls.join("cpu")
    stragglers.LEAST_SECONDS = 0.1
    ls.run(replace(own, batch_size=4, end=ls.Steps(12)), None, reader=reader)
    return [line for line in lines if "slowest" in line]


@pytest.mark.slow
@pytest.mark.process
def test_the_worker_that_the_other_one_has_waited_for_is_told_at_the_end(
    own: Recipe, run_workers: Callable[..., list[Any]]
) -> None:
    (told,), others = run_workers(told_with_a_slow_reader, 2, own)
    assert told.startswith("worker 1 is the slowest: input takes it 0.0")
    assert others == []


def test_what_a_worker_did_alone_is_not_counted_among_those_that_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.__new__(Run)
    pulse = SimpleNamespace(seconds={"compute": 5.0})
    segments = [SimpleNamespace(run=lambda *_, r=r: r, must_regroup=r is None, history={}) for r in (None, "end")]
    run._worker = SimpleNamespace(pulse=pulse)  # type: ignore[assignment]
    run._has_gone_back = False
    monkeypatch.setattr(Run, "step", 7)
    monkeypatch.setattr(run, "_segment", lambda: segments.pop(0))

    def regroup() -> None:
        pulse.seconds = {"compute": 30.0}

    monkeypatch.setattr(run, "_regroup", regroup)
    monkeypatch.setattr(run, "_begin", lambda: RunEvent("start"))
    monkeypatch.setattr(run, "_go_on", lambda regrouped: RunEvent("join"))
    run._train(None)
    assert run._together_since == (7, {"compute": 30.0})
