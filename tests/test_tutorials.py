"""Tutorials are typed as they stand, by `scripts/rehearse`, in empty folders and real terminals."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
BAR = "\r\x1b[J\r\nstep {} of 20 \x1b[31m━━╸━━\x1b[0m {} % 2 s left\r\nloss {} | lr 0.05\r\x1b[2A"
"""As `lockstep.reporting.console.Bar` draws it: below the cursor, which stays where it was."""


def _load() -> ModuleType:
    loader = SourceFileLoader("rehearse", str(ROOT / "scripts/rehearse"))
    spec = spec_from_loader("rehearse", loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["rehearse"] = module  # where its dataclasses look for their module
    loader.exec_module(module)
    return module


rehearsal = _load()


def files_of(page: Path) -> dict[str, str]:
    """The files that a page shows, each below its name."""
    found: dict[str, str] = rehearsal.files_of(page.read_text())
    return found


def test_each_tutorial_has_a_plan_that_it_needs() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "tutorials").glob("*.md")}
    assert pages | {"README"} == set(rehearsal.PLANS)
    for name, plan in rehearsal.PLANS.items():
        blocks = list(rehearsal.blocks_of(rehearsal.text_of(name)))
        typed = [line.partition(" #")[0].strip() for kind, lines in blocks for line in lines if kind == "typed"]
        shown = [line for kind, lines in blocks for line in lines if kind == "shown"]
        assert typed, name
        assert not {*plan.left_out, *plan.awaited} - set(typed), name
        assert any(line.startswith(plan.interrupted[0]) for line in typed), name
        assert [start for start in plan.scores if not any(line.startswith(start) for line in shown)] == [], name


def test_a_terminal_keeps_what_was_drawn_over() -> None:
    terminal = rehearsal.Terminal()
    text = "$ train\r\n" + BAR.format(10, 50, 0.5) + BAR.format(20, 100, 0.25)
    for sign in text + "\r\x1b[Jdone\r\n\x1b]7777;3\x07":  # sequences come in parts
        terminal.feed(sign)
    assert terminal.lines == ["$ train", "done", ""]
    assert [code for _, code in terminal.ends] == [3]
    shown = ["step 5 of 20 ━━━ 1 % 1 min 7 s left", "loss 2.25 | lr 0.05", "done"]
    assert rehearsal.compare(shown, terminal.came, {})[0] == []
    for wrong in ("step 5 of 20 ━━━ 1 % left", "losses 2.25 | lr 0.05", "step 5 of 20 ━━━ 1 % 2 s left | lr"):
        (problem,), _ = rehearsal.compare([wrong], terminal.came, {})
        assert problem.startswith(f"shown, and has not come: {wrong}")
    problems, num_lines = rehearsal.compare(["done", "step 5 of 20 ━━━ 1 % 7 s left"], terminal.came, {})
    assert len(problems) == 1, "in their order"
    assert terminal.came[num_lines - 1] == "done", "what comes after it is for the next block"
    problems, _ = rehearsal.compare(["loss 1 | lr 1"], terminal.came, {"loss": (0.6, 1)})
    assert problems == ["not between 0.6 and 1: loss 0.5 | lr 0.05"]


def test_the_rows_of_a_command_are_drawn_with_their_styles(tmp_path: Path) -> None:
    terminal = rehearsal.Terminal()
    for text in ("$ cd a", "$ train", "  1 < 2", "\x1b[31mstopped\x1b[0m, saved", "$ train", "", "a", "b", "c", "$ ls"):
        terminal.feed(text + "\r\n")
    rehearsal.draw_terminal(terminal.rows_of("train", 3, 2), path := tmp_path / "a.svg", 'what "train" says')
    picture = ElementTree.parse(path).getroot()
    texts = picture.findall("{*}text")
    assert ["".join(text.itertext()) for text in texts] == ["$ train", "1 < 2", "stopped, saved", "...", "b", "c"]
    assert [styled.text for styled in picture.findall(".//{*}tspan") if styled.get("class") == "s31"] == ["stopped"]
    assert picture.get("viewBox") == f"0 0 {14 * rehearsal.SIGN + 2 * rehearsal.MARGIN:.0f} {6 * rehearsal.ROW + 28}"


def test_pages_have_the_pictures_of_their_commands() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs/tutorials").glob("*.md")))
    for name, plan in rehearsal.PLANS.items():
        if plan.pictured[0]:
            path = ROOT / f"docs/images/terminal-{name}.svg"
            texts = ["".join(text.itertext()) for text in ElementTree.parse(path).getroot().findall("{*}text")]
            assert texts[0] == f"$ {plan.pictured[0]}"
            assert path.stat().st_size <= 12_288
            assert f"images/{path.name})" in pages


def test_what_is_typed_is_the_page_but_for_make_and_what_shortens() -> None:
    plan = rehearsal.PLANS["first-run"]
    assert (
        rehearsal.as_typed("make demo   # trains", plan, whole=True)
        == ".venv/bin/lockstep train mnist --workdir runs/mnist"
    )
    assert rehearsal.as_typed("make setup", plan, whole=False) is None
    for line in ("lockstep train runs/mnist", "lockstep train mnist --rehearse", "lockstep doctor mnist"):
        assert rehearsal.as_typed(line, plan, whole=False) == line
    assert rehearsal.as_typed("nohup lockstep train mnist > a &", plan, whole=False) == (
        f"nohup lockstep train mnist {plan.short} > a &"
    )


@pytest.mark.process
def test_a_shell_is_a_terminal_that_ctrl_c_reaches(tmp_path: Path) -> None:
    """Tell apart: a code, a variable that stays, a process that a real Ctrl-C ends, and one in the background."""
    shell = rehearsal.Shell(tmp_path, {"PATH": "/usr/bin:/bin", "TERM": "xterm", "HOME": str(tmp_path)})
    try:
        for line in ("export X=kept", "test -t 1 && echo $X $(stty size)", "false"):
            shell.type(line)
        # A shell that is about to start something may miss it.
        shell.type(f"{sys.executable} -c 'import time; print(\"begun\", flush=True); time.sleep(3600)'")
        assert shell.wait_for("^begun")
        shell.press_ctrl_c()
        shell.type("sleep 3600 &")
        shell.type("kill -9 $!")
        shell.wait()
    finally:
        shell.close()
    assert [code for _, _, code in shell.results()] == [0, 0, 1, 130, 0, 0]
    assert f"kept {rehearsal.ROWS} {rehearsal.COLUMNS}" in shell.terminal.came


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", rehearsal.PLANS)
def test_a_tutorial_is_typed(name: str, tmp_path: Path) -> None:
    if reason := rehearsal.lacking(rehearsal.PLANS[name]):
        pytest.skip(reason)
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    command = [sys.executable, ROOT / "scripts/rehearse", "--environment", sys.prefix, "--to", tmp_path, name]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout
