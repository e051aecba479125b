"""The commands by their help: what it lists; and that helps and recipes load no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.cli.main import COMMANDS, main
from lockstep.cli.train import SHIPPED_RECIPES
from lockstep.recipes.shipped import names


def test_the_help_of_train_lists_all_shipped_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(SHIPPED_RECIPES) == names()
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    said = capsys.readouterr().out.replace(",", " ").replace(")", " ").split()
    assert {*SHIPPED_RECIPES} <= {*said}


@pytest.mark.process
def test_the_help_of_every_command_loads_no_torch() -> None:
    code = f"""
import sys
from lockstep.cli.main import main
for command in {list(COMMANDS)}:
    try: main([command, "--help"])
    except SystemExit as end: assert not end.code
assert not {{"torch", "numpy"}} & {{*sys.modules}}
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.process
def test_recipes_are_printed_and_refused_without_torch() -> None:
    code = f"""
import sys
from lockstep.cli.main import main
for recipe in {names()}:
    assert main(["train", recipe, "--print-recipe", "--set", "evaluate.every=2 epochs"]) == 0
assert main(["train", "mnits"]) == main(["train", "nowhere.toml"]) == 2
assert main(["train", "mnist", "--set", "optimizer.lr.initial=fast"]) == 2
assert main(["train", "mnist", "--set", "nothing=3"]) == 2
assert main(["train", "runs/no_such_run"]) == 2
assert main(["train", "flowers_small", "--set", "data.train=nowhere", "--workdir", "none"]) == 2
loaded = {{"torch._C", "numpy._core", "PIL.Image"}} & {{*sys.modules}}
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
