"""Libraries, good and broken ones, as a process of their own loads them."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from lockstep.doctor import libraries
from lockstep.doctor.check_result import CheckResult
from lockstep.doctor.libraries import LoadResult, Requirement, library_results, load_apart

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.process
def test_what_ends_the_process_is_named_and_the_others_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {
        "good": 'print(\'["good", "a lie", 1]\')',
        "missing": "raise ImportError('libcudart.so.13: cannot open shared object file')",
        "exits": "raise SystemExit(3)",
        "dies": "import os, signal; print('[\"dies\"'); os.kill(os.getpid(), signal.SIGKILL)",
        "leaves": "import os; os._exit(7)",
        "last": "",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    found = {name: loaded.problem for name, loaded in load_apart(list(sources)).items()}
    assert found == {
        "good": "",
        "missing": "ImportError: libcudart.so.13: cannot open shared object file",
        "exits": "SystemExit: 3",
        "dies": "it ended its process by SIGKILL",
        "leaves": "it ended its process with exit code 7",
        "last": "",
    }


def test_torn_lines_and_a_process_that_says_nothing_are_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(['["a"]\n["a", "", 0.5]\n["b"]\n["b", "", ', ""])
    monkeypatch.setattr(libraries, "_told_by_process", lambda modules: (next(said), f"ended at {modules}"))
    assert load_apart(["a", "b", "c"]) == {
        "a": LoadResult("", 0.5),
        "b": LoadResult("ended at ['a', 'b', 'c']", 0.0),
        "c": LoadResult("ended at ['c']", 0.0),
    }


@pytest.mark.process
def test_a_library_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text("import time; time.sleep(3600)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(libraries, "_TIMEOUT_SECONDS", 0.5)
    assert load_apart(["hangs"])["hangs"].problem == "not done after 0 s"


def test_all_that_the_project_asks_for_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name != "dev"}
    lines = [
        *project["dependencies"],
        *(f'{line}; extra == "{name}"' for name, some in extras.items() for line in some),
    ]
    monkeypatch.setattr(metadata, "requires", lambda _: [*lines, 'ruff>=0.8; extra == "dev"'])
    found = libraries._requirements()
    assert len(found) == len(lines)
    assert found[0] == Requirement("torch", "2.11", "")
    assert Requirement("onnxscript", "0.5", "onnx") in found
    assert {each.module for each in found} >= {"PIL", "google_crc32c", "tomli_w", "h5py"}


ASKED = [
    Requirement("torch", "2.11", ""),
    Requirement("rich", "13.9", ""),
    Requirement("simplejpeg", "1.9", ""),
    Requirement("h5py", "3.11", "h5"),
    Requirement("nowhere-to-be-found", "1", "wandb"),
]


def found_of(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], problems: dict[str, str]
) -> dict[str, CheckResult]:
    monkeypatch.setattr(libraries, "_requirements", lambda: ASKED)
    monkeypatch.setattr(
        libraries, "load_apart", lambda names: {each: LoadResult(problems.get(each, ""), 1.0) for each in names}
    )
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name, "99.0"))
    return {each.checked: each for each in library_results()}


def test_what_loads_is_good_and_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_of(monkeypatch, {"torch": "2.13.0+cpu"}, {})
    assert found["torch"] == CheckResult("torch", "torch 2.13.0+cpu", numbers={"load_seconds": 1.0})
    assert found["libraries"].found == "rich 99.0; simplejpeg 99.0"
    assert found["optional libraries"].found == (
        "nowhere-to-be-found is not installed (pip install 'lockstep-train[wandb]')"
    )
    assert {each.verdict for each in found.values()} == {"OK"}


def test_what_is_needed_fails_and_what_is_not_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dict.fromkeys(["torch", "rich", "simplejpeg", "h5py"], "ImportError: no")
    found = found_of(monkeypatch, {}, broken)
    verdicts = {each.checked: each.verdict for each in found.values()}
    assert verdicts == {
        "torch": "fails",
        "library h5py": "warn",
        "library rich": "fails",
        "library simplejpeg": "warn",
        "optional libraries": "OK",
    }
    assert found["torch"].found == "99.0 does not load: ImportError: no"
    assert "'lockstep-train[h5]'" in found["library h5py"].mend


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.9.1", "warn"), ("2.11", "OK"), ("2.11.0a0+git1", "OK"), ("3", "OK"), ("unknown", "warn")],
)
def test_an_old_version_is_a_warning(monkeypatch: pytest.MonkeyPatch, version: str, verdict: str) -> None:
    assert found_of(monkeypatch, {"torch": version}, {})["torch"].verdict == verdict
