from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.errors import WorkdirError
from lockstep.reporting.append import AppendOnly, append_line


@contextmanager
def disk_with_room_for(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond a size: a write is cut short, then refused, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_pieces_are_there_at_once_and_follow_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old|")
    file = AppendOnly(path)
    file.write(b"first|")
    assert path.read_bytes() == b"old|first|"
    file.write(b"second|")
    file.flush()
    file.close()
    assert path.read_bytes() == b"old|first|second|"


def test_a_full_disk_keeps_whole_pieces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = AppendOnly(path)
    file.write(b"whole\n")
    with disk_with_room_for(10), pytest.raises(WorkdirError) as error:
        file.write(b"much too long\n")
    assert path.read_bytes() == b"whole\n"
    assert error.value.what == f"{path} cannot be written: No space left on device."
    assert error.value.expected == "a file that can be created and extended, on a disk with space left"
    assert "make space" in error.value.hint
    file.write(b"again\n")
    file.close()
    assert path.read_bytes() == b"whole\nagain\n"


def test_a_refused_write_is_an_error() -> None:
    file = AppendOnly(Path("/dev/full"))
    with pytest.raises(WorkdirError, match="No space left on device"):
        file.write(b"piece")
    file.close()


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    with pytest.raises(WorkdirError) as error:
        AppendOnly(folder / "file")
    assert str(error.value) == (
        f"The folder {folder} is not there.\n"
        f"  given:    no folder {folder}\n"
        "  expected: a folder that stays as long as a run writes to it\n"
        "  hint:     if it was deleted or moved while the run went on, put it back: "
        "the same command goes on from the last checkpoint in it, and what is not put back is lost"
    )


@pytest.mark.parametrize("torn", [b"", b'{"step": ', b"\0\0\0", "gr\u00fc".encode()[:-1]])
def test_a_line_is_never_glued_to_one_that_is_torn(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "file"
    append_line(path, "first")
    with path.open("ab") as file:
        file.write(torn)
    append_line(path, "second")
    assert path.read_bytes() == b"first\nsecond\n"


def test_a_line_that_is_all_there_is_and_torn_goes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"torn")
    append_line(path, "whole")
    assert path.read_bytes() == b"whole\n"


def test_a_line_is_on_the_disk_when_the_call_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "file", []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    append_line(path, "line")
    assert (path.stat().st_ino, len("line\n")) in synced
    assert tmp_path.stat().st_ino in [inode for inode, _ in synced], "nor is the name of the new file lost"


def test_after_a_cut_it_goes_on_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    file = AppendOnly(path)
    file.cut(4)
    file.write(b"x")
    file.close()
    assert path.read_bytes() == b"0123x"


def test_what_cannot_be_cut_or_flushed_is_an_error() -> None:
    file = AppendOnly(Path("/dev/null"))
    for action in (lambda: file.cut(0), file.flush):
        with pytest.raises(WorkdirError, match="/dev/null cannot be written: Invalid argument"):
            action()
    file.close()
