"""The page for those who come from other trainers: its names exist, its values can be made, its code runs."""

from __future__ import annotations

import importlib
import re
import sys
from functools import reduce
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.cli.main import parse
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.training.attempt import Attempt

PAGE = (Path(__file__).parent.parent / "docs" / "reference" / "coming-from.md").read_text()
CODE = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
ROWS = re.findall(r"^\|.*\|(.*)\|$", PAGE, re.MULTILINE)
HERE = sorted({code for row in ROWS for code in re.findall(r"`([^`]+)`", row)})
"""What the right columns of the tables quote."""
VALUES = [
    code
    for code in HERE
    if re.match(r"ls\.(optim|images)\.\w+\(|ls\.(?!TrainState)[A-Z]\w+\(\w|lambda ", code) and "..." not in code
]
FIELDS = [code for code in HERE if re.match(rf"({'|'.join(vars(find('mnist')))})\b", code) and "ls." not in code]


def test_all_names_exist() -> None:
    names = set(re.findall(r"\bls(?:\.\w+)+", PAGE))
    assert len(names) > 45
    for name in names:
        reduce(getattr, name.split(".")[1:], ls)
    below = re.findall(r"((?:`\w+`(?:, | and )?)+) of `(lockstep\.[\w.]+)`", PAGE)
    assert below
    for quoted, module in below:
        for name in re.findall(r"`(\w+)`", quoted):
            assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("code", VALUES)
def test_values_can_be_made(code: str) -> None:
    given = {"schedule": 0.1, "p": 0.5, "size": 224, "scale": (0.1, 1.0), "ratio": (0.8, 1.2), "resize": "area"}
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(8)}), batch_size=4)
    eval(code, {"ls": ls, "torch": torch, "loader": loader, **given})


@pytest.mark.parametrize("code", FIELDS)
def test_fields_of_recipes_are_there(code: str) -> None:
    recipe = with_settings(find("flowers"), ["data.preprocessing.kind=resized_crop"])
    path, _, value = code.partition("=")
    if value:
        with_settings(recipe, [f"{path.strip()}={value.strip()}"])
    else:
        reduce(getattr, path.split("."), recipe)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Linear(4, 4)
        self.fc = nn.Linear(4, 4)


@pytest.mark.parametrize("code", [c for c in FIELDS if re.match(r"(optimizer|average|gradient_transforms)\b.*=", c)])
def test_updates_of_recipes_are_made(code: str) -> None:
    path, _, value = code.partition("=")
    recipe = with_settings(find("flowers"), [f"{path.strip()}={value.strip()}"])
    model = Net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    transforms = recipe.gradient_transforms
    state = ls.TrainState(model, recipe.optimizer, gradient_transforms=transforms, average=recipe.average)
    state.resolve(1000, 10)
    state.apply(Attempt([torch.ones_like(parameter) for parameter in before], (), {"loss": 1.0}))
    assert state.step == 1
    for parameter, value_before in zip(model.parameters(), before, strict=True):
        assert not torch.equal(parameter, value_before)


@pytest.mark.parametrize("flags", [code for code in HERE if code.startswith("--")])
def test_flags_are_understood(flags: str) -> None:
    parse(["train", "mnist", *flags.split()])


@pytest.mark.process
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Path] = []
    logged: list[tuple[int, dict[str, float]]] = []
    wandb = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    run = SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), log_artifact=kept.append, finish=lambda exit_code: None
    )
    settings = SimpleNamespace(mode="offline")
    vars(wandb).update(setup=lambda: SimpleNamespace(settings=settings), init=lambda **_: run, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    train, other = ({"image": torch.randn(1024, 1, 4, 4), "label": torch.randint(3, (1024,))} for _ in range(2))
    given: dict[str, Any] = {
        "model": nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        "reader": ls.data.Arrays(train),
        "dataset": torch.utils.data.TensorDataset(*train.values()),
        "held_out": ls.data.Loader(ls.data.Arrays(other), batch_size=256),
    }
    exec(CODE, given)
    assert [(step, "losses/cross_entropy" in values, "top1" in values) for step, values in logged] == [
        (4, True, False), (4, False, True),
    ]  # fmt: skip
    assert kept == [Path("runs/mine")]
    assert (tmp_path / "runs/mine/checkpoints").is_dir()
    assert given["loader"].position == 6 * 1024
    assert given["model"].rate < 0.1
