from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import WorkdirError, WorkdirLostError
from lockstep.owner import host_name, this_process
from lockstep.recipes.recipe import Recipe
from lockstep.runs.workdir import Workdir
from lockstep.training.choices import Choices

CHOICES = Choices(2, "cpu", "x86_64 AVX2", "fp32", "contiguous", "fused", "off", "none", "2.11.0", "0.1.0")


@pytest.fixture
def workdir(tmp_path: Path) -> Workdir:
    return Workdir(tmp_path)


def test_looking_at_a_folder_makes_none(tmp_path: Path, mnist: Recipe) -> None:
    workdir = Workdir(tmp_path / "deep" / "run")
    assert workdir.recipe() is None
    assert workdir.check(mnist, accept_changes=False) == []
    assert list(tmp_path.iterdir()) == []


def test_something_else_is_listed_and_not_touched(workdir: Workdir, mnist: Recipe) -> None:
    for name in ("d", "b", "a", "c", "e"):
        (workdir.path / name).write_text("mine")
    with pytest.raises(WorkdirError) as caught:
        workdir.check(mnist, accept_changes=True)
    assert str(caught.value) == (
        f"{workdir.path} holds something that is not a run.\n"
        "  given:    a, b, c and 2 more\n"
        "  expected: a folder that is empty, not there yet, or of a run (with a recipe.toml)\n"
        "  hint:     name another folder with --workdir; nothing in this one was touched"
    )
    assert sorted(path.name for path in workdir.path.iterdir()) == ["a", "b", "c", "d", "e"]


def test_a_start_that_was_killed_at_once_left_nothing_that_counts(workdir: Workdir) -> None:
    with workdir.held():
        (workdir.path / ".recipe.toml.0123.partial").write_text("half a rec")
    assert workdir.recipe() is None


def test_the_recipe_comes_back(workdir: Workdir, mnist: Recipe) -> None:
    workdir.write_recipe(mnist)
    assert workdir.recipe() == mnist
    assert [path.name for path in workdir.path.iterdir()] == ["recipe.toml"]


def test_what_has_changed_is_shown_and_can_be_accepted(workdir: Workdir, mnist: Recipe) -> None:
    workdir.write_recipe(mnist)
    changed = replace(mnist, seed=1, batch_size=64, num_workers=1)
    with pytest.raises(WorkdirError) as caught:
        workdir.check(changed, accept_changes=False)
    assert str(caught.value) == (
        f"The run in {workdir.path} has another recipe.\n"
        "  given:    batch_size: saved 128, given 64; seed: saved 0, given 1\n"
        "  expected: the recipe that the run began with, but for its end, intervals and machine\n"
        "  hint:     take the changes back, name another --workdir, or add --accept-changes to go on with them"
    )
    assert workdir.check(changed, accept_changes=True) == [
        "batch_size: saved 128, given 64",
        "seed: saved 0, given 1",
        "num_workers: saved None, given 1",
    ]
    assert workdir.recipe() == mnist


def test_a_run_that_was_saved_with_the_old_name_of_a_field_has_the_same_recipe(
    workdir: Workdir, mnist: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_OLD_NAMES", "")
    workdir.write_recipe(mnist)
    path = workdir.path / "recipe.toml"
    path.write_text(path.read_text().replace('on_failure = "restart"', 'on_loss = "restart"'))
    assert "on_loss" in path.read_text()
    assert workdir.check(mnist, accept_changes=False) == []


def test_choices_come_back(workdir: Workdir, mnist: Recipe) -> None:
    assert workdir.saved_choices() is None
    workdir.write_start(mnist, CHOICES, None)
    assert workdir.saved_choices() == asdict(CHOICES)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("{", "Expecting property name"),
        ('{"threads": 1}', "the fields are not threads, device, cpu, "),
        (json.dumps({**asdict(CHOICES), "threads": 0}), "threads is 0"),
        (json.dumps({**asdict(CHOICES), "threads": True}), "threads is True"),
        (json.dumps({**asdict(CHOICES), "torch": None}), "torch is None"),
        ("[" * 100_000, "recursion"),
        ("[]", "the fields are not"),
    ],
)
def test_damaged_choices_are_refused(workdir: Workdir, text: str, given: str) -> None:
    (workdir.path / "choices.json").write_text(text)
    with pytest.raises(WorkdirError) as caught:
        workdir.saved_choices()
    error = caught.value
    assert error.what == f"{workdir.path / 'choices.json'} cannot be read."
    assert given in str(error.given)
    assert error.expected == "the choices of the run's first start, as JSON"
    assert error.hint == "restore the file; or move it away, and the choices of this machine are taken"


def test_a_workdir_is_held_once(workdir: Workdir) -> None:
    with workdir.held():
        with pytest.raises(WorkdirError, match=f"The run in {workdir.path} is going on already"), workdir.held():
            pass
        workdir.check_held()
        assert workdir.holder == {"host": host_name(), "pid": os.getpid()}
    assert workdir.holder == {}
    with workdir.held():
        pass


def test_who_goes_on_in_the_place_of_a_dead_process_says_so(workdir: Workdir) -> None:
    dead = replace(this_process(), started="12345")
    (workdir.path / ".lease-000007").write_bytes(dead.encode())
    with workdir.held():
        assert workdir.holder == {"host": host_name(), "pid": os.getpid(), "taken_over_from": str(dead)}


