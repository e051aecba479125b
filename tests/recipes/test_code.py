"""Functions of the user's own in recipes: their names, where they are found, what their fingerprints see, and trust."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from lockstep.description import changes, described
from lockstep.errors import InputError, NotFoundError
from lockstep.recipes.code import Function, fingerprint, functions_of, with_code

WriteModule = Callable[[str, str], Path]


@pytest.fixture
def write_module(tmp_path: Path) -> WriteModule:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        return path

    return write


@pytest.fixture(autouse=True)
def imported() -> Iterator[None]:
    """Forget the modules that a test imports, and the folders that it adds."""
    path, before = sys.path.copy(), {*sys.modules}
    yield
    sys.path[:] = path
    for name in {*sys.modules} - before:
        del sys.modules[name]


def found(text: str, *folders: Path) -> Function:
    return Function.parse(text).found_in(folders)


@pytest.mark.parametrize(
    "text",
    ["my_net:build", "nets.small:Nets.tiny", "my_net:build in /a b/my_net.py, source 0123456789abcdef", "reader",
     "__main__:main.<locals>.<lambda> in /x/run.py", "m:Net(...) in /x/m.py, source 00ff"],
)  # fmt: skip
def test_the_text_of_a_function_is_read_back(text: str) -> None:
    assert str(Function.parse(text)) == text


@pytest.mark.parametrize("text", ["", ":build", "my_net:", "my net:build", "my_net:build()", "a:b\nc", "../net:build"])
def test_what_names_no_function_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="names no function"):
        Function.parse(text)


def test_to_find_a_function_runs_nothing_and_to_call_it_imports_it(write_module: WriteModule, tmp_path: Path) -> None:
    write_module("own_parts_1.py", "ran = open('ran', 'w').close()\ndef build(width=1): return width")
    os.chdir(tmp_path)
    function = found("own_parts_1:build", tmp_path)
    assert (function.file, len(function.source)) == (str(tmp_path / "own_parts_1.py"), 16)
    assert not (tmp_path / "ran").exists()
    assert function(width=3) == 3
    assert (tmp_path / "ran").exists()


def test_a_function_that_nobody_has_allowed_is_not_called(write_module: WriteModule, tmp_path: Path) -> None:
    write_module("own_parts_2.py", "open('ran', 'w').close()\ndef build(): pass")
    os.chdir(tmp_path)
    sys.path.insert(0, str(tmp_path))
    saved = Function.parse(str(found("own_parts_2:build", tmp_path)))
    with pytest.raises(InputError, match="others may have written the run that names it") as raised:
        saved()
    assert "--allow-code" in str(raised.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_parts_3:builder", r"There is no builder in .*own_parts_3.py(.*\n)*.*did you mean \"build\""),
        ("own_parts_8:build", r"There is no module own_parts_8(.*\n)*.*expected: own_parts_8.py in /"),
        ("own_parts_broken:build", r"own_parts_broken.py cannot be read as Python"),
    ],
)
def test_what_is_not_there_is_refused_without_an_import(
    write_module: WriteModule, tmp_path: Path, name: str, said: str
) -> None:
    write_module("own_parts_3.py", "raise SystemExit('it is imported')\ndef build(): pass")
    write_module("own_parts_broken.py", "def build(:")
    with pytest.raises(InputError, match=said):
        found(name, tmp_path)


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (
            "import no_such_library\ndef build(): pass",
            "build",
            "ModuleNotFoundError: No module named",
        ),
        (
            "raise SystemExit('bye')\ndef build(): pass",
            "build",
            r"own_parts_\d+ cannot be imported(.*\n)*.*SystemExit: bye",
        ),
        ("build = 3", "build", "own_parts_[0-9]+:build is no function(.*\n)*.*given: +a int"),
        ("class Net: pass", "Net.small", "own_parts_[0-9]+:Net.small is no function(.*\n)*.*nothing of this name"),
    ],
    ids=["import", "exit", "number", "inner"],
)
def test_what_cannot_be_called_is_told(
    write_module: WriteModule, tmp_path: Path, text: str, name: str, said: str, request: pytest.FixtureRequest
) -> None:
    module = f"own_parts_4{request.node.callspec.indices['text']}"
    write_module(f"{module}.py", text)
    with pytest.raises(InputError, match=said):
        found(f"{module}:{name}", tmp_path)()


def test_another_module_of_the_same_name_is_told(write_module: WriteModule, tmp_path: Path) -> None:
    write_module("shlex.py", "def build(): pass")
    with pytest.raises(InputError, match="Another module is called shlex"):
        found("shlex:build", tmp_path)()


def test_a_function_of_an_installed_package_has_no_fingerprint() -> None:
    function = found("torch.nn:Linear", Path("/nonexistent"))
    assert (function.file, function.source) == ("", "")
    assert function(2, 3).out_features == 3
    with pytest.raises(NotFoundError, match="There is no module tocrh"):
        found("tocrh.nn:Linear", Path("/nonexistent"))


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, split: str) -> float:
        return self.scale


NETS = """
import layers
import parts.first
import parts.second
from layers import Block as B
from . import sibling
WIDTH, DEPTH = 8, 2
OTHER = 3
SETTINGS = {}
SETTINGS.update(rate=1)
for name in ("a", "b"):
    SETTINGS[name] = 6
