from __future__ import annotations

import logging
import multiprocessing
import os
import platform
import shutil
import time
from pathlib import Path

import pytest

from lockstep.checkpoints.store import ABANDONED_SECONDS, delete, sweep, unfinished_path


def make(path: Path, *, age_seconds: float = 0.0) -> Path:
    path.mkdir()
    (path / "parameters.safetensors").write_bytes(b"half")
    then = time.time() - age_seconds
    for entry in (path / "parameters.safetensors", path):
        os.utime(entry, (then, then))
    return path


def test_my_own_stay(tmp_path: Path) -> None:
    new, old = (make(unfinished_path(tmp_path / "step-00000010", kind), age_seconds=1e6) for kind in ("new", "old"))
    sweep(tmp_path)
    assert new.is_dir()
    assert old.is_dir()


@pytest.mark.process
def test_unfinished_checkpoints_of_a_dead_process_are_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=lambda: make(unfinished_path(tmp_path / "step-00000010", "new"))
    )
    process.start()
    process.join()
    (left,) = tmp_path.iterdir()
    with caplog.at_level(logging.INFO, "lockstep"):
        sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert caplog.messages == [f"deleting {left}: the process that was at work on it is gone"]


@pytest.mark.process
def test_unfinished_checkpoints_of_a_zombie_process_are_deleted(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=lambda: make(unfinished_path(tmp_path / "step-00000010", "new"))
    )
    process.start()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []
    process.join()


def test_a_new_process_with_an_old_number_owns_nothing(tmp_path: Path) -> None:
    mine = unfinished_path(tmp_path / "step-00000010", "new")
    make(mine.with_name(mine.name.rpartition(".")[0] + ".12345"))
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unfinished_checkpoints_of_another_host_are_deleted_once_they_are_old(tmp_path: Path) -> None:
    young = make(tmp_path / ".step-00000010.new.elsewhere.1.1", age_seconds=ABANDONED_SECONDS - 60)
    make(tmp_path / ".step-00000011.new.elsewhere.1.1", age_seconds=ABANDONED_SECONDS + 60)
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [young]


def test_a_file_that_still_grows_keeps_an_old_folder(tmp_path: Path) -> None:
    path = make(tmp_path / ".step-00000010.new.elsewhere.1.1", age_seconds=ABANDONED_SECONDS + 60)
    os.utime(path / "parameters.safetensors")
    sweep(tmp_path)
    assert path.is_dir()


@pytest.mark.parametrize(
    "name", ["step-00000010", ".step-10.new.h.1.1", "notes", ".step-00000010.new.h.1.1.keep", ".git"]
)
def test_folders_that_are_no_unfinished_checkpoints_stay(tmp_path: Path, name: str) -> None:
    make(tmp_path / name, age_seconds=1e6)
    sweep(tmp_path)
    assert (tmp_path / name).is_dir()


def test_any_host_name_makes_a_name_that_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "gpu 7.rack/ü")
    path = make(unfinished_path(tmp_path / "step-00000010", "new"))
    assert path.parent == tmp_path
    path.rename(path.with_name(path.name.rpartition(".")[0] + ".12345"))
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    delete(tmp_path)
    assert caplog.messages == [f"{tmp_path} cannot be deleted (Permission denied); delete it by hand, nothing uses it"]
