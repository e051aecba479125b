"""What kills, full disks and missing rights leave behind, in processes of their own."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from checkpoint_helpers import Child, assert_consistent, count_or_kill, sections_of, unfinished, write
from worker_processes import HANG_SECONDS

from lockstep.checkpoints import Retention, Store
from lockstep.errors import CheckpointError

pytestmark = pytest.mark.process

NOBODY = 65534


def write_for_ever(pipe: Connection, folder: Path, first: int) -> None:
    store = Store(folder, Retention(newest=2))
    for step in count(first):
        store.write(step, sections_of(step, numel=100_000), {"step": step})
        pipe.send(step)


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    draw = random.Random(0)
    store = Store(tmp_path, Retention(newest=2))
    reached = 0
    for _ in range(40):
        child = Child(write_for_ever, tmp_path, reached + 1)
        if draw.random() < 0.5:
            child.pipe.poll(HANG_SECONDS)  # until it has written one
        child.kill_after(draw.uniform(0, 0.06))
        written = child.said()
        found = store.read()
        if found is None:
            assert not written
            assert reached == 0
            continue
        step = assert_consistent(found)
        # The one after the last that `write` came back from may have been complete, too.
        assert step in (max(written, default=reached), max(written, default=reached) + 1)
        assert not [s for s in store.steps() if assert_consistent(store.read(s)) != s]
        reached = step
    assert reached > 10
    write(store, reached + 1)
    assert unfinished(tmp_path) == []


def prepare_pruning(store: Store) -> Callable[[], None]:
    write(store, 10, 20)
    return lambda: write(store, 30)


def prepare_replacing(store: Store) -> Callable[[], None]:
    write(store, 20, 30)
    (store.path(30) / "values.json").write_bytes(b"{}")
    return lambda: write(store, 30)


@pytest.mark.parametrize("prepare", [prepare_pruning, prepare_replacing])
def test_killed_before_every_single_call_to_the_file_system(tmp_path: Path, prepare) -> None:
    """Before every open, rename and delete of a write, one after the other: none may be the fatal one."""
    whole = Store(tmp_path / "whole", Retention(newest=2))
    ((calls,),) = [Child(count_or_kill, None, prepare(whole)).said()]
    assert calls > 15
    for call in range(1, calls + 1):
        store = Store(tmp_path / str(call), Retention(newest=2))
        child = Child(count_or_kill, call, prepare(store))
        assert child.said() == []
        assert child.process.exitcode == -9
        assert assert_consistent(store.read()) in (20, 30)
        write(store, 40)
        assert assert_consistent(store.read()) == 40
        assert unfinished(store.folder) == []


def fail(pipe: Connection, before: Callable[[], None], store: Store, numel: int) -> None:
    """Write with something against it; send the message of the error."""
    before()
    try:
        store.write(30, sections_of(30, numel), {"step": 30})
    except CheckpointError as error:
        pipe.send(str(error))


def assert_nothing_happened(store: Store) -> None:
    assert store.steps() == [10, 20]
    assert unfinished(store.folder) == []
    for step in (10, 20):
        assert assert_consistent(store.read(step)) == step


NEEDED = 4 * 300_000 + 4 * 4 + 8 + len('{\n "step": 30\n}\n')


def test_a_quota(tmp_path: Path) -> None:
    """A limit on the size of files, which is there on every system, stops the write in the middle of a file."""
    store = Store(tmp_path)
    write(store, 10, 20)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))  # noqa: E731
    (message,) = Child(fail, limit, store, 300_000).said()
    what, given, expected, hint = message.splitlines()
    assert what == "The checkpoint of step 30 cannot be written: File too large."
    assert given.startswith(f"  given:    {tmp_path} on a disk with ")
    assert given.endswith(" bytes free")
    assert int(given.split()[-3].replace(",", "")) > 0
    assert expected == f"  expected: a folder that can be written, with room for {NEEDED:,} bytes"
    assert hint == (
        "  hint:     make space there, raise the quota, keep fewer checkpoints, or give a workdir on another disk; "
        "older checkpoints are as they were"
    )
    assert_nothing_happened(store)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    store = Store(small_disk / "checkpoints")
    write(store, 10, 20)
    with pytest.raises(CheckpointError) as raised:
        store.write(30, sections_of(30, 300_000), {"step": 30})
    assert raised.value.what == "The checkpoint of step 30 cannot be written: No space left on device."
    assert raised.value.hint.startswith("make space there")
    assert_nothing_happened(store)
    write(store, 30)
    assert assert_consistent(store.read()) == 30


def test_a_disk_with_room_for_the_first_files_alone(small_disk: Path) -> None:
    """Whatever the file in which space runs out."""
    store = Store(small_disk / "checkpoints")
    write(store, 10, 20)
    filler = small_disk / "filler"
    pages_free = os.statvfs(small_disk).f_bavail
    for pages_left in range(5):  # each of the five files takes one
        filler.write_bytes(bytes((pages_free - pages_left) * os.statvfs(small_disk).f_frsize))
        with pytest.raises(CheckpointError, match="No space left on device"):
            store.write(30, sections_of(30), {"step": 30})
        assert_nothing_happened(store)


def drop_rights() -> None:
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def test_a_folder_that_may_not_be_written() -> None:
    with tempfile.TemporaryDirectory() as above:
        Path(above).chmod(0o755)
        store = Store(Path(above) / "checkpoints")
        write(store, 10, 20)
        store.folder.chmod(0o555)
        (message,) = Child(fail, drop_rights, store, 10).said()
        store.folder.chmod(0o755)
        what, given, _, hint = message.splitlines()
        assert what == "The checkpoint of step 30 cannot be written: Permission denied."
        assert given.startswith(f"  given:    {store.folder}/.step-00000030.new.")
        assert (
            hint == "  hint:     let this user write there, or give another workdir; older checkpoints are as they were"
        )
        assert_nothing_happened(store)


def test_a_workdir_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(CheckpointError, match="step 0 cannot be written: Not a directory"):
        write(Store(tmp_path / "runs" / "checkpoints"), 0)
    assert (tmp_path / "runs").read_text() == "mine"


def test_an_interrupt_leaves_nothing_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    write(store, 10, 20)

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(store, 30)
    assert_nothing_happened(store)


def test_everything_is_on_the_disk_before_it_has_its_name_and_before_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of events, for a loss of power, which no test can cause."""
    store = Store(tmp_path, Retention(newest=1))
    write(store, 10)
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor: int) -> None:
        events.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name.partition(".new.")[0])
        fsync(descriptor)

    def recorded_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name.partition('.new.')[0]} {target.name.partition('.old.')[0]}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    write(store, 20)
    assert events == [
        "sync parameters.safetensors",
        "sync buffers.safetensors",
        "sync average.safetensors",
        "sync values.json",
        "sync manifest.json",
        "sync .step-00000020",
        "rename .step-00000020 step-00000020",
        f"sync {tmp_path.name}",
        "rename step-00000010 .step-00000010",
    ]
