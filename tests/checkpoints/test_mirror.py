"""The mirror of a run's folder: what is on the bucket at any moment, failing uploads, retention, other machines."""

from __future__ import annotations

import logging
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bucket_runs import Machines, files, mirrored, new_place, objects, on_each_write
from checkpoint_helpers import sections_of, write
from fsspec.implementations.memory import MemoryFileSystem

from lockstep.checkpoints import mirror as mirror_module
from lockstep.checkpoints.fetching import fetch_run
from lockstep.checkpoints.manifest import Manifest
from lockstep.checkpoints.mirror import (
    KnownBucket,
    Latest,
    MirroredStore,
    OnBucket,
    UploadError,
    mirror_of,
    shown_path,
    store_in,
    token_of,
)
from lockstep.checkpoints.retention import Retention
from lockstep.checkpoints.store import Store
from lockstep.errors import DataError, LockstepError, WorkdirError
from lockstep.owner import this_process
from lockstep.run_files import LATEST
from lockstep.storage import retries
from lockstep.storage.remote_path import RemotePath
from lockstep.workers.rank import join, leave


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    found = Machines(tmp_path, monkeypatch)
    found.use("first")
    return found


@pytest.fixture
def place() -> RemotePath:
    return new_place()


def train(place: RemotePath, *steps: int, retention: Retention | None = None) -> Path:
    """Do what a run does at these steps: lines in a file, then a checkpoint; all of it is on the bucket then."""
    folder = fetch_run(place)
    store = store_in(folder, retention)
    assert isinstance(store, MirroredStore)
    for step in steps:
        log_line(folder, step)
        write(store, step)
        store.mirror.settle()
    return folder


