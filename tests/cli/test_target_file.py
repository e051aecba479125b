"""The file that a command writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import target_file as module
from lockstep.cli.target_file import check_target, target_file
from lockstep.errors import InputError

WHAT = "Plans are drawn as one PNG or as a page."
ENDINGS = (".png", ".html")


def refused(path: Path, *, overwrite: bool = False) -> str:
    with pytest.raises(InputError) as caught:
        check_target(path, ENDINGS, WHAT, overwrite=overwrite)
    return str(caught.value)


def test_another_ending(tmp_path: Path) -> None:
    said = refused(tmp_path / "plan.pdf")
    assert said.startswith(WHAT)
    assert "ends in .png or .html" in said
    assert f"--to {tmp_path / 'plan.png'}" in said


def test_no_name() -> None:
    assert "name a file" in refused(Path())


def test_no_folder(tmp_path: Path) -> None:
    assert f"mkdir -p {tmp_path / 'gone'}" in refused(tmp_path / "gone" / "plan.png")


def test_a_file_that_is_there_may_be_overwritten_on_request_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    path.touch()
    assert "--force to overwrite it" in refused(path)
    check_target(path, ENDINGS, WHAT, overwrite=True)


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "plan.png").mkdir()
    assert "There is a folder" in refused(tmp_path / "plan.png", overwrite=True)


def test_the_file_comes_whole(tmp_path: Path) -> None:
    with target_file(tmp_path / "plan.png") as file:
        file.write(b"half, ")
        assert not (tmp_path / "plan.png").exists()
        file.write(b"and whole")
    assert (tmp_path / "plan.png").read_bytes() == b"half, and whole"


def test_where_writing_fails_what_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    path.write_text("old")
    with pytest.raises(InputError, match="cannot be written") as caught:
        fill_the_disk(path)
    assert "No space left on device" in str(caught.value)
    assert "make room, or name another folder" in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["plan.png"]
    assert path.read_text() == "old"


def fill_the_disk(path: Path) -> None:
    with target_file(path) as file:
        file.write(b"new")
        raise OSError(28, "No space left on device")


def test_a_folder_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "replacing", refusing)
    with pytest.raises(InputError, match="cannot be written"), target_file(tmp_path / "plan.png"):
        pass
