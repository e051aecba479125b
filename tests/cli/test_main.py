"""The commands by their help: what it lists; and that helps and recipes load no torch."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import COMMANDS, main, parse
from lockstep.cli.train import SHIPPED_RECIPES
from lockstep.errors import InputError
from lockstep.recipes.shipped import names


def test_the_help_of_train_lists_all_shipped_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(SHIPPED_RECIPES) == names()
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    said = capsys.readouterr().out.replace(",", " ").replace(")", " ").split()
    assert {*SHIPPED_RECIPES} <= {*said}


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["--version"], ["train", "mnist", "--print-recipe"]]
)
def test_nobody_who_reads_is_no_error(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(words) == 141


@pytest.mark.process
def test_the_error_that_ends_a_command_is_there_for_who_leaves_the_run() -> None:
    assert main(["train", "mnits"]) == 2
    assert isinstance(sys.last_value, InputError)
    assert "mnits" in str(sys.last_value)


@pytest.mark.process
def test_ctrl_c_ends_python_m_with_130_where_it_broke_off_an_exec_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("""
import sys
class Interrupted:
    def find_spec(name, *_):
        if name == "lockstep.cli.main":
            exec("raise KeyboardInterrupt")
sys.meta_path.insert(0, Interrupted)
""")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run([sys.executable, "-m", "lockstep"], env=os.environ | {"PYTHONPATH": path})
    assert ended.returncode == 130


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


@pytest.mark.process
def test_what_is_not_there_is_refused_without_torch(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints/step-00000002").mkdir(parents=True)
    code = f"""
import sys
from lockstep.cli.main import main
assert main(["train", "mnist", "--print-recipe"]) == 0
for words in [
    "evaluate nowhere", "evaluate nowhere --interval 3", "evaluate {run}@3", "evaluate {run} --to result.txt",
    "evaluate {run} --split all", "evaluate {run}@2 --best", "evaluate {run}@2 --set optimizer.lr.initial=1",
    "predict nowhere photos --to out", "predict {run}@3 photos --to out", "predict {run} photos --to out --top none",
    "export nowhere --to model.pt2", "export {run}@3 --to model.pt2", "export {run} --to model.txt",
    "inspect nowhere", "inspect {run}@3",
    "show nowhere --to page.html", "show nowhere.toml --to page.html", "show mnist --to page.txt",
    "benchmark input nowhere", "benchmark input mnist --seconds 0", "benchmark input mnist --augment vgg",
]:
    assert main(words.split()) == 2, words
    assert "torch._C" not in sys.modules, words
"""
    recipe = [sys.executable, "-m", "lockstep", "train", "mnist", "--print-recipe"]
    (run / "recipe.toml").write_bytes(subprocess.run(recipe, check=True, stdout=subprocess.PIPE).stdout)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)


def test_all_commands_but_run_can_be_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOCKSTEP_QUIET", "")
    assert main(["explain", "batchsize", "--quiet"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert os.environ["LOCKSTEP_QUIET"] == "1"
    of_run = {name: COMMANDS[name].has_quiet for name in COMMANDS}
    assert [name for name, has_quiet in of_run.items() if not has_quiet] == ["run"]
    for words in ["train x", "status", "convert images x --to y", "import checkpoint x --to y", "benchmark input x"]:
        assert parse([*words.split(), "--quiet"]).quiet, words
    assert parse(["run", "script.py", "--", "--quiet"]).arguments == ["--quiet"]


def test_quiet_may_stand_before_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_QUIET", "")
    given: list[Any] = []

    def note(_: object, argv: Sequence[str]) -> int:
        given.append((argv, os.environ["LOCKSTEP_QUIET"]))
        return 0

    for name in ("recipes", "run"):
        command = COMMANDS[name]._replace(
            run=lambda arguments, argv: given.append((argv, os.environ["LOCKSTEP_QUIET"])) or 0
        )
        monkeypatch.setitem(COMMANDS, name, command)
    assert main(["--quiet", "recipes", "--json"]) == main(["--quiet", "run", "train.py"]) == 0
    assert given == [(["recipes", "--json"], "1"), (["run", "train.py"], "1")], "workers parse it without --quiet"


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["lockstep.cli.main.parse", "lockstep.cli.main.show_log"])
def test_ctrl_c_at_any_moment_ends_a_command_quietly(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(where, interrupt)
    monkeypatch.setattr(sys, "argv", ["lockstep", "inspect", "nowhere"])
    with pytest.raises(SystemExit, match="130"):
        runpy.run_module("lockstep", run_name="__main__")
    assert main(["inspect", "nowhere"]) == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_during_the_imports_ends_a_command_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "lockstep.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "lockstep.cli.main")
    monkeypatch.delattr("lockstep.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit, match="130"):
        runpy.run_module("lockstep", run_name="__main__")
