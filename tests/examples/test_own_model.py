"""`own_model.py` as a user runs it, and that its hand-written twin is the same training."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep as ls
from lockstep.checkpoints import Store

pytestmark = pytest.mark.process

STEPS = 20
LOCKSTEP, BY_HAND = "own_model.py", "own_model_plain_torch.py"


@pytest.fixture(scope="module")
def two_workers(examples: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    workdir = tmp_path_factory.mktemp("two_workers")
    return examples.run(LOCKSTEP, examples.on_two_workers, workdir, "--steps", str(STEPS)), workdir


def loss_at(said: list[str], step: int) -> float:
    (line,) = [line for line in said if line.startswith(f"step {step}: loss")]
    return float(line.split("loss ")[1].split(",")[0])


def accuracy(said: list[str]) -> float:
    found = re.fullmatch(rf"step {STEPS}: test accuracy (\d+\.\d\d)% of 10000", said[-1])
    assert found, said
    return float(found[1])


def test_it_learns_and_only_the_chief_speaks(two_workers: tuple[list[str], Path]) -> None:
    (first, *said), _ = two_workers
    assert first.startswith("2 towers on 2 workers (cpu")
    assert [line.split(":")[0] for line in said] == ["step 10", "step 20", "step 20"]
    assert loss_at(said, 20) < 0.7
    assert accuracy(said) > 80


@pytest.mark.slow
def test_stopped_and_resumed_alone_it_ends_as_on_two_workers(
    examples: Any, tmp_path: Path, two_workers: tuple[list[str], Path]
) -> None:
    expected, workdir = two_workers
    examples.run(LOCKSTEP, examples.alone, tmp_path, "--steps", "7")
    said = examples.run(LOCKSTEP, examples.alone, tmp_path, "--steps", str(STEPS))
    assert said[-1] == expected[-1]
    assert examples.checkpoint(tmp_path, STEPS) == examples.checkpoint(workdir, STEPS)


@pytest.mark.slow
def test_the_same_command_again_does_no_step(examples: Any, two_workers: tuple[list[str], Path]) -> None:
    said, workdir = two_workers
    before = examples.checkpoint(workdir, STEPS)
    resumed, *others = examples.run(LOCKSTEP, examples.alone, workdir, "--steps", str(STEPS))
    assert resumed.startswith(f"resumed at step {STEPS}")
    assert [line for line in others if line.startswith("step")] == said[-1:]
    assert examples.checkpoint(workdir, STEPS) == before


@pytest.mark.slow
def test_the_twin_runs_on_two_workers_and_resumes(
    examples: Any, tmp_path: Path, two_workers: tuple[list[str], Path]
) -> None:
    examples.run(BY_HAND, examples.alone, tmp_path, "--steps", "4")
    said = examples.run(BY_HAND, examples.under_torchrun, tmp_path, "--steps", str(STEPS))
    # Other batches, and both nets have learned as much.
    assert loss_at(said, 10) == pytest.approx(loss_at(two_workers[0], 10), abs=0.2)
    assert accuracy(said) == pytest.approx(accuracy(two_workers[0]), abs=5)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lockstep_batches(data: dict[str, Tensor], step: int, here: object) -> Iterator[dict[str, Tensor]]:
    return ls.data.Loader(ls.data.Arrays(data), batch_size=128).batches(range(1), 1)


def test_given_the_same_batches_the_twin_learns_the_same(
    examples: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, twin = load(examples.folder / LOCKSTEP), load(examples.folder / BY_HAND)
    steps = ["--steps", str(STEPS)]
    monkeypatch.setattr(twin, "batches", lockstep_batches)
    monkeypatch.setattr(sys, "argv", [BY_HAND, "--workdir", str(tmp_path), *steps])
    twin.main()
    by_hand = capsys.readouterr().out.splitlines()
    monkeypatch.setattr(sys, "argv", [LOCKSTEP, "--workdir", str(tmp_path), *steps, "--towers", "1"])
    ours.main()
    said = capsys.readouterr().out.splitlines()

    assert loss_at(said, 10) == pytest.approx(loss_at(by_hand, 10), abs=2e-4)
    assert accuracy(said) == pytest.approx(accuracy(by_hand), abs=0.1)
    checkpoint = Store(tmp_path / "checkpoints").read()
    assert checkpoint
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    found = {**checkpoint.tensors["parameters"], **checkpoint.tensors["buffers"]}
    assert found.keys() == saved["model"].keys()
    for name, value in found.items():
        torch.testing.assert_close(value, saved["model"][name])
    for name, value in checkpoint.tensors["average"].items():
        torch.testing.assert_close(value, saved["average"][name])


def test_what_is_the_same_in_both_is_written_the_same(examples: Any) -> None:
    ours, twin = (definitions(examples.folder / name) for name in (LOCKSTEP, BY_HAND))
    assert all(ours[name] == twin[name] for name in ("read", "Net"))
    assert [name for name in twin if name in ours] == list(ours), "the order is the same"


def definitions(path: Path) -> dict[str, str]:
    body = ast.parse(path.read_text()).body
    return {each.name: ast.unparse(each) for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
