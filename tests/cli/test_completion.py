"""`lockstep completion`: what bash completes by its script, in a folder with runs; and that each shell gets one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.completion import SHELLS
from lockstep.cli.main import main

pytest.importorskip("shtab", reason="of the extra `completion`")
LINES = {
    "tr": ["train"],
    "train mn": ["mnist", "mnist_reference"],
    "train mnist --workers-per": ["--workers-per-device"],
    "train mnist --set optimizer.mom": ["optimizer.momentum="],
    "train mnist --set seed=1 --set evaluate.pat": ["evaluate.patience="],
    "explain checkpoints.retention.e": ["checkpoints.retention.every_hours"],
    "evaluate run": ["runs/a/", "runs/b/"],
    "status runs/b": ["runs/b/"],
    "plan min": ["mine.toml"],
    "completion f": ["fish"],
}


@pytest.mark.process
def test_bash_completes_all_that_it_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    for name in "ab":
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "mine.toml").touch()
    asked = """
source ./script
compopt() { :; }
while read -r line; do
  COMP_WORDS=(lockstep $line); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMPREPLY=()
  _lockstep_fields_without_space lockstep "${COMP_WORDS[-1]}"
  echo "${COMPREPLY[@]}"
done
"""
    done = subprocess.run(
        ["bash", "-c", asked],
        input="\n".join(LINES) + "\n",
        text=True,
        check=True,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
    )
    assert dict(zip(LINES, map(str.split, done.stdout.splitlines()), strict=True)) == LINES


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_with_all_fields(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "optimizer.lr.initial=" in script
    assert "print-recipe" in script


def test_without_the_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'lockstep-train[completion]'" in capsys.readouterr().err