def test_a_folder_that_is_gone_is_a_plain_error(tmp_path: Path) -> None:
    workdir = Workdir(tmp_path / "run")
    with workdir.held():
        shutil.rmtree(workdir.path)
        workdir.check_held(closely=False)
        with pytest.raises(WorkdirError) as checked:
            workdir.check_held()
        with pytest.raises(WorkdirError) as noted:
            workdir.note("end", step=3)
        with pytest.raises(WorkdirError) as written:
            workdir.write("result.json", "{}")
    for caught in (checked, noted, written):
        assert caught.value.what == f"The folder {workdir.path} is not there."
        assert "what is not put back is lost" in caught.value.hint
        assert caught.value.exit_code == 1  # nothing was wrong with what was given
    assert not workdir.path.exists()


def test_a_folder_that_cannot_be_written_is_a_plain_error(workdir: Workdir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str, **_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(WorkdirError) as caught, workdir.held():
        pass
    assert caught.value.what == f"The workdir {workdir.path} cannot be used: Read-only file system."
    assert caught.value.given == f"{workdir.path / '.lease-000001'} (Read-only file system)"
    assert caught.value.exit_code == 2


def test_a_disk_that_is_read_only_in_mid_run_is_no_wrong_input(
    workdir: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: str = "r", **_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with workdir.held(), monkeypatch.context() as disk:
        disk.setattr(Path, "open", refuse)
        with pytest.raises(WorkdirLostError, match=r"history.jsonl cannot be written: Read-only file system") as noted:
            workdir.note("end", step=3)
        with pytest.raises(WorkdirLostError, match=r"cannot be used: Read-only file system") as written:
            workdir.write("result.json", "{}")
    assert noted.value.exit_code == written.value.exit_code == 1


def test_a_folder_that_may_not_be_looked_into_is_a_plain_error(
    workdir: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(WorkdirError, match=r"cannot be used: Permission denied"):
        _ = workdir.holds_run


def test_a_folder_that_cannot_be_made_is_a_plain_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "run"
    with pytest.raises(WorkdirError) as caught, Workdir(inside).held():
        pass
    assert str(caught.value) == (
        f"The workdir {inside} cannot be used: Not a directory.\n"
        f"  given:    {inside} (Not a directory)\n"
        "  expected: a folder that can be read and written, on a disk with space left\n"
        "  hint:     make space, or name a --workdir that can be written; what was written before is intact"
    )


def test_a_full_disk_is_a_plain_error(workdir: Workdir, mnist: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    workdir.write_recipe(mnist)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(WorkdirError, match=re.escape(f"{workdir.path} cannot be used: No space left on device")):
        workdir.write_recipe(replace(mnist, seed=1))
    assert workdir.recipe() == mnist
    assert [path.name for path in workdir.path.iterdir()] == ["recipe.toml"]


def test_history_is_a_line_an_event(workdir: Workdir) -> None:
    workdir.note("start", step=0, changed=["seed: saved 0, given 1"])
    workdir.note("end", step=7)
    lines = [json.loads(line) for line in (workdir.path / "history.jsonl").read_text().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", line.pop("time")) for line in lines)
    assert lines == [
        {"event": "start", "step": 0, "changed": ["seed: saved 0, given 1"]},
        {"event": "end", "step": 7},
    ]


@pytest.mark.parametrize("torn", ['{"time": "2', '{"event": "end", "step": 9}', "\0\0"])
def test_a_torn_last_line_of_the_history_counts_for_none(workdir: Workdir, torn: str) -> None:
    workdir.note("start", step=0)
    with (workdir.path / "history.jsonl").open("a") as file:
        file.write(torn)
    workdir.check_unstarted()
    workdir.note("resume", step=4)
    lines = (workdir.path / "history.jsonl").read_text().splitlines()
    assert [(event["event"], event["step"]) for event in map(json.loads, lines)] == [("start", 0), ("resume", 4)]
    with pytest.raises(WorkdirError, match=r"has been at step 4, and its checkpoints are gone"):
        workdir.check_unstarted()


def test_a_run_that_failed_before_its_first_checkpoint_starts_anew(workdir: Workdir) -> None:
    workdir.note("start", step=0)
    workdir.note("straggler", step=2, said="worker 1 waits for its input")
    workdir.note("verdict", step=3, said="it is the data or the code")
    workdir.note("failed", step=3, error="no space is left")
    workdir.check_unstarted()
    workdir.note("end", step=4)
    with pytest.raises(WorkdirError, match=r"has been at step 4, and its checkpoints are gone"):
        workdir.check_unstarted()


@pytest.mark.parametrize("line", ["{", "[1]", '{"event": "start"}', '{"step": "3"}', "[" * 9999])
def test_another_line_of_the_history_that_cannot_be_read_is_named(workdir: Workdir, line: str) -> None:
    workdir.note("start", step=0)
    with (workdir.path / "history.jsonl").open("a") as file:
        file.write(f"{line}\n")
    workdir.note("end", step=4)
    with pytest.raises(WorkdirError) as caught:
        workdir.check_unstarted()
    assert str(caught.value) == (
        f"{workdir.path / 'history.jsonl'}, line 2 is none that was written here.\n"
        f"  given:    {line[:80]}\n"
        '  expected: a JSON object with a "step"\n'
        "  hint:     take this line out of history.jsonl, or move the file away: nothing is trained from it"
    )


def test_what_was_noted_last_of_a_place_counts(workdir: Workdir) -> None:
    assert workdir.metrics_lines(3, 24) is None
    for step, position, count in [(3, 24, 9), (3, 32, 8), (3, 24, 7), (4, 40, 6)]:
        workdir.note_save(step, position, count)
    assert (workdir.metrics_lines(3, 24), workdir.metrics_lines(3, 32), workdir.metrics_lines(4, 24)) == (7, 8, None)
