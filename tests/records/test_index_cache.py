"""Indices that are kept on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.records.index_cache import load_index, save_index
from lockstep.records.open_files import Version

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


def test_a_damaged_index_is_reported_and_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_index(tmp_path / "data", KIND, VERSION, b"content")
    kept = tmp_path / ".lockstep-index" / "data"
    kept.write_bytes(kept.read_bytes().replace(b"content", b"CONTENT"))
    assert load_index(tmp_path / "data", KIND, VERSION, bytes) is None
    assert caplog.messages == [f"{kept} is damaged: the records are counted again"]