def log_line(folder: Path, step: int) -> None:
    (folder / "recipe.toml").write_text("batch_size = 8\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step}}}\n')


def test_a_folder_is_on_the_bucket_as_it_is(machines: Machines, place: RemotePath) -> None:
    folder = train(place, 0, 3)
    (folder / ".lease-000001").write_text("of this machine")
    (folder / "summaries").mkdir()
    (folder / "summaries" / "events").write_bytes(b"events")
    train(place, 5)
    found = objects(place)
    assert Latest.decode(found.pop(LATEST)).checkpoints == (0, 3, 5)
    assert found == files(folder)
    assert shown_path(folder) == str(place)
    assert shown_path(folder.parent) == str(folder.parent)


def test_what_is_there_is_not_sent_again(
    machines: Machines, place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train(place, 3)
    count = [0]
    on_each_write(monkeypatch, lambda: count.__setitem__(0, count[0] + 1))
    mirrored(folder).mirror.settle()
    assert count == [0]
    machines.use("first")  # a process that starts again, and does not know
    train(place, 3)
    assert 1 <= count[0] <= 3  # the log, which has another line, and the recipe


@pytest.mark.parametrize("is_recovered_elsewhere", [False, True])
def test_an_upload_may_fail_at_any_request(
    machines: Machines, place: RemotePath, monkeypatch: pytest.MonkeyPatch, is_recovered_elsewhere: bool
) -> None:
    """The law: the bucket holds a whole checkpoint, and files that are not older than it; a later upload mends all."""
    retention = Retention(newest=1)
    folder = train(place, 10, retention=retention)
    may_write, failed = [10**6], 0

    def fail_at_last() -> None:
        may_write[0] -= 1
        if may_write[0] < 0:
            raise OSError("the link is down")

    on_each_write(monkeypatch, fail_at_last)
    for number in range(1, 30):
        machines.use("first")
        store = store_in(folder, retention)
        assert isinstance(store, MirroredStore)
        step, may_write[0] = 10 + number, number - 1
        log_line(folder, step)
        write(store, step)
        store.mirror._thread and store.mirror._thread.join()
        is_whole, may_write[0] = may_write[0] >= 0, 10**6
        failed += not is_whole
        machines.use(f"other-{number}")
        copy = fetch_run(place)
        checkpoint = Store(copy / "checkpoints").read()
        assert checkpoint
        assert checkpoint.step in ((step,) if is_whole else (step - 1, step))
        assert checkpoint.tensors["parameters"]["conv.bias"][0] == checkpoint.step
        assert f'{{"step": {checkpoint.step}}}\n' in (copy / "metrics.jsonl").read_text()
        if is_recovered_elsewhere and not is_whole:
            assert train(place, step + 1, retention=retention) == copy
            return
        machines.use("first")
        train(place, step, retention=retention)
        found = objects(place)
        del found[LATEST]
        assert found == files(folder)
        if is_whole:
            break
    assert failed > 5
    assert is_whole


@pytest.mark.parametrize(
    ("error", "told", "what"),
    [
        (PermissionError("no rights"), "PermissionError: no rights", "see that the credentials are valid"),
        (OSError("no route"), "OSError: no route", "see that the bucket can be reached"),
        (DataError("Out of date.", given="a token", expected="", hint=""), "Out of date. a token", "see that the"),
    ],
)
def test_a_failing_upload_is_told_once_and_tried_again(
    machines: Machines,
    place: RemotePath,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    told: str,
    what: str,
) -> None:
    caplog.set_level(logging.INFO)
    folder = train(place, 1)
    store, is_down = mirrored(folder), [True]

    def fail() -> None:
        if is_down[0]:
            raise error

    on_each_write(monkeypatch, fail)
    for step in (2, 3):
        write(store, step)
        store.mirror._thread and store.mirror._thread.join()
    with pytest.raises(LockstepError) as caught:
        store.mirror.settle()
    assert caught.value.given == told
    assert str(folder) in caught.value.hint
    assert caught.value.exit_code == 1
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert line.startswith(f"the checkpoint of step 2 is not uploaded to {place}: {told}; the run goes on")
    assert what in line
    is_down[0] = False
    write(store, 4)
    store.mirror._thread and store.mirror._thread.join()
    assert caplog.messages[-1] == f"{place} can be written again: all up to step 4 is there"
    assert Latest.decode((place / LATEST).read_bytes()).checkpoints == (1, 2, 3, 4)


def test_a_slow_upload_holds_nobody_up_and_sends_the_newest(
    machines: Machines, place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train(place, 1)
    store, may_go_on = store_in(folder, Retention(newest=1)), threading.Event()
    assert isinstance(store, MirroredStore)
    with monkeypatch.context() as patched:
        on_each_write(patched, may_go_on.wait)
        write(store, 2, 3, 4, 5)  # retention deletes here what is being uploaded
        assert store.steps() == [5]
        assert OnBucket.look(place).latest == Latest.decode((place / LATEST).read_bytes())
        may_go_on.set()
        store.mirror.settle()
    assert Latest.decode((place / LATEST).read_bytes()).checkpoints == (5,)
    assert {name.split("/")[1] for name in objects(place) if name.startswith("checkpoints")} == {"step-00000005"}


def test_retention_of_the_folder_is_that_of_the_bucket(machines: Machines, place: RemotePath) -> None:
    retention = Retention(newest=2)
    train(place, 1, 2, retention=retention)
    (place / "checkpoints" / "step-00000001" / "pinned").write_bytes(b"")  # by somebody, there alone
    train(place, 3, 4, 5, retention=retention)
    assert Latest.decode((place / LATEST).read_bytes()).checkpoints == (1, 4, 5)
    machines.use("second")
    folder = train(place, 6, retention=retention)
    assert Store(folder / "checkpoints").steps() == [1, 5, 6]
    assert Latest.decode((place / LATEST).read_bytes()).checkpoints == (1, 5, 6)


def test_a_pin_that_comes_later_is_sent(machines: Machines, place: RemotePath) -> None:
    retention = Retention(newest=2)
    folder = train(place, 1, 2, retention=retention)
    (folder / "checkpoints" / "step-00000001" / "pinned").touch()
    train(place, 3, retention=retention)
    machines.use("second")
    assert Store(train(place, 4, 5, retention=retention) / "checkpoints").steps() == [1, 4, 5]


def test_a_settle_that_has_failed_is_not_made_again_at_the_end(
    machines: Machines, place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, tries = mirrored(train(place, 1)).mirror, list[int]()
    write(Store(mirror.folder / "checkpoints"), 2)

    def fail() -> None:
        tries.append(1)
        raise OSError("the link is down")

    monkeypatch.setattr(mirror, "_newest", 2)
    with monkeypatch.context() as patched:
        on_each_write(patched, fail)
        with pytest.raises(UploadError):
            mirror.settle()
        mirror.close()
    assert len(tries) == 1


@pytest.mark.parametrize("is_signalled", [True, False])
def test_a_stop_ends_the_tries(
    machines: Machines,
    place: RemotePath,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_signalled: bool,
) -> None:
    """A signal that comes while the upload is waited for, or the end of a run that was stopped."""
    store, tries = mirrored(train(place, 1)), list[str]()

    def fail(_: MemoryFileSystem, path: str, *__: object, **___: object) -> None:
        tries.append(path)
        raise OSError("no route to host")

    monkeypatch.setattr(mirror_module, "_STOP_SECONDS", 0.2)
    monkeypatch.setattr(retries.random, "uniform", lambda *_: 60.0)
    leave()
    with monkeypatch.context() as patched:
        for name in ("pipe_file", "put_file"):
            patched.setattr(MemoryFileSystem, name, fail)
        write(store, 2)
        began = time.monotonic()
        if is_signalled:
            threading.Timer(0.3, setattr, (join().pulse, "stop_requested", "SIGTERM")).start()
            with pytest.raises(UploadError, match="is not on the bucket as it is here"):
                store.mirror.settle()
        else:
            for _ in range(2):
                store.mirror.settle(stops=True)
        store.mirror.close()
    assert time.monotonic() - began < 30.0
    assert len(tries) == 1  # what the thread has tried is not tried again
    assert caplog.text.count("is not on the bucket as it is here") == (not is_signalled)
    assert store.steps() == [1, 2]
    leave()
    train(place, 3)
    assert Latest.decode((place / LATEST).read_bytes()).checkpoints == (1, 2, 3)


def test_a_checkpoint_that_somebody_deletes_here_stays_there(machines: Machines, place: RemotePath) -> None:
    folder = train(place, 1, 2)
    for file in (folder / "checkpoints" / "step-00000001").iterdir():
        file.unlink()
    (folder / "checkpoints" / "step-00000001").rmdir()
    train(place, 3)
    assert Latest.decode((place / LATEST).read_bytes()).checkpoints == (1, 2, 3)


def test_scores_that_come_later_are_sent(machines: Machines, place: RemotePath) -> None:
    store = mirrored(train(place, 1))
    store.write(1, sections_of(1), {"step": 1}, {"validation/top1": 0.5})
    store.mirror.settle()
    folder = place / "checkpoints" / "step-00000001"
    found = Manifest.decode((folder / "manifest.json").read_bytes(), folder)
    assert found.scores == {"validation/top1": 0.5}


def test_the_result_goes_where_a_run_begins_again(machines: Machines, place: RemotePath) -> None:
    folder = train(place, 1)
    (folder / "result.json").write_text("{}")
    train(place, 2)
    assert (place / "result.json").exists()
    machines.use("second")
    (fetch_run(place) / "result.json").unlink()
    train(place, 3)
    assert not (place / "result.json").exists()


def test_another_machine_has_gone_on(machines: Machines, place: RemotePath) -> None:
    folder = train(place, 1)
    store = mirrored(folder)
    machines.use("second")
    train(place, 2)
    store.mirror._sent = None  # as after a failure
    write(store, 3)
    with pytest.raises(WorkdirError, match="has been taken further by another process"):
        store.mirror.settle()
    with pytest.raises(WorkdirError):
        store.mirror.raise_if_lost()
    assert Latest.decode((place / LATEST).read_bytes()).checkpoints == (1, 2)


def test_a_lost_lease_switches_nothing(machines: Machines, place: RemotePath) -> None:
    store = mirrored(train(place, 1))
    before = objects(place)

    def lost() -> None:
        raise WorkdirError("taken over", given="", expected="", hint="")

    store.mirror.check = lost
    write(store, 2)
    with pytest.raises(WorkdirError, match="taken over"):
        store.mirror.settle()
    assert objects(place) == before


def test_a_try_after_the_run_is_taken_over_writes_no_latest(
    machines: Machines, place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = mirrored(train(place, 1))
    before, right, failed = (place / LATEST).read_bytes(), MemoryFileSystem.pipe_file, list[str]()

    def fail_once(self: MemoryFileSystem, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if path.endswith(LATEST) and not failed:
            failed.append(path)
            raise OSError("timeout")
        right(self, path, value, mode, **options)

    def check() -> None:
        if failed:
            raise WorkdirError("taken over", given="", expected="", hint="")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fail_once)
    monkeypatch.setattr(retries, "_FIRST_WAIT_SECONDS", 0.0)
    store.mirror.check = check
    write(store, 2)
    with pytest.raises(WorkdirError, match="taken over"):
        store.mirror.settle()
    assert failed
    assert (place / LATEST).read_bytes() == before


def test_without_a_lease_what_another_machine_has_made_is_not_overwritten(
    machines: Machines, place: RemotePath
) -> None:
    store = mirrored(train(place, 1))
    machines.use("second")
    train(place, 2)
    before = objects(place)
    write(store, 2, 3)
    with pytest.raises(WorkdirError, match="has been taken further by another process"):
        store.mirror.settle()
    assert objects(place) == before


def test_a_copy_of_the_folder_is_no_mirror(machines: Machines, place: RemotePath, tmp_path: Path) -> None:
    folder = train(place, 1)
    (tmp_path / "link").symlink_to(folder)
    assert isinstance(store_in(tmp_path / "link"), MirroredStore)
    shutil.copytree(folder, tmp_path / "copy")
    assert not isinstance(store_in(tmp_path / "copy"), MirroredStore)
    assert fetch_run(place) == folder


def test_a_huge_latest_is_not_read(machines: Machines, place: RemotePath) -> None:
    store = mirrored(train(place, 1))
    (place / LATEST).write_bytes(b"[" * (1 << 25))
    tracemalloc.start()
    try:
        store.mirror.check_latest()
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


def test_whoever_holds_a_folder_is_written_down(machines: Machines, place: RemotePath) -> None:
    folder = train(place, 1)
    mirror = mirror_of(folder)
    assert mirror
    mirror.hold(this_process())
    held = KnownBucket.read(folder)
    assert held
    assert held.is_held
    machines.use("second")
    train(place, 2)
    machines.use("first")
    assert fetch_run(place) == folder
    assert Store(folder / "checkpoints").steps() == [1]  # nothing is put under the hands of a process that works there
    mirror.close()
    fetch_run(place)
    assert Store(folder / "checkpoints").steps() == [1, 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: b"[" * 10_000,
        lambda data: data.replace(b'"format": 1', b'"format": 2'),
        lambda data: data.replace(b"[1, 2]", b"[2, 1]"),
        lambda data: data.replace(b"[1, 2]", b"[1, -2]"),
        lambda data: data.replace(b"[1, 2]", b"[]"),
        lambda data: data.replace(b'"step": 2', b'"step": 1'),
        lambda data: data.replace(b'"token": "', b'"token": "x'),
        lambda data: data + b" " * (1 << 20),
    ],
)
def test_what_is_no_latest_is_told_and_the_listing_counts(
    machines: Machines, place: RemotePath, change: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    train(place, 1, 2)
    (place / LATEST).write_bytes(change((place / LATEST).read_bytes()))
    found = OnBucket.look(place)
    newest = found.manifest(place, 2)
    assert found.latest == Latest(2, (1, 2), token_of(newest))
    assert f"{place}/{LATEST} is damaged" in caplog.text
