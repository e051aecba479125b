"""Folders of processes that were killed go when the next one is made, and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.owner import scratch_folder, this_process

KILLED = """
import os, signal
from lockstep.owner import scratch_folder
with scratch_folder("try-") as folder:
    (folder / "run").mkdir()
    (folder / "run" / "file").write_text("left")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_there_and_gone(temporary: Path) -> None:
    with scratch_folder("try-") as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("")
    assert list(temporary.iterdir()) == []


def test_a_folder_may_be_made_in_another_place_where_it_is_swept_too(temporary: Path) -> None:
    parent = temporary / "beside"
    (parent / ".try-left").mkdir(parents=True)
    (parent / ".try-left" / "owner.json").write_bytes(replace(this_process(), started="1").encode())
    with scratch_folder(".try-", parent) as folder:
        assert list(parent.iterdir()) == [folder]
    assert list(parent.iterdir()) == []


def test_a_scratch_folder_is_deleted_after_an_error(temporary: Path) -> None:
    with pytest.raises(KeyError), scratch_folder("try-"):
        raise KeyError
    assert list(temporary.iterdir()) == []


@pytest.mark.process
def test_what_a_killed_process_has_left_goes_with_the_next(temporary: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], env={**os.environ, "TMPDIR": str(temporary)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = temporary.iterdir()
    assert (left / "run" / "file").read_text() == "left"
    with scratch_folder("try-") as folder:
        assert list(temporary.iterdir()) == [folder]


def test_scratch_folders_of_living_or_unknown_owners_stay(temporary: Path) -> None:
    dead = replace(this_process(), pid=os.getpid(), started="1").encode()
    unseen = replace(this_process(), system="another").encode()
    target = temporary / "elsewhere"
    kept = {"try-alive": this_process().encode(), "try-unseen": unseen, "try-unreadable": b"{", "other-dead": dead}
    for name, owner in {**kept, "elsewhere": dead}.items():
        (temporary / name).mkdir()
        (temporary / name / "owner.json").write_bytes(owner)
    (temporary / "try-without").mkdir()
    (temporary / "try-file").write_bytes(dead)
    (temporary / "try-link").symlink_to(target)
    before = sorted(temporary.iterdir())
    with scratch_folder("try-"):
        pass
    assert sorted(temporary.iterdir()) == before
    assert (target / "owner.json").exists()


def test_what_is_of_another_user_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / "try-theirs").mkdir()
    (temporary / "try-theirs" / "owner.json").write_bytes(replace(this_process(), started="1").encode())
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: os.geteuid() + 1)
        with scratch_folder("try-"):
            pass
    assert (temporary / "try-theirs").is_dir()
    with scratch_folder("try-"):
        pass
    assert not (temporary / "try-theirs").exists()
