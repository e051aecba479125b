"""Indices that are kept on the disk."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.errors import DataError
from lockstep.records import index_cache
from lockstep.records.index_cache import cache_folder, load_index, local_copies, local_copy, save_index
from lockstep.records.open_files import Version
from lockstep.storage.remote_path import DataPath

KIND, VERSION = b"TESTKIND", Version(10, 20)


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_an_index_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    save_index(tmp_path / "data", KIND, VERSION, b"content")
    assert load_index(tmp_path / "data", KIND, VERSION, bytes) == b"content"


@pytest.mark.parametrize(
    ("kind", "version"), [(b"OTHERKND", VERSION), (KIND, Version(11, 20)), (KIND, Version(10, 21))]
)
def test_the_index_of_another_kind_or_version_is_not_loaded(tmp_path: Path, kind: bytes, version: Version) -> None:
    save_index(tmp_path / "data", KIND, VERSION, b"content")
    assert load_index(tmp_path / "data", kind, version, bytes) is None


def test_the_index_of_another_path_is_another(tmp_path: Path) -> None:
    save_index(tmp_path / "one" / "data", KIND, VERSION, b"content")
    assert load_index(tmp_path / "other" / "data", KIND, VERSION, bytes) is None


def kept_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("damage", [lambda data: data.replace(b"content", b"CONTENT"), lambda data: data[:9]])
def test_a_damaged_index_is_told_not_loaded_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    data = tmp_path / "data"
    save_index(data, KIND, VERSION, b"content")
    (kept,) = kept_in(tmp_path)
    kept.write_bytes(damage(kept.read_bytes()))
    assert load_index(data, KIND, VERSION, bytes) is None
    assert caplog.messages == [f"{kept} is damaged: the index of {data} is made again"]
    save_index(data, KIND, VERSION, b"new")
    assert load_index(data, KIND, VERSION, bytes) == b"new"
    assert kept_in(tmp_path) == [kept]


def test_the_cache_is_the_folder_given_or_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_index(tmp_path / "data", KIND, VERSION, b"content", tmp_path / "mine")
    assert [path.parent for path in kept_in(tmp_path)] == [tmp_path / "mine" / "record-index"]
    assert load_index(tmp_path / "data", KIND, VERSION, bytes, str(tmp_path / "mine")) == b"content"
    assert load_index(tmp_path / "data", KIND, VERSION, bytes) is None
    assert cache_folder() == tmp_path / "cache" / "lockstep"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "lockstep"
    monkeypatch.setenv("XDG_CACHE_HOME", "beside/the/data")
    assert cache_folder() == tmp_path / "home" / ".cache" / "lockstep"
    with pytest.raises(DataError, match="s3:/bucket is not on this machine"):
        cache_folder("s3:/bucket")


def test_a_cache_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.touch()
    for name in ("one", "two"):
        save_index(tmp_path / name, KIND, VERSION, b"content", file)
        assert load_index(tmp_path / name, KIND, VERSION, bytes, file) is None
    (line,) = caplog.messages
    assert line.startswith("Indices of data files cannot be kept, and are made again at each start: [Errno 20] Not a d")
    assert "data.cache" in line
    assert kept_in(tmp_path) == [file]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, data: bytes) -> int:
        path.open("xb").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    save_index(tmp_path / "data", KIND, VERSION, b"content")
    assert kept_in(tmp_path) == []


def test_a_user_without_a_home_has_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    save_index(tmp_path / "data", KIND, VERSION, b"content")
    assert load_index(tmp_path / "data", KIND, VERSION, bytes) is None
    with pytest.raises(DataError, match="without a home"):  # and not among all users' temporary files
        local_copies(stored(a=b"1"))


# Copies of objects ----------------------------------------------------------------------------------------------------


def stored(**contents: bytes) -> list[DataPath]:
    folder = DataPath(f"memory://{uuid.uuid4().hex}")
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]


def test_an_object_is_copied_once_for_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = stored(weights=b"first")
    copy = local_copy(path)
    assert copy.read_bytes() == b"first"
    assert copy.name == "weights"
    assert tmp_path / "cache" in copy.parents
    monkeypatch.setattr(index_cache, "fetch_ranges", lambda _: pytest.fail("it is copied already"))
    assert local_copy(path) == copy
    monkeypatch.undo()
    path.write_bytes(b"second")
    assert local_copy(path, tmp_path / "other").read_bytes() == b"second"
    assert local_copy(tmp_path / "here") == tmp_path / "here"


def test_objects_that_belong_together_are_in_one_folder(tmp_path: Path) -> None:
    copies = local_copies(stored(a=b"1", b=b"2"), tmp_path)
    assert {copy.name: copy.read_bytes() for copy in copies} == {"a": b"1", "b": b"2"}
    assert len({copy.parent for copy in copies}) == 1


def test_an_object_that_changes_before_it_is_copied_is_not_taken_for_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = stored(weights=b"first")
    told = index_cache.log.info

    def change(*arguments: object) -> None:
        told(*arguments)
        path.write_bytes(b"other")

    monkeypatch.setattr(index_cache.log, "info", change)
    with pytest.raises(DataError, match="has changed since it was listed"):
        local_copy(path)
    monkeypatch.undo()
    assert local_copy(path, tmp_path).read_bytes() == b"other"


def test_a_cache_without_room_for_a_copy_says_so(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    (path,) = stored(a=b"12345")
    with pytest.raises(DataError, match=rf"{path} cannot be copied into the cache") as caught:
        local_copy(path)
    assert caught.value.expected == f"5 bytes free in {tmp_path}/cache/lockstep/copies"


def test_a_copy_that_was_cut_short_is_made_again() -> None:
    (path,) = stored(x=b"content")
    for left in (b"cont", b""):
        local_copy(path).write_bytes(left)
        assert local_copy(path).read_bytes() == b"content"
    local_copy(path).unlink()
    assert local_copy(path).read_bytes() == b"content"
