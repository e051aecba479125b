"""A run that is fetched from a bucket: whole or not at all, nothing broken, nothing that leads elsewhere."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from bucket_runs import Machines, files, mirrored, new_place, objects
from checkpoint_helpers import write
from fsspec.implementations.memory import MemoryFile

from lockstep.checkpoints import fetching
from lockstep.checkpoints.fetching import fetch_run, local_folder, reached
from lockstep.checkpoints.manifest import hash_of_json
from lockstep.checkpoints.mirror import KnownBucket, Latest, MirroredStore, store_in
from lockstep.checkpoints.retention import PINNED, Retention
from lockstep.checkpoints.store import Store
from lockstep.errors import CheckpointError, DataError, WorkdirError
from lockstep.run_files import LATEST
from lockstep.storage import retries
from lockstep.storage.remote_path import RemotePath
from lockstep.storage.retries import Ending, ended_by


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    found = Machines(tmp_path, monkeypatch)
    found.use("first")
    return found


@pytest.fixture
def place(machines: Machines) -> RemotePath:
    """A run with checkpoints of two steps, uploaded by the first machine."""
    found = new_place()
    train(found, 1, 2)
    return found


def train(place: RemotePath, *steps: int) -> Path:
    folder = fetch_run(place)
    (folder / "recipe.toml").write_text("batch_size = 8\n")
    store = mirrored(folder)
    for step in steps:
        write(store, step)
        store.mirror.settle()
    return folder


def steps(folder: Path) -> list[int]:
    return Store(folder / "checkpoints").steps()


def test_an_empty_machine_gets_all_of_it(machines: Machines, place: RemotePath) -> None:
    first = local_folder(place)
    machines.use("second")
    folder = fetch_run(place)
    assert folder != first
    assert files(folder) == files(first)
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]
    assert local_folder(str(place)) == folder != local_folder(f"{place}2")


def test_a_folder_that_is_as_new_stays(machines: Machines, place: RemotePath) -> None:
    folder = local_folder(place)
    (folder / "notes").write_text("of this machine")
    write(Store(folder / "checkpoints"), 3)  # killed before it was uploaded
    assert fetch_run(place) == folder
    assert (folder / "notes").exists()
    assert steps(folder) == [1, 2, 3]


def test_an_older_folder_is_filled(machines: Machines, place: RemotePath) -> None:
    folder = local_folder(place)
    (folder / "evaluations.jsonl").write_text("scored here\n")
    of_a_worker = folder / "refused" / "position-000000032" / "worker-1.json"  # of a host that was not the chief's
    of_a_worker.parent.mkdir(parents=True)
    of_a_worker.write_text("{}")
    (folder / "notes").write_text("of nobody")
    machines.use("second")
    train(place, 3)
    machines.use("first")
    assert steps(fetch_run(place)) == [1, 2, 3]
    assert (folder / "evaluations.jsonl").read_text() == "scored here\n"
    assert of_a_worker.exists()
    assert not (folder / "notes").exists()
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]


def test_checkpoints_that_nobody_else_has_are_set_aside(
    machines: Machines, place: RemotePath, caplog: pytest.LogCaptureFixture
) -> None:
    folder = local_folder(place)
    write(Store(folder / "checkpoints"), 9)
    machines.use("second")
    train(place, 3)
    machines.use("first")
    assert steps(fetch_run(place)) == [1, 2, 3]
    (aside,) = folder.parent.glob("*.before-*")
    assert steps(aside) == [1, 2, 9]
    assert f"taken further elsewhere, to step 3; the copy here, with step 9, is kept as {aside}" in caplog.text


def test_half_a_copy_has_no_name(machines: Machines, place: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = local_folder(place)
    write(Store(folder / "checkpoints"), 9)
    machines.use("second")
    train(place, 3)
    machines.use("first")
    links: list[Path] = []

    def die(file: Path, _: Path) -> None:
        links.append(file)
        if len(links) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "link_or_copy", die)
    with pytest.raises(KeyboardInterrupt):
        fetch_run(place)
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]


def test_records_alone(machines: Machines, place: RemotePath) -> None:
    machines.use("second")
    (place / ".lease-000001").write_bytes(b"{}")
    folder = fetch_run(place, contents=False)
    assert not local_folder(place).exists()
    assert steps(folder) == [1, 2]
    assert not list(folder.rglob("*.safetensors"))
    assert (folder / "recipe.toml").exists()
    assert (folder / ".lease-000001").exists()
    origin = KnownBucket.read(folder)
    assert origin
    assert origin.url == str(place)


def test_a_fetch_leaves_that_of_the_records_alone(
    machines: Machines, place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where `lockstep status` looks at a run while `lockstep train` of the same machine begins to go on with it."""
    machines.use("second")
    right, others = RemotePath.download, list[Path]()

    def download(self: RemotePath, file: Path) -> None:
        right(self, file)
        if not others:
            others.append(file)
            fetch_run(place)

    monkeypatch.setattr(RemotePath, "download", download)
    assert steps(fetch_run(place, contents=False)) == [1, 2]
    assert steps(local_folder(place)) == [1, 2]


