"""The public door: every name is there, documented, and costs nothing until it is used."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import lockstep

PUBLIC = [
    "AllReduce",
    "Alone",
    "BadExample",
    "Batch",
    "CheckpointError",
    "DataError",
    "Epochs",
    "Evaluation",
    "Hours",
    "InTurn",
    "InputError",
    "Interval",
    "LockstepError",
    "LossAverage",
    "NonFiniteError",
    "PeerLostError",
    "PreciseStatistics",
    "Progress",
    "RecipeError",
    "NonFiniteReport",
    "Result",
    "Saver",
    "StepReport",
    "Steps",
    "Towers",
    "TrainState",
    "WorkdirError",
    "Worker",
    "WorkerError",
    "batches",
    "data",
    "evaluate",
    "every",
    "images",
    "initialize",
    "join",
    "losses",
    "metrics",
    "models",
    "optim",
    "recipes",
    "records",
    "resume",
    "rollback",
    "run",
    "save",
    "train",
    "train_step",
    "train_steps",
    "warm_start",
    "weights",
]


def test_the_public_names_are_these() -> None:
    assert sorted(lockstep.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_loads_and_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(lockstep, name))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lockstep.nothing  # noqa: B018


@pytest.mark.parametrize("name", lockstep.recipes.__all__)
def test_each_name_of_recipes_loads_and_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(lockstep.recipes, name))
    assert name in dir(lockstep.recipes)


def test_an_unknown_name_of_recipes_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'lockstep\.recipes' has no attribute 'nothing'"):
        lockstep.recipes.nothing  # noqa: B018


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split())


def test_importing_loads_no_torch() -> None:
    assert not {"torch", "numpy", "pydantic", "rich"} & modules_after("import lockstep")


def test_help_loads_no_torch() -> None:
    loaded = modules_after("from lockstep.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass")
    assert not {"torch", "numpy", "pydantic"} & loaded


def test_importing_does_nothing() -> None:
    code = """
import logging, os, signal, threading
import torch
before = dict(os.environ), list(logging.root.handlers), threading.active_count(), signal.getsignal(signal.SIGINT)
stream = torch.get_rng_state()
import lockstep
for name in lockstep.__all__: getattr(lockstep, name)
for name in lockstep.recipes.__all__: getattr(lockstep.recipes, name)
import lockstep.cli.main, lockstep.reporting.console, lockstep.recipes.shipped, lockstep.parallel.launch
after = dict(os.environ), list(logging.root.handlers), threading.active_count(), signal.getsignal(signal.SIGINT)
assert before == after, (before, after)
assert not logging.getLogger("lockstep").handlers
assert torch.equal(stream, torch.get_rng_state())
"""
    subprocess.run([sys.executable, "-c", code], check=True)