def helper(): return WIDTH
def build(x, rate=DEPTH):
    "Build it."
    local = x
    return helper(), layers.norm, B, SETTINGS, parts.first.A, local
x = local = 12
def unused(): return OTHER
layers.train(build, steps=10)
"""
LAYERS = """
SIZE = 3
class Block:
    size = SIZE
def norm(): return 1
def elsewhere(): return 2
"""


@pytest.mark.parametrize(
    ("file", "before", "after", "is_seen"),
    [
        ("nets.py", "WIDTH, DEPTH = 8, 2", "WIDTH, DEPTH = 9, 2", True),
        ("nets.py", "return WIDTH", "return WIDTH + 1", True),
        ("nets.py", "return OTHER", "return 7", False),
        ("nets.py", '"Build it."', '"Builds\\n it."', False),
        ("nets.py", "def helper(): return WIDTH", "def helper():  # a comment\n\n    return (WIDTH)", False),
        ("nets.py", "(x, ", "(x, y=1, ", True),
        ("nets.py", "= 12", "= 13", False),
        ("nets.py", "8, 2", "8, 1", True),
        ("layers.py", "SIZE = 3", "SIZE = 4", True),
        ("layers.py", "return 1", "return 5", True),
        ("parts/first.py", "A = 1", "A = 2", True),
        ("nets.py", "rate=1", "rate=2", True),
        ("nets.py", "= 6", "= 7", True),
        ("nets.py", "steps=10", "steps=11", False),
    ],
)  # fmt: skip
def test_the_fingerprint_sees_what_a_function_does(
    write_module: WriteModule, tmp_path: Path, file: str, before: str, after: str, is_seen: bool
) -> None:
    files = {"nets.py": NETS, "layers.py": LAYERS, "parts/first.py": "A = 1", "parts/second.py": "B = 1"}
    for name, text in files.items():
        write_module(name, text)
        write_module(f"new/{name}", text.replace(before, after) if name == file else text)
    first = fingerprint(tmp_path / "nets.py", "build", tmp_path)
    second = fingerprint(tmp_path / "new/nets.py", "build", tmp_path / "new")
    assert (first != second) == is_seen


def test_a_function_that_has_moved_to_a_module_is_the_same() -> None:
    here = Function.of(found)
    moved = Function("my_net", "found", "/elsewhere/my_net.py", here.source)
    assert here == moved
    assert not [*changes("", described(here), described(moved))]


def test_a_package_may_hand_on_all_that_a_module_has(write_module: WriteModule, tmp_path: Path) -> None:
    write_module("own_package_1/__init__.py", "from .nets import *")
    nets = write_module("own_package_1/nets.py", "def build(): return 1")
    first = found("own_package_1:build", tmp_path)
    assert first() == 1
    nets.write_text("def build(): return 22")
    assert found("own_package_1:build", tmp_path).source != first.source


SCRIPT = """
import functools
import decorators
def make(scale):
    bias = 1
    @functools.lru_cache
    def inner(x): return scale * x
    return inner
def main(scale=1, step=1):
    steps = 10
    def helper(x): return 2 * x
    def inner(x): return helper(scale * x)
    return inner
def counted(function=lambda x: x): return function
@decorators.logged
def decorated(x): return 3
named = lambda x: x + 4
class Task:
    def __init__(self, scale=1): self.scale = scale
    def losses(self, x): return 5