def test_records_of_no_run_leave_nothing(machines: Machines, place: RemotePath) -> None:
    machines.use("second")
    nowhere = new_place()
    with pytest.raises(WorkdirError, match="There is no run in memory://"):
        fetch_run(nowhere, contents=False)
    assert not local_folder(nowhere).parent.exists()


def test_a_download_by_another_process_is_told_and_keeps_no_look_waiting(
    machines: Machines, place: RemotePath, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    machines.use("second")
    folder = local_folder(place)
    with fetching._locked(folder, place):  # of this opening of the file, as that of another process
        assert steps(fetch_run(place, contents=False)) == [1, 2]
        with pytest.raises(WorkdirError), ended_by(Ending(lambda: "it is waited for" in caplog.text)):
            fetch_run(place)
        assert not folder.exists()
    assert f"another process of this machine downloads {place}" in caplog.text
    assert steps(fetch_run(place)) == [1, 2]


def test_a_run_that_goes_on_deletes_what_is_being_fetched(
    machines: Machines, place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, right, step = store_in(local_folder(place), Retention(newest=2)), RemotePath.download, [2]
    assert isinstance(store, MirroredStore)

    def download(self: RemotePath, file: Path) -> None:
        if self.name == "parameters.safetensors" and step[0] < 4:
            step[0] += 1
            write(store, step[0])
            store.mirror.settle()
        right(self, file)

    machines.use("second")
    monkeypatch.setattr(retries, "MOST_AT_ONCE", 1)
    monkeypatch.setattr(RemotePath, "download", download)
    folder = fetch_run(place)
    assert steps(folder) == [3, 4]
    origin = KnownBucket.read(folder)
    assert origin
    assert origin.tokens == (Latest.decode((place / LATEST).read_bytes()).token,)
    assert {name: data for name, data in objects(place).items() if name != LATEST} == files(folder)


def test_all_files_are_on_the_disk_before_the_state_of_the_bucket(
    machines: Machines, place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else a power cut leaves empty files that count as those of the bucket, and are uploaded."""
    synced, right, before = set[int](), os.fsync, list[set[int]]()

    def fsync(descriptor: int) -> None:
        right(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def write_marker(self: KnownBucket, folder: Path) -> None:
        before.append({*synced})

    machines.use("second")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(KnownBucket, "write", write_marker)
    folder = fetch_run(place)
    paths = [folder, folder / "checkpoints", *filter(Path.is_file, folder.rglob("*"))]
    assert [path for path in paths if path.stat().st_ino not in before[-1]] == []


def test_a_checkpoint_that_comes_between_listing_and_latest_is_fetched(
    machines: Machines, place: RemotePath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, right = mirrored(local_folder(place)), RemotePath.read_range

    def read_range(self: RemotePath, size: int, offset: int) -> bytes:
        if self.name == LATEST and store.newest() == 2:
            write(store, 3)
            store.mirror.settle()
        return right(self, size, offset)

    machines.use("second")
    monkeypatch.setattr(RemotePath, "read_range", read_range)
    assert steps(fetch_run(place)) == [1, 2, 3]  # or else never: what is known of the bucket is its newest state
    assert "damaged" not in caplog.text


def test_a_run_that_its_user_deletes_is_not_gone_on_with(
    machines: Machines, place: RemotePath, caplog: pytest.LogCaptureFixture
) -> None:
    folder = local_folder(place)
    for name in place.walk_files():
        (place / name).unlink()
    (place / ".lease-000002").write_bytes(b"{}")
    fetch_run(place, contents=False)
    assert steps(folder) == [1, 2]
    assert fetch_run(place) == folder
    assert steps(folder) == []
    (aside,) = folder.parent.glob("*.before-*")
    assert steps(aside) == [1, 2]
    assert f"{place} has been deleted on the bucket; the copy here is kept as {aside}" in caplog.text
    assert steps(train(place, 1)) == [1]


def test_lines_of_evaluate_stay_on_each_machine(machines: Machines, place: RemotePath) -> None:
    (local_folder(place) / "evaluations.jsonl").write_text("of the first\n")
    train(place, 3)
    machines.use("second")
    folder = fetch_run(place)
    assert not (folder / "evaluations.jsonl").exists()
    (folder / "evaluations.jsonl").write_text("of the second\n")
    (place / "evaluations.jsonl").write_bytes(b"of somebody\n")
    machines.use("first")
    assert (train(place, 4) / "evaluations.jsonl").read_text() == "of the first\n"
    machines.use("second")
    assert fetch_run(place) == folder
    assert (folder / "evaluations.jsonl").read_text() == "of the second\n"


def test_who_reads_while_another_process_fetches_reads_on(
    machines: Machines, place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is renamed, replaced or deleted, a checkpoint is there whole, and so is each other file."""
    folder = local_folder(place)
    write(Store(folder / "checkpoints"), 9)  # which nobody else has
    machines.use("second")
    further = store_in(fetch_run(place), Retention(newest=2))
    for step in (3, 4):
        (further.folder.parent / "recipe.toml").write_text(f"batch_size = {step}\n")
        write(further, step)
    assert isinstance(further, MirroredStore)
    further.mirror.settle()
    machines.use("first")
    before, looks = files(folder), list[int]()

    def look() -> None:
        found = Store(folder / "checkpoints").read()
        assert found
        looks.append(found.step)
        assert (folder / "recipe.toml").read_text() in ("batch_size = 8\n", "batch_size = 4\n")

    values = "checkpoints/step-00000002/values.json"
    with (folder / values).open("rb") as opened, monkeypatch.context() as patch:
        for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "touch"):
            right = getattr(Path, name)

            def watched(self: Path, *arguments: Any, right: Any = right, **options: Any) -> Any:
                done = right(self, *arguments, **options)
                look()
                return done

            patch.setattr(Path, name, watched)
        assert fetch_run(place) == folder
        assert opened.read() == before[values]
    assert {*looks} == {4, 9}
    assert steps(folder) == [3, 4]
    (aside,) = folder.parent.glob("*.before-*")
    assert files(aside) == before


def test_a_fetch_that_is_killed_is_made_good(
    machines: Machines, place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each change of the folder: the next fetch ends with what the bucket holds."""
    folder = local_folder(place)
    shutil.copytree(folder, folder.with_name("before"))
    machines.use("second")
    further = store_in(fetch_run(place), Retention(newest=2))
    write(further, 3, 4)
    (further.folder.parent / "notes").write_text("another file")
    assert isinstance(further, MirroredStore)
    further.mirror.settle()
    machines.use("first")
    for number in range(100):
        shutil.rmtree(folder)
        shutil.copytree(folder.with_name("before"), folder)
        left = [number]

        def die(self: Path, *arguments: Any, right: Any, left: list[int] = left, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return right(self, *arguments, **options)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for name in ("rename", "replace", "unlink"):
                patch.setattr(Path, name, functools.partialmethod(die, right=getattr(Path, name)))
            fetch_run(place)
        assert steps(fetch_run(place)) == [3, 4]
        assert {name: data for name, data in objects(place).items() if name != LATEST} == files(folder)
        if left[0] >= 0:
            break
    assert 4 < number < 99


def test_signed_queries_are_not_told(place: RemotePath) -> None:
    with pytest.raises(WorkdirError) as caught, reached(place):
        raise OSError("GET https://me:secret@host/key?sig=secret failed")
    assert caught.value.given == "OSError: GET https://host/key failed"


# What is broken -------------------------------------------------------------------------------------------------------


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def another_hash(data: bytes) -> bytes:
    """A manifest that was made by hand, whole in itself."""
    body = json.loads(data)
    del body["sha256"]
    body["files"][0]["sha256"] = "0" * 64
    return json.dumps(body | {"sha256": hash_of_json(body)}).encode()


def leads_elsewhere(data: bytes) -> bytes:
    body = json.loads(data)
    del body["sha256"]
    body["files"][0]["name"] = "../../../stolen.safetensors"
    return json.dumps(body | {"sha256": hash_of_json(body)}).encode()


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("parameters.safetensors", flip, "sha256"),
        ("parameters.safetensors", lambda data: data[:-1], "bytes, as the manifest says"),
        ("parameters.safetensors", lambda data: data + b"x", "bytes, as the manifest says"),
        ("parameters.safetensors", None, "no such object"),
        ("manifest.json", lambda data: data.replace(b'"step": 2', b'"step": 1'), "as it says itself"),
        ("manifest.json", another_hash, "sha256"),
        ("manifest.json", leads_elsewhere, "stolen"),
        ("manifest.json", lambda data: data + b" " * (1 << 20), "a manifest of at most"),
        ("manifest.json", None, "no such object"),
    ],
)
def test_a_broken_checkpoint_is_told_and_never_chosen(
    machines: Machines,
    place: RemotePath,
    caplog: pytest.LogCaptureFixture,
    name: str,
    change: Callable[[bytes], bytes] | None,
    told: str,
) -> None:
    file = place / "checkpoints" / "step-00000002" / name
    if change:
        file.write_bytes(change(file.read_bytes()))
    else:
        file.unlink()
    machines.use("second")
    assert steps(fetch_run(place)) == [1]
    assert "step-00000002" in caplog.text
    assert told in caplog.text
    assert "It is left out." in caplog.text


@pytest.mark.parametrize(
    ("name", "change", "is_known", "has_latest"),
    [
        ("parameters.safetensors", lambda data: data[:-1], True, True),
        ("parameters.safetensors", None, True, True),
        ("parameters.safetensors", None, True, False),
        ("manifest.json", flip, False, True),
        ("manifest.json", None, False, False),
    ],
)
def test_a_whole_copy_outlives_a_broken_one_on_the_bucket(
    machines: Machines,
    place: RemotePath,
    name: str,
    change: Callable[[bytes], bytes] | None,
    is_known: bool,
    has_latest: bool,
) -> None:
    """Another machine went on: where the manifest there tells, the copy here is that one, else it is set aside."""
    machines.use("second")
    train(place, 3)
    file = place / "checkpoints" / "step-00000002" / name
    before = file.read_bytes()
    if change:
        file.write_bytes(change(before))
    else:
        file.unlink()
    if not has_latest:
        (place / LATEST).unlink()
    machines.use("first")
    folder = fetch_run(place)
    assert steps(folder) == ([1, 2, 3] if is_known else [1, 3])
    copies = [folder] if is_known else [*folder.parent.glob("*.before-*")]
    assert [Store(copy / "checkpoints").read(2) is not None for copy in copies] == [True]
    if is_known:
        train(place, 4)
        assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("step", "change", "is_told"),
    [
        (2, lambda file: file.write_bytes(file.read_bytes()[:-1]), True),
        (2, lambda file: file.write_bytes(flip(file.read_bytes())), True),
        (2, lambda file: shutil.rmtree(file.parent), True),
        (1, lambda file: file.unlink(), True),
        (1, lambda file: file.touch(), False),
    ],
)
def test_a_damaged_copy_is_fetched_again(
    machines: Machines,
    place: RemotePath,
    caplog: pytest.LogCaptureFixture,
    step: int,
    change: Callable[[Path], object],
    is_told: bool,
) -> None:
    """Though the bucket is as this folder knows it; of other files the folder's own stay."""
    folder = local_folder(place)
    before = files(folder)
    (folder / "notes").write_text("of this machine")
    (place / "checkpoints" / "step-00000002" / PINNED).write_bytes(b"")
    change(folder / "checkpoints" / f"step-0000000{step}" / "parameters.safetensors")
    assert fetch_run(place) == folder
    assert {name: data for name, data in files(folder).items() if PINNED not in name} == {
        **before,
        "notes": b"of this machine",
    }
    assert (f"step-0000000{step} is damaged or gone; it is downloaded again" in caplog.text) == is_told
    caplog.clear()
    fetch_run(place)
    assert not caplog.text


def test_what_is_damaged_here_and_there_is_told(
    machines: Machines, place: RemotePath, caplog: pytest.LogCaptureFixture
) -> None:
    for root in (place, local_folder(place)):
        file = root / "checkpoints" / "step-00000002" / "parameters.safetensors"
        file.write_bytes(flip(file.read_bytes()))
    assert steps(fetch_run(place)) == [1, 2]
    assert "is damaged. Given: sha256" in caplog.text
    assert [*local_folder(place).parent.glob(".*.partial")] == []


@pytest.mark.parametrize("has_latest", [True, False])
def test_where_all_are_broken_nothing_begins_afresh(machines: Machines, place: RemotePath, has_latest: bool) -> None:
    for step in (1, 2):
        (place / "checkpoints" / f"step-0000000{step}" / "values.json").unlink()
    if not has_latest:
        (place / LATEST).unlink()
    machines.use("second")
    with pytest.raises(CheckpointError, match="Every checkpoint in memory://") as caught:
        fetch_run(place)
    assert caught.value.exit_code == 1
    assert not local_folder(place).exists()


def test_without_latest_what_is_whole_counts(machines: Machines, place: RemotePath) -> None:
    (place / LATEST).unlink()
    (place / "checkpoints" / "step-00000002" / "values.json").unlink()
    machines.use("second")
    assert steps(fetch_run(place)) == [1]


def test_a_first_upload_that_was_cut_off_is_no_run(machines: Machines) -> None:
    place = new_place()
    (place / "checkpoints" / "step-00000000" / "values.json").write_bytes(b"{}")
    folder = fetch_run(place)
    assert steps(folder) == []
    train(place, 1)
    assert "checkpoints/step-00000000/values.json" not in objects(place)


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_folder_of_something_else_is_refused(machines: Machines) -> None:
    place = new_place()
    (place / "photo.jpg").write_bytes(b"x")
    with pytest.raises(WorkdirError, match="holds something that is not a run") as caught:
        fetch_run(place)
    assert "1 objects, 'photo.jpg' among them" in str(caught.value)


def test_names_that_lead_elsewhere_are_left_out(
    machines: Machines, place: RemotePath, caplog: pytest.LogCaptureFixture
) -> None:
    listing = RemotePath.walk_files(place)
    bad = ["../outside", "a/../../outside", ".mirror.json", "a\\b", "x" * 300, ".hidden/x"]
    with pytest.MonkeyPatch.context() as patch:
        some = next(iter(listing.values()))
        patch.setattr(RemotePath, "walk_files", lambda _: listing | dict.fromkeys(bad, some))
        machines.use("second")
        folder = fetch_run(place)
    assert {*files(folder)} == {name for name in listing if name != LATEST}
    for name in bad:
        assert repr(f"{place}/{name}") in caplog.text


def test_objects_that_no_path_names_are_left_out(machines: Machines, place: RemotePath) -> None:
    store = fsspec.filesystem("memory")
    for name in (f"/{place.key}//notes", f"/{place.key}/./more"):
        store.store[name] = MemoryFile(store, name, b"x")
    machines.use("second")
    assert "recipe.toml" in files(fetch_run(place))


def test_no_room_is_told_before_anything_is_downloaded(
    machines: Machines, place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.use("second")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(WorkdirError, match="does not fit on this machine") as caught:
        fetch_run(place)
    assert "100 free" in str(caught.value)
    assert not local_folder(place).exists()


def test_a_download_that_fails_leaves_what_was_there(
    machines: Machines, place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.use("second")
    train(place, 3)
    machines.use("first")
    before = files(local_folder(place))

    def fail(*_: object) -> None:
        raise PermissionError("no rights")

    monkeypatch.setattr(RemotePath, "download", fail)
    with pytest.raises(WorkdirError, match="cannot be used") as caught:
        fetch_run(place)
    assert "no rights" in str(caught.value)
    assert "credentials" in caught.value.hint
    assert files(local_folder(place)) == before


@pytest.mark.parametrize("url", ["memory://bucket", "memory://"])
def test_a_whole_bucket_is_no_workdir(url: str) -> None:
    with pytest.raises((WorkdirError, DataError)):
        fetch_run(url)


@pytest.mark.parametrize("name", ["mine", "mine[1]"])
def test_what_a_killed_process_has_left_goes(machines: Machines, name: str) -> None:
    place = new_place().parent / name
    train(place, 1)
    machines.use("second")
    folder = local_folder(place)
    (folder.parent / f".{folder.name}.{'0a' * 16}.partial").mkdir(parents=True)
    fetch_run(place)
    assert sorted(os.listdir(folder.parent)) == [f".{folder.name}.lock", folder.name]  # noqa: PTH208
    assert fetching.fcntl is not None


@pytest.mark.parametrize("is_deleted", [False, True])
def test_an_older_folder_does_not_go_on_where_latest_is_broken(
    machines: Machines, place: RemotePath, is_deleted: bool
) -> None:
    machines.use("second")
    newer = train(place, 3, 4)
    if is_deleted:
        (place / LATEST).unlink()
    else:
        (place / LATEST).write_bytes(b"{")
    assert fetch_run(place) == newer
    write(Store(newer / "checkpoints"), 5)
    assert steps(fetch_run(place)) == [1, 2, 3, 4, 5]  # what the folder goes on from is there
    machines.use("first")
    assert steps(fetch_run(place)) == [1, 2, 3, 4]
