"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lockstep.durable import atomic_write
from lockstep.errors import DataError, InputError, LockstepError


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def fill_the_disk(path: Path, failure: type[LockstepError] | None = None, number: int = errno.ENOSPC) -> None:
    with atomic_write(path, failure=failure) as file:
        file.write(b"new")
        raise OSError(number, os.strerror(number))


def test_the_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    with atomic_write(path) as file:
        file.write(b"half, ")
        assert not path.exists()
        file.write(b"and whole")
    assert path.read_bytes() == b"half, and whole"
    assert names(tmp_path) == ["plan.png"]


@pytest.mark.parametrize("failure", [InputError, DataError])
def test_where_writing_fails_what_was_there_stays(tmp_path: Path, failure: type[LockstepError]) -> None:
    path = tmp_path / "plan.png"
    path.write_text("old")
    with pytest.raises(failure, match="cannot be written") as caught:
        fill_the_disk(path, failure)
    assert type(caught.value) is failure
    assert "No space left on device" in str(caught.value)
    assert "make room, or name another folder" in str(caught.value)
    assert names(tmp_path) == ["plan.png"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EACCES, "get the right to write there, or name another folder"),
        (errno.EROFS, "the disk is read-only: name a folder on another one"),
        (errno.ENOTDIR, "name another folder"),
    ],
)
def test_the_hint_is_for_what_the_system_has_said(tmp_path: Path, number: int, hint: str) -> None:
    with pytest.raises(DataError) as caught:
        fill_the_disk(tmp_path / "plan.png", DataError, number)
    assert caught.value.hint == hint


def test_without_an_error_of_its_own_the_systems_error_is_raised(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        fill_the_disk(tmp_path / "plan.png")
    assert not names(tmp_path)


def test_another_error_leaves_nothing_behind_and_is_not_changed(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_write(tmp_path / "plan.png", failure=InputError):
            raise KeyError("of the block")

    with pytest.raises(KeyError):
        fail()
    assert not names(tmp_path)


def test_missing_folders_are_made_on_request_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.png"
    with pytest.raises(InputError, match="cannot be written"), atomic_write(path, failure=InputError):
        pass
    with atomic_write(path, parents=True) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole"


def test_a_folder_that_is_a_file_refuses(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with (
        pytest.raises(DataError, match="cannot be written"),
        atomic_write(tmp_path / "taken" / "plan.png", parents=True, failure=DataError),
    ):
        pass
