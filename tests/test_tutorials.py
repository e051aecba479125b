"""Tutorials are typed as they stand, in an empty folder, by real processes; what they show has to come."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from worker_processes import HANG_SECONDS

ROOT = Path(__file__).parent.parent
SHORT = {"first-run": " --steps 20", "own-network": ""}
"""The tutorials that are typed, and what is put behind their commands that train."""


def files_of(page: Path) -> dict[str, str]:
    """The files that a page shows, each below its name."""
    return dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))


def as_shape(line: str) -> str:
    """A line of a screen without its numbers, which differ from machine to machine, and from run to run."""
    return re.sub(r"\d+ min \d+ s", "0 s", re.sub(r"\d[\d.,]*(e-\d+)?", "0", line.strip())).replace("0 min 0 s", "0 s")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", SHORT)
def test_a_tutorial_is_typed(name: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / "tutorials" / f"{name}.md"
    (tmp_path / "data").symlink_to(ROOT / "data")
    shutil.copy(ROOT / "tests" / "fixtures" / "images" / "hopper.png", tmp_path / "b.png")
    for file, text in files_of(page).items():
        (tmp_path / file).write_text(text)
    screen = ""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        if not language:
            came = {as_shape(line) for line in screen.splitlines()}
            assert [line for line in block.splitlines() if as_shape(line) not in came] == []
        for line in block.splitlines() if language == "sh" else []:
            command = line.partition(" #")[0].strip()
            if command.startswith("lockstep "):
                command += SHORT[name] if command.startswith("lockstep train") else ""
                done = subprocess.run(
                    command, shell=True, cwd=tmp_path, env=environment, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=HANG_SECONDS,
                )  # fmt: skip
                screen += done.stdout
                assert done.returncode == 0, screen
