from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.doctor import disk
from lockstep.doctor.check_result import CheckResult, results_of
from lockstep.doctor.disk import Pace, disk_checks
from lockstep.run_files import RECIPE

BYTES = 1 << 16


def look(workdir: Path) -> dict[str, CheckResult]:
    checks = disk_checks(workdir, BYTES)
    return {each.checked: each for each in results_of(checks)}


def test_a_workdir_that_is_not_there_yet_is_tried_in_the_folder_above_and_nothing_is_left(tmp_path: Path) -> None:
    found = look(tmp_path / "runs" / "mine")
    assert found["workdir"].found.startswith(f"{tmp_path} takes ")
    assert found["workdir"].numbers["bytes_per_second"] > 0
    assert found["workdir"].numbers["fsync_seconds"] > 0
    assert found["room"].numbers["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_into_the_folder_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / RECIPE).write_text("")
    written: list[Path] = []
    monkeypatch.setattr(disk, "write_pace", lambda folder, _: written.append(folder) or Pace(1e9, 1e-3))
    for workdir in (run, run / "checkpoints", run / "runs" / "another"):
        assert look(workdir)["workdir"].verdict == "OK"
    assert written == [tmp_path] * 3


def test_a_run_below_a_folder_that_may_not_be_written_can_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECIPE).write_text("")
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    monkeypatch.setattr(disk, "write_pace", lambda *_: pytest.fail("it has written"))
    found = look(tmp_path / "run")["workdir"]
    assert (found.verdict, "is not known" in found.found) == ("OK", True)


def test_a_run_on_a_disk_of_its_own_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECIPE).write_text("")
    stat = Path.stat
    devices = {tmp_path: 1, tmp_path / "run": 2}
    monkeypatch.setattr(
        Path,
        "stat",
        lambda path, **options: SimpleNamespace(st_dev=devices[path]) if path in devices else stat(path, **options),
    )
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(disk, "write_pace", lambda *_: pytest.fail("it has written"))
    assert "is not known" in look(tmp_path / "run")["workdir"].found


def test_a_file_in_the_place_of_a_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for workdir in (tmp_path / "file", tmp_path / "file" / "run"):
        [found] = look(workdir).values()
        assert found.verdict == "fails"
        assert "Not a directory" in found.found
        assert "--workdir" in found.mend


def test_a_name_that_the_system_does_not_take_fails(tmp_path: Path) -> None:
    [found] = look(tmp_path / ("x" * 300)).values()
    assert (found.verdict, "File name too long" in found.found) == ("fails", True)


def test_a_workdir_that_cannot_be_read_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    [found] = look(tmp_path).values()
    assert (found.verdict, "cannot be read" in found.found) == ("fails", True)


def test_a_workdir_that_may_not_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    [found] = look(tmp_path).values()
    assert (found.verdict, "cannot be written" in found.found) == ("fails", True)


def test_a_disk_that_is_full_in_the_middle_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    found = look(tmp_path)["workdir"]
    assert (found.verdict, "No space left" in found.found) == ("fails", True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pace", [Pace(1e6, 0.001), Pace(1e9, 0.5)])
def test_a_slow_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pace: Pace) -> None:
    monkeypatch.setattr(disk, "write_pace", lambda *_: pace)
    found = look(tmp_path)["workdir"]
    assert (found.verdict, "checkpoints.every" in found.mend) == ("warn", True)


@pytest.mark.parametrize(
    ("free", "kind", "verdict", "said"),
    [
        (10**10, "ext4", "OK", "has 10.0 GB free, on ext4"),
        (10**9, "ext4", "warn", "1.0 GB"),
        (10**7, "ext4", "fails", "0.0 GB"),
        (10**10, "tmpfs", "warn", "gone with the next start"),
        (10**10, "overlay", "warn", "gone with the container"),
    ],
)
def test_room_and_the_kind_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kind: str, verdict: str, said: str
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))
    monkeypatch.setattr(disk, "_kind", lambda _: kind)
    found = look(tmp_path)["room"]
    assert found.verdict == verdict
    assert said in found.found


def test_the_kind_is_that_of_the_innermost_mount_and_of_the_last_one_on_it(tmp_path: Path) -> None:
    table, folder = tmp_path / "mounts", tmp_path / "my runs" / "a"
    folder.mkdir(parents=True)
    name = str(tmp_path / "my runs").replace(" ", "\\040")
    table.write_text(f"/dev/a / ext4 rw 0 0\nb {name} nfs4 rw 0 0\nb {name} xfs rw 0 0\nc /proc proc rw 0 0\n")
    assert disk._kind(folder, table) == "xfs"
    assert disk._kind(tmp_path, table) == "ext4"
    assert disk._kind(folder, tmp_path / "none") == "unknown"
