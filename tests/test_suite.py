"""The suite gives the same result wherever it runs, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from worker_processes import HANG_SECONDS

ROOT = Path(__file__).parent.parent
TESTS = """
import os
from pathlib import Path

import conftest

given_home, conftest.ROOT = Path.home(), Path(__file__).parent / "checkout"


def test_what_a_test_sees():
    data = {name: path for name, path in os.environ.items() if name.startswith("LOCKSTEP_")}
    assert data == dict.fromkeys(DATA, str(Path(__file__).parent / "none"))
    assert not {"RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "SLURM_JOB_ID"} & os.environ.keys()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["ATEN_CPU_CAPABILITY"] == "default"
    assert Path.home() != given_home
    assert [path.name for path in Path().iterdir()] == ["data"]


def test_that_writes_where_it_stands():
    Path("runs").mkdir()


def test_that_writes_into_the_checkout():
    (conftest.ROOT / "runs/mine").mkdir()
"""


@pytest.mark.process
def test_tests_see_nothing_of_the_place_where_they_run_and_leave_nothing_there(tmp_path: Path) -> None:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    # For which a test is skipped.
    reasons = [reason for text in texts for reason in re.findall(r'reason="([^"]*)"', text)]
    data = {name for reason in reasons for name in re.findall(r"LOCKSTEP_[A-Z_]+", reason)}
    (tmp_path / "test_places.py").write_text(TESTS.replace("DATA", str(sorted(data))))
    (tmp_path / "runs/mnist").mkdir(parents=True)
    (tmp_path / "checkout/runs/mnist").mkdir(parents=True)
    given = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "tests"), "ATEN_CPU_CAPABILITY": "default"}
    given |= {"LOCKSTEP_KEY": "short", "LOCKSTEP_GENERATION": "0", "SLURM_JOB_ID": "7"} | dict.fromkeys(data, "none")
    given |= {"CUDA_VISIBLE_DEVICES": "3", "RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", "-rA"]
    ended = subprocess.run(
        [*command, "-p", "conftest", "-p", "no:cacheprovider", "test_places.py"],
        cwd=tmp_path, env={**os.environ, **given}, capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert ended.stdout.count("PASSED test_places.py") == 3, ended.stdout
    assert "ERROR test_places.py::test_that_writes_where_it_stands - " in ended.stdout
    assert "the test has left runs in the working folder: let it write into tmp_path" in ended.stdout
    assert "a test has left these in the checkout, unless somebody else has meanwhile: runs/mine" in ended.stdout


HANGING_TEST = """
import time

import conftest
import pytest

conftest.SECONDS_TO_END = 0.5


def test_before():
    pass


@pytest.fixture
def hangs():
    yield
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass


def test_that_hangs(hangs):
    assert OK
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("ok", [True, False])
def test_a_test_that_hangs_and_hears_no_exception_is_named_and_ended(tmp_path: Path, ok: bool) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING_TEST.replace("OK", str(ok)))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}",
         "-p", "conftest", "-p", "no:cacheprovider", "-o", "timeout=5", "test_hanging.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "in hangs" in ended.stderr
