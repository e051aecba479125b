"""The public door: every name is there, documented, and costs nothing until it is used."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lockstep

PAGE = Path(__file__).parent.parent / "docs/reference/api.md"
DOORS = [
    lockstep,
    *(value for name in lockstep.__all__ if inspect.ismodule(value := getattr(lockstep, name))),
]


def test_there_are_at_most_65_names_and_125_of_sub_packages() -> None:
    """Augmentations do not count: each is a kind that recipe files name, which must be read in any case."""
    packages = [package for package in DOORS[1:] if package is not lockstep.augmentations]
    assert len(lockstep.__all__) - 1 <= 65
    assert sum(len(package.__all__) for package in packages) <= 125


def test_the_page_of_public_names_has_each_once() -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(ls\.[\w.]+)`", row)]
    names = [f"{package.__name__}.{name}".replace("lockstep", "ls", 1) for package in DOORS for name in package.__all__]
    assert sorted(listed) == sorted(names)


@pytest.mark.parametrize("package", DOORS, ids=lambda package: package.__name__)
def test_each_name_loads_once_and_is_documented(package: ModuleType) -> None:
    assert inspect.getdoc(package)
    for name in package.__all__:
        assert inspect.getdoc(getattr(package, name)), name
        assert vars(package)[name] is getattr(package, name)


@pytest.mark.process
@pytest.mark.parametrize("package", [lockstep, lockstep.optim], ids=lambda package: package.__name__)
def test_the_names_are_listed_before_they_are_loaded(package: ModuleType) -> None:
    script = f"import {package.__name__} as package; print(*package.__all__); print(*dir(package))"
    listed, shown = run_script(script)[-2:]
    assert listed.split() == sorted(package.__all__)
    assert set(package.__all__) <= set(shown.split())


def test_every_import_of_a_public_name_is_found() -> None:
    """A line that is written in another way would be seen by type checkers alone."""
    for package in DOORS:
        conditions = [node for node in ast.parse(inspect.getsource(package)).body if isinstance(node, ast.If)]
        (block,) = (node for node in conditions if ast.unparse(node.test) == "TYPE_CHECKING")
        assert sorted(alias.name for node in block.body for alias in node.names) == package.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lockstep.nothing  # noqa: B018


def test_an_unknown_name_of_recipes_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'lockstep\.recipes' has no attribute 'nothing'"):
        lockstep.recipes.nothing  # noqa: B018


def test_an_augmentation_that_was_in_images_is_named_where_it_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'HorizontalFlip'; augmentations are in ls\.augmentations"):
        lockstep.images.HorizontalFlip  # type: ignore[attr-defined]  # noqa: B018


def run_script(code: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def modules_after(statement: str) -> set[str]:
    return set(run_script(f"import sys; {statement}; print(*sys.modules)")[-1].split())


@pytest.mark.process
def test_importing_loads_no_torch() -> None:
    assert not {"torch", "numpy", "pydantic", "rich"} & modules_after("import lockstep")


@pytest.mark.process
def test_help_loads_no_torch() -> None:
    loaded = modules_after("from lockstep.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass")
    assert not {"torch", "numpy", "pydantic"} & loaded


@pytest.mark.process
def test_importing_does_nothing() -> None:
    code = """
import logging, os, signal, threading
import lockstep
assert not logging.getLogger("lockstep").filters
import torch
before = dict(os.environ), list(logging.root.handlers), threading.active_count(), signal.getsignal(signal.SIGINT)
stream = torch.get_rng_state()
for name in lockstep.__all__: getattr(lockstep, name)
for name in lockstep.recipes.__all__: getattr(lockstep.recipes, name)
import lockstep.cli.main, lockstep.reporting.console, lockstep.recipes.shipped, lockstep.launcher.launch
after = dict(os.environ), list(logging.root.handlers), threading.active_count(), signal.getsignal(signal.SIGINT)
assert before == after, (before, after)
assert not logging.getLogger("lockstep").handlers
assert torch.equal(stream, torch.get_rng_state())
"""
    run_script(code)