def script():
    return [decorated, named, main(), counted(), Task().losses, Task(),
            functools.partial(decorated, helper=named)]
"""
DECORATORS = """
import functools
def logged(function):
    @functools.wraps(function)
    def inner(x): return function(x)
    return inner
"""


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("return 3", "return 33", {"decorated", "decorated(...)"}),
        ("x + 4", "x + 44", {"named", "decorated(...)"}),
        ("scale * x)", "scale + x)", {"main.<locals>.inner"}),
        ("2 * x", "3 * x", {"main.<locals>.inner"}),
        ("main(scale=1", "main(scale=2", set()),  # as a rank it may differ between workers
        ("steps = 10", "steps = 20", set()),
        ("lambda x: x)", "lambda x: -x)", {"<lambda>"}),
        ("self, scale=1", "self, scale=2", {"Task.losses(...)", "Task(...)"}),
        ("Task().losses, Task()", "Task(2).losses, Task(2)", {"Task.losses(...)", "Task(...)"}),
    ],
)  # fmt: skip
def test_a_script_sees_which_of_what_it_gives_has_changed(
    write_module: WriteModule, tmp_path: Path, before: str, after: str, changed: set[str]
) -> None:
    sys.path.insert(0, str(tmp_path))
    write_module("decorators.py", DECORATORS)
    sources = []
    assert SCRIPT.count(before) == 1
    for name, text in {"own_script_1": SCRIPT, "own_script_2": SCRIPT.replace(before, after)}.items():
        write_module(f"{name}.py", text)
        functions = [Function.of(code) for code in importlib.import_module(name).script()]
        assert all(function.file == str(tmp_path / f"{name}.py") for function in functions)
        assert all(Function.parse(str(function)) == function for function in functions)
        sources.append({function.name: function.source for function in functions})
    assert {name for name in sources[0] if sources[0][name] != sources[1][name]} == changed


def test_a_name_leads_to_what_its_module_has_given_one(write_module: WriteModule, tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    write_module("own_parts_6.py", "def make(scale):\n    return lambda: scale\nbuild = make(3)")
    function = Function.of(importlib.import_module("own_parts_6").build)
    assert function == found("own_parts_6:build", tmp_path)
    assert function.is_in_module


@pytest.mark.parametrize(
    "code", [{"train": 1}.get, partial(str.upper, "a"), Scaled(1.0).__call__, partial(int, base=2), eval("lambda: 3")]
)
def test_what_no_name_leads_to_is_called_by_the_script_alone(code: Any) -> None:
    read = Function.parse(str(Function.of(code)))
    assert not read.is_in_module
    assert not found(str(read), Path("/nonexistent")).may_be_imported


def test_what_a_partial_or_an_object_holds_belongs_to_its_fingerprint() -> None:
    assert Function.of(partial(found, 1)).source == Function.of(partial(found, 1)).source
    assert Function.of(partial(found, 1)).source != Function.of(partial(found, 2)).source
    assert Function.of(partial(found, found)).source != Function.of(partial(found, dedent)).source
    assert Function.of(Scaled(1.0)).name == "Scaled(...)"
    assert Function.of(Scaled(1.0)).source == Function.of(Scaled(1.0)).source != Function.of(Scaled(2.0)).source
    assert not Function.of(Scaled(1.0)).is_in_module
    assert Function.of(Scaled(2.0))("train") == 2.0


def test_a_function_within_a_function_says_that_the_script_alone_can_call_it() -> None:
    text = str(Function.of(lambda: 3))
    assert re.fullmatch(r".*test_code:test_a_function_within_.*<lambda> in .*test_code\.py, source \w{16}", text)
    with pytest.raises(InputError, match="is a part of the script of this run, which alone can call it"):
        Function.parse(text).check()


@dataclass(frozen=True)
class Part:
    function: Function
    others: tuple[Any, ...] = ()


def test_all_functions_of_a_recipe_are_found(write_module: WriteModule, tmp_path: Path) -> None:
    write_module("own_parts_5.py", "def a(): return 1\ndef b(): return 2")
    part = Part(Function.parse("own_parts_5:a"), (Part(Function.parse("own_parts_5:b")), 3))
    ready = with_code(part, tmp_path)
    assert [function() for function in functions_of(ready)] == [1, 2]
    assert with_code(3) == 3
