"""`lockstep completion`: what shells complete by their scripts, in a folder with runs; and `lockstep man`."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.cli.completion import SHELLS
from lockstep.cli.main import COMMANDS, main

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


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with what is completed, and with the script of each shell, under the name by which zsh finds its own."""
    for name in "ab":
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "mine.toml").touch()
    for shell, name in {"bash": "script", "zsh": "_lockstep", "fish": "script.fish"}.items():
        assert main(["completion", shell]) == 0
        (tmp_path / name).write_text(capsys.readouterr().out)
    return tmp_path


@pytest.mark.process
def test_bash_completes_all_that_it_is_told_of(folder: Path) -> None:
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
        cwd=folder,
        stdout=subprocess.PIPE,
    )
    assert dict(zip(LINES, map(str.split, done.stdout.splitlines()), strict=True)) == LINES


@pytest.mark.process
@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_the_same(folder: Path) -> None:
    asked = "".join(f"complete -C 'lockstep {line}' | string join0; echo\n" for line in LINES)
    done = subprocess.run(
        ["fish", "--no-config"],
        input=f"source script.fish\n{asked}",
        text=True,
        check=True,
        cwd=folder,
        stdout=subprocess.PIPE,
        env={**os.environ, "HOME": str(folder)},
    )
    found = [[each.split("\t")[0] for each in line.split("\0") if each] for line in done.stdout.splitlines()]
    assert dict(zip(LINES, found, strict=True)) == LINES


@pytest.mark.process
@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes_the_same_as_it_is_typed(folder: Path) -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(folder)
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "HOME": str(folder), "COLUMNS": "300"})

    def type_and_wait_for(typed: str, wanted: str) -> None:
        os.write(terminal, typed.encode())
        shown, deadline = "", time.monotonic() + 60
        while wanted not in shown:
            assert time.monotonic() < deadline, (typed, shown)
            if select.select([terminal], [], [], 1.0)[0]:
                shown += os.read(terminal, 1 << 16).decode()

    try:
        ready = "fpath=($PWD $fpath); autoload -U compinit; compinit -u -D; setopt noautomenu; echo it is re''ady\n"
        type_and_wait_for(ready, "it is ready")
        for line, words in LINES.items():
            *before, _ = line.split(" ")
            whole = " ".join(["lockstep", *before, os.path.commonprefix(words)])  # noqa: RUF071 (of words)
            assert len(whole) > len(f"lockstep {line}"), "the terminal shows what is typed"
            type_and_wait_for(f"lockstep {line}\t", whole)
            type_and_wait_for("\x15echo go''ne\n", "gone")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


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
    monkeypatch.setitem(sys.modules, "argparse_manpage.manpage", None)
    assert main(["man"]) == 2
    assert capsys.readouterr().err.count("pip install 'lockstep-train[completion]'") == 2


def test_the_manual_page_has_all_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("argparse_manpage", reason="of the extra `completion`")
    assert main(["man"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(".TH LOCKSTEP ")
    assert "lockstep \\- Train vision models on many devices as if they were one." in page
    for name in COMMANDS:
        assert f".SS \\fBlockstep {name}\\fR" in page
    for text in ("print\\-recipe", "exit codes:", "130  stopped by Ctrl"):
        assert text in page
    assert not re.search(r"^\.(?!TH |SH|SS |TP|RS |RE|B |P)", page, re.MULTILINE), "no line is taken for a request"
