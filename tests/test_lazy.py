"""Libraries that are loaded when they are used, not when they are imported."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.lazy import import_lazily

LIBRARY = """
from slow_library.part import number
import slow_library.part
assert slow_library.number == 3
def __getattr__(name):
    if name == "computed": return 5
    raise AttributeError(name)
"""
PART = """
import slow_library
number = 3
assert not hasattr(slow_library, 'nothing')
slow_library.runs = getattr(slow_library, "runs", 0) + 1
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    folder = tmp_path / "slow_library"
    folder.mkdir()
    (folder / "__init__.py").write_text(LIBRARY)
    (folder / "part.py").write_text(PART)
    monkeypatch.syspath_prepend(tmp_path)
    import_lazily("slow_library")
    yield importlib.import_module("slow_library")
    for name in ("slow_library", "slow_library.part"):
        sys.modules.pop(name, None)


def is_loaded() -> bool:
    return "slow_library.part" in sys.modules


def test_imports_load_nothing(library: ModuleType) -> None:
    assert importlib.import_module("slow_library") is library
    assert library.__name__ == library.__package__ == "slow_library"
    assert library.__file__
    assert not is_loaded()


@pytest.mark.parametrize("name", ["number", "part", "computed", "__path__"])
def test_the_first_attribute_loads_the_same_module(library: ModuleType, name: str) -> None:
    assert getattr(library, name)
    assert is_loaded()
    assert library is sys.modules["slow_library"]
    assert type(library) is ModuleType


def test_a_submodule_loads_the_library_first(library: ModuleType) -> None:
    finders = [*sys.meta_path]
    part = importlib.import_module("slow_library.part")
    assert part is library.part is sys.modules["slow_library.part"]
    assert library.number == 3
    assert library.runs == 1, "a submodule is run once"
    assert part.__spec__.origin == part.__file__
    importlib.util.find_spec(
        "no_such_library"
    )  # Python 3.14 asks for nothing more, and what waits goes with the next look
    assert sys.meta_path == finders


def test_an_attribute_that_is_not_there_is_an_attribute_error(library: ModuleType) -> None:
    with pytest.raises(AttributeError, match="nothing"):
        library.nothing  # noqa: B018
    assert is_loaded()


def test_threads_wait_for_the_one_that_loads_it(library: ModuleType) -> None:
    source = Path(library.__file__ or "")
    source.write_text("import time; time.sleep(0.1)\n" + source.read_text())
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: library.number, range(4))) == [3] * 4
    assert library.runs == 1


def test_a_library_that_cannot_be_loaded_says_so_at_each_use(library: ModuleType) -> None:
    Path(library.__file__ or "").write_text("raise RuntimeError('broken')")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            library.number  # noqa: B018


def test_a_library_that_is_loaded_or_missing_is_left_as_it_is(library: ModuleType) -> None:
    assert library.number == 3
    import_lazily("slow_library", "there_is_no_such_library")
    assert library is sys.modules["slow_library"]
    assert type(library) is ModuleType
    assert "there_is_no_such_library" not in sys.modules


@pytest.mark.process
@pytest.mark.parametrize(
    "first",
    [
        "torch.distributed",
        pytest.param("torch.optim", marks=pytest.mark.slow),
        "torch._C",
        pytest.param("numpy.linalg", marks=pytest.mark.slow),
    ],
)
def test_any_submodule_may_be_imported_first(first: str) -> None:
    code = f"""
import sys
from lockstep.lazy import import_lazily
import_lazily("torch", "numpy")
import {first}
import torch, numpy
assert {first} is sys.modules["{first}"] and torch.distributed.is_available()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.process
def test_torch_is_itself_once_it_is_used() -> None:
    code = """
import pickle, sys, threading
from lockstep.lazy import import_lazily
import_lazily("torch", "numpy")
import torch, numpy
import torch, numpy
assert not {"torch._C", "numpy._core"} & {*sys.modules}
from torch import nn
import torch.distributed
import torch.nn.functional as F
assert type(torch) is type(sys) and torch is sys.modules["torch"] and nn is torch.nn and F is nn.functional
assert torch.from_numpy(numpy.ones(2)).sum().item() == 2
assert torch.equal(pickle.loads(pickle.dumps(torch.ones(2))), torch.ones(2))
thread = threading.Thread(target=lambda: nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward())
thread.start(), thread.join()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
