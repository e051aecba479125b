from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from checkpoint_helpers import assert_consistent, write

from lockstep.checkpoints import Store
from lockstep.checkpoints import store as store_module
from lockstep.checkpoints.encoding import read_tensors
from lockstep.errors import CheckpointError

FILES = ["parameters.safetensors", "buffers.safetensors", "average.safetensors", "values.json", "manifest.json"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "checkpoints")
    write(store, 10, 20)
    return store


def rewrite_manifest(path: Path, change: Callable[[dict], None]) -> None:
    """A manifest that says something else, and is in itself as it should be."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    change(manifest)
    compact = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["sha256"] = hashlib.sha256(compact.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_seen(store: Store, name: str) -> None:
    """One bit of every byte; of the others in a byte, chance decides."""
    draw = random.Random(name)
    file = store.path(20) / name
    good = file.read_bytes()
    for offset in range(len(good)):
        bad = bytearray(good)
        bad[offset] ^= 1 << draw.randrange(8)
        file.write_bytes(bad)
        assert assert_consistent(store.read()) == 10, (offset, bad[offset])
    file.write_bytes(good)
    assert assert_consistent(store.read()) == 20


@pytest.mark.parametrize("name", FILES)
def test_any_truncated_file_is_seen(store: Store, name: str) -> None:
    file = store.path(20) / name
    size = file.stat().st_size
    for shorter in sorted({0, 1, 7, 8, size // 2, size - 2, size - 1} - {size}, reverse=True):
        os.truncate(file, shorter)
        if (name, shorter) != ("manifest.json", size - 1):  # its last byte is the end of the line
            assert assert_consistent(store.read()) == 10, shorter


@pytest.mark.parametrize("name", FILES)
def test_missing_and_longer_files(store: Store, name: str) -> None:
    file = store.path(20) / name
    good = file.read_bytes()
    file.write_bytes(good + b"\0")
    assert assert_consistent(store.read()) == 10
    file.unlink()
    assert assert_consistent(store.read()) == 10


def test_the_warning_names_file_and_hashes(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    file = store.path(20) / "parameters.safetensors"
    good = file.read_bytes()
    bad = good[:-1] + b"\xff"
    file.write_bytes(bad)
    store.read()
    assert caplog.messages == [
        f"{file} is damaged. Given: sha256 {hashlib.sha256(bad).hexdigest()}; "
        f"expected: sha256 {hashlib.sha256(good).hexdigest()}. Trying the one before."
    ]
    assert caplog.records[0].levelname == "WARNING"


def test_a_size_of_the_disk_is_refused_before_it_is_allocated(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A file of 4 TiB, nearly all of it a hole: reading or allocating it would not end well."""
    file = store.path(20) / "buffers.safetensors"
    size = file.stat().st_size
    os.truncate(file, 1 << 42)
    assert assert_consistent(store.read()) == 10
    assert f"Given: {1 << 42:,} bytes; expected: {size:,} bytes." in caplog.text


