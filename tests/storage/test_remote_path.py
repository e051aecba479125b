"""Paths of an object store: fsspec's store in memory stands for it."""

from __future__ import annotations

import pickle
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lockstep.errors import DataError
from lockstep.storage import remote_path
from lockstep.storage.remote_path import RemotePath, any_path, is_url, stat_of


@pytest.fixture
def bucket() -> RemotePath:
    return RemotePath(f"memory://{uuid.uuid4().hex}")


def test_names_are_those_of_a_path() -> None:
    path = RemotePath("s3://bucket//a/./b.tar.gz")
    assert str(path) == "s3://bucket/a/b.tar.gz"
    assert (path.name, path.stem, path.suffix) == ("b.tar.gz", "b.tar", ".gz")
    assert path.parent == RemotePath("s3://bucket/a")
    assert path.parent.parent.parent == RemotePath("s3://bucket")
    assert path.with_name("c") == path.parent / "c" == RemotePath("s3://bucket/a/c")
    assert str(path.relative_to(RemotePath("s3://bucket"))) == "a/b.tar.gz"
    assert pickle.loads(pickle.dumps(path)) == path
    assert {path: 1}[RemotePath("s3://bucket/a/b.tar.gz")] == 1
    assert sorted([path, path.parent])[0] == path.parent


def test_a_path_of_this_machine_stays_one() -> None:
    assert any_path("a/b") == Path("a/b")
    assert any_path(Path("a")) == Path("a")
    assert any_path("s3://bucket/a") == any_path(RemotePath("s3://bucket/a"))
    assert RemotePath("s3://bucket/train-??&tokens=3").name == "train-??&tokens=3"
    assert not is_url("a:b")


@pytest.mark.parametrize(
    ("url", "given"),
    [
        ("ftp://host/a", "an address that begins with ftp:"),
        ("a/b", "no URL"),
        ("s3://me:secret@bucket/a", "a password"),
        ("az://box/a?sv=2024&sig=secret", "with a signature"),
        ("s3://bucket/a?X-Amz-Credential=secret", "with a signature"),
        ("https://box.blob.core.windows.net/a?sig=secret", "an address that begins with https:"),
    ],
)
def test_other_urls_are_refused(url: str, given: str) -> None:
    with pytest.raises(DataError) as caught:
        RemotePath(url)
    assert given in str(caught.value)
    assert "secret" not in str(caught.value)


def test_what_was_written_is_there(bucket: RemotePath, tmp_path: Path) -> None:
    file = bucket / "a" / "x.bin"
    assert not file.exists()
    assert not bucket.is_dir()
    file.write_bytes(b"0123456789")
    (tmp_path / "y").write_bytes(b"yy")
    (bucket / "a" / "b" / "y.bin").upload(tmp_path / "y")
    assert file.is_file()
    assert (bucket / "a").is_dir()
    assert not file.is_dir()
    assert file.read_bytes() == file.open().read() == b"0123456789"
    assert file.read_range(3, 4) == b"456"
    assert file.read_range(30, 4) == b"456789"
    assert sorted(bucket.iterdir()) == [bucket / "a"]
    assert sorted((bucket / "a").iterdir()) == [bucket / "a" / "b", file]
    assert {name: stat.st_size for name, stat in bucket.walk_files().items()} == {"a/b/y.bin": 2, "a/x.bin": 10}
    assert [*(bucket / "a").glob("*.bin")] == [file]
    file.download(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"0123456789"
    file.unlink()
    file.unlink()
    with pytest.raises(FileNotFoundError):
        file.stat()


def test_another_content_has_another_version(bucket: RemotePath) -> None:
    file = bucket / "x"
    file.write_bytes(b"first")
    before = file.stat()
    assert file.stat() == before == bucket.walk_files()["x"]
    file.write_bytes(b"other")
    assert file.stat() != before


def test_an_etag_with_quotes_and_one_without_are_one_version() -> None:
    """As adlfs tells them."""
    assert stat_of({"etag": '"0x8D"', "size": 3}) == stat_of({"etag": "0x8D", "size": 3})
    assert stat_of({"etag": '"0x8D"', "size": 3}) != stat_of({"etag": "0x8E", "size": 3})


def test_a_store_of_google_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package takes this for each of its requests, and by itself none; it is in no extra that the tests have."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(remote_path, "_made", [])
    monkeypatch.setattr(fsspec, "filesystem", lambda _, **options: given.update(options) or SimpleNamespace())
    remote_path._filesystem.__wrapped__("gs", -1)
    timeout = given["requests_timeout"]
    assert (timeout.total, timeout.sock_connect, timeout.sock_read) == (None, 10, 30)


def test_a_listing_that_takes_long_says_what_to_do(
    bucket: RemotePath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (bucket / "a" / "b").write_bytes(b"")
    monkeypatch.setattr(remote_path, "_LONG_LISTING_SECONDS", 0.05)
    asked = fsspec.filesystem("memory").find
    monkeypatch.setattr(MemoryFileSystem, "find", lambda self, *path, **how: time.sleep(0.5) or asked(*path, **how))
    assert [*bucket.walk_files()] == ["a/b"]
    [said] = caplog.messages
    assert said.startswith(f"{bucket} is listed for 0 s already")
    assert "put examples into shards" in said