def test_a_huge_manifest_is_not_read(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    os.truncate(store.path(20) / "manifest.json", 1 << 42)
    assert assert_consistent(store.read()) == 10
    assert "Given: more than 1,048,576 bytes; expected: at most 1,048,576 bytes." in caplog.text


def test_one_of_an_older_version_that_is_not_finite_is_passed_over(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as older:
        older.setattr("lockstep.checkpoints.store.find_nonfinite", lambda *_: [])
        store.write(30, {"parameters": {"w": torch.tensor([1.0, float("nan")])}}, {})
    assert assert_consistent(store.read()) == 20
    assert "step-00000030 is damaged. Given: values that are not finite: 'w' of parameters;" in caplog.text
    asked_for = store.read(30)
    assert asked_for is not None, "to be looked at"
    assert asked_for.step == 30


def test_a_store_of_damaged_checkpoints_names_each(store: Store) -> None:
    (store.path(10) / "values.json").unlink()
    (store.path(20) / "manifest.json").write_bytes(b"[1]")
    with pytest.raises(CheckpointError) as raised:
        store.read()
    assert str(raised.value) == (
        f"Every checkpoint in {store.folder} is damaged.\n"
        f"  given:    {store.path(20) / 'manifest.json'} is damaged. (a JSON list); "
        f"{store.path(10) / 'values.json'} is damaged. (No such file or directory)\n"
        "  expected: at least one that is as it was written\n"
        "  hint:     put one back from a copy, or move the folder away to start the run afresh"
    )


def test_where_those_before_a_step_are_damaged_there_is_none_but_a_later_one(store: Store) -> None:
    (store.path(10) / "values.json").unlink()
    assert store.read(before=20) is None
    assert assert_consistent(store.read()) == 20


def test_the_one_that_was_asked_for_is_damaged(store: Store) -> None:
    file = store.path(20) / "values.json"
    file.write_bytes(file.read_bytes() + b" ")
    size = file.stat().st_size
    with pytest.raises(CheckpointError) as raised:
        store.read(20)
    assert str(raised.value) == (
        f"{file} is damaged.\n"
        f"  given:    step 20: {size} bytes, not {size - 1} bytes\n"
        "  expected: one of the steps there are: 10, 20\n"
        "  hint:     ask for one of these, or for no step to get the newest that is intact"
    )


def test_a_renamed_folder_is_no_other_step(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.path(10).rename(store.path(30))
    assert assert_consistent(store.read()) == 20
    assert "Given: step 10; expected: step 30, as the folder's name says." in caplog.text


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_an_unknown_format_is_an_error_and_no_damage(store: Store, version: object) -> None:
    """Falling back would silently lose what a later version of Lockstep has trained."""
    rewrite_manifest(store.path(20), lambda manifest: manifest.update(format=version))
    for action in (store.read, lambda: store.read(20), lambda: write(store, 20)):
        with pytest.raises(CheckpointError) as raised:
            action()
        assert str(raised.value) == (
            f"{store.path(20) / 'manifest.json'} is in a format that this version of Lockstep does not know.\n"
            f"  given:    format {version!r}\n"
            "  expected: format 1\n"
            "  hint:     use the version of Lockstep that wrote it, or a later one"
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["files"][0].update(name="../../secret.safetensors"), "values.json, and sections with names"),
        (lambda m: m["files"][0].update(name="/etc/passwd"), "values.json, and sections with names"),
        (lambda m: m["files"].pop(), "values.json, and sections with names"),
        (lambda m: m["files"][0].update(size_bytes=1 << 60), f"{1 << 60:,} bytes"),
        (lambda m: m["files"][0].update(size_bytes=-1), "-1 bytes"),
        (lambda m: m["files"][0].update(size_bytes="1"), "sizes that are no numbers of bytes"),
        (lambda m: m["files"][0].update(name=1), "other fields"),
        (lambda m: m["files"][0].update(mode="w"), "other fields"),
        (lambda m: m.update(files=3), "other fields"),
        (lambda m: m.update(step="x"), "other fields"),
        (lambda m: m.update(step=float("inf")), "other fields"),
        (lambda m: m.update(scores={"loss": float("nan")}), "scores that are not finite"),
        (lambda m: m.pop("saved_unix_seconds"), "other fields (KeyError('saved_unix_seconds'))"),
    ],
)
def test_manifests_that_lie(store: Store, change, said: str, caplog: pytest.LogCaptureFixture) -> None:
    rewrite_manifest(store.path(20), change)
    assert assert_consistent(store.read()) == 10
    assert said in caplog.text


@pytest.mark.parametrize("content", [b"", b"null", b"\xff\xfe", b"[" * 500_000, b'{"format": 1'])
def test_manifests_that_are_none(store: Store, content: bytes) -> None:
    (store.path(20) / "manifest.json").write_bytes(content)
    assert assert_consistent(store.read()) == 10


@pytest.mark.parametrize(("name", "content"), [("buffers.safetensors", b"12345678{}"), ("values.json", b"[]")])
def test_right_hashes_of_wrong_content(
    store: Store, name: str, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (store.path(20) / name).write_bytes(content)

    def adopt(manifest: dict) -> None:
        for file in manifest["files"]:
            if file["name"] == name:
                file.update(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

    rewrite_manifest(store.path(20), adopt)
    assert assert_consistent(store.read()) == 10
    assert f"{store.path(20) / name} is damaged. Given: content that cannot be read (" in caplog.text


@pytest.mark.parametrize("name", FILES[:-1])
def test_a_damaged_checkpoint_is_not_held_until_garbage_is_collected(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    decoded: list[weakref.ref[torch.Tensor]] = []

    def noted(file: BinaryIO, size_bytes: int) -> tuple[dict[str, torch.Tensor], list[bytes | memoryview]]:
        tensors, parts = read_tensors(file, size_bytes)
        decoded.extend(map(weakref.ref, tensors.values()))
        return tensors, parts

    monkeypatch.setattr(store_module, "read_tensors", noted)
    path = store.path(20) / name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    gc.disable()
    try:
        found = store.read()
        held = [tensor for each in decoded if (tensor := each()) is not None]
    finally:
        gc.enable()
    assert found is not None
    assert found.step == 10
    assert {id(tensor) for tensor in held} == {id(t) for members in found.tensors.values() for t in members.values()}
