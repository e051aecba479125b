"""The lease of a workdir: held by one process at a time, whoever is killed and whenever."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from bucket_runs import new_place
from worker_processes import HANG_SECONDS

from lockstep.errors import WorkdirError
from lockstep.owner import Owner, start_ticks, this_process
from lockstep.runs import lease as leases
from lockstep.runs.lease import EXPIRY_SECONDS, RENEW_SECONDS, Lease, take
from lockstep.storage import remote_path
from lockstep.storage.remote_path import RemotePath

ELSEWHERE = Owner("node7", 41, "5", "another boot", 1_780_000_000, "abc")
FORK = multiprocessing.get_context("fork")


def leave(folder: Path, number: int, owner: Owner | bytes, *, silent_seconds: float = 0.0) -> Path:
    """A lease as another process has left it."""
    path = folder / f".lease-{number:06d}"
    path.write_bytes(owner if isinstance(owner, bytes) else owner.encode())
    renewed = time.time() - silent_seconds
    os.utime(path, (renewed, renewed))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def taken(tmp_path: Path) -> Iterator[Lease]:
    lease = take(tmp_path)
    yield lease
    lease.release()


# One holder -----------------------------------------------------------------------------------------------------------


def test_a_lease_names_its_owner_and_is_released(tmp_path: Path) -> None:
    lease = take(tmp_path)
    assert lease.path == tmp_path / ".lease-000001"
    assert lease.taken_from is None
    assert Owner.decode(lease.path.read_bytes()) == lease.owner
    assert (lease.owner.pid, lease.owner.state()) == (os.getpid(), "alive")
    lease.check()
    lease.release()
    again = take(tmp_path)
    assert again.taken_from is None, "who gave it up did not die"
    assert names(tmp_path) == [".lease-000002"]
    again.release()


def test_an_owner_that_is_known_to_be_dead_is_followed_at_once(tmp_path: Path) -> None:
    leave(tmp_path, 1, ELSEWHERE)
    with pytest.raises(WorkdirError, match="going on already"):
        take(tmp_path, known_dead=replace(ELSEWHERE, token="another"))
    lease = take(tmp_path, known_dead=ELSEWHERE)
    assert lease.taken_from == ELSEWHERE
    lease.release()


def test_a_lease_needs_no_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    for name in ("flock", "lockf", "fcntl"):
        monkeypatch.setattr(fcntl, name, refused)
    lease = take(tmp_path)
    lease.check()
    with pytest.raises(WorkdirError, match="is going on already"):
        take(tmp_path)
    lease.release()


def test_the_second_is_refused_and_told_who_is_first(taken: Lease, tmp_path: Path) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(taken.owner.since_unix_seconds))
    with pytest.raises(WorkdirError) as raised:
        take(tmp_path)
    assert str(raised.value) == (
        f"The run in {tmp_path} is going on already.\n"
        f"  given:    held by process {os.getpid()} on host {taken.owner.host}, since {since} (alive)\n"
        "  expected: one start of a run at a time\n"
        "  hint:     wait for it or stop it, or name another --workdir"
    )
    assert names(tmp_path) == [".lease-000001"]


def test_a_process_that_lives_holds_it_however_long_it_was_silent(taken: Lease, tmp_path: Path) -> None:
    os.utime(taken.path, (0, 0))
    with pytest.raises(WorkdirError, match="is going on already"):
        take(tmp_path)


# Dead owners ----------------------------------------------------------------------------------------------------------


def die(folder: Path) -> Owner:
    """The lease of a process that was killed."""
    process = FORK.Process(target=lambda: (take(folder), signal.raise_signal(signal.SIGKILL)))
    process.start()
    process.join(HANG_SECONDS)
    assert process.exitcode == -signal.SIGKILL
    path = max(folder.glob(".lease-*"))
    return Owner.decode(path.read_bytes())


@pytest.mark.process
def test_a_dead_owner_on_this_system_is_followed_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dead = die(tmp_path)
    lease = take(tmp_path)
    assert lease.taken_from == dead
    assert caplog.messages == [f"the run in {tmp_path} was held by {dead}, which is dead: going on in its place"]
    assert names(tmp_path) == [".lease-000002"]
    lease.release()


def test_a_new_process_with_an_old_number_holds_nothing(tmp_path: Path) -> None:
    leave(tmp_path, 1, replace(this_process(), started="12345"))
    take(tmp_path).release()


@pytest.mark.parametrize("clock_is_fast_by", [0.0, 7200.0, -7200.0])
def test_elsewhere_who_renews_is_alive_whatever_this_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock_is_fast_by: float
) -> None:
    right = time.time
    leave(tmp_path, 1, ELSEWHERE, silent_seconds=EXPIRY_SECONDS - 20)
    monkeypatch.setattr(leases.time, "time", lambda: right() + clock_is_fast_by)
    with pytest.raises(WorkdirError) as raised:
        take(tmp_path)
    assert re.fullmatch(
        r"held by process 41 on host node7, since 2026-.* \(it renewed its lease 4\d s ago\)", raised.value.given
    )
    hint = r"wait for it or stop it, or name another --workdir; if it is dead, start again in (19|2\d) s"
    assert re.fullmatch(hint, raised.value.hint)
    assert names(tmp_path) == [".lease-000001"], "the look at the server's clock leaves nothing"
    leave(tmp_path, 1, ELSEWHERE, silent_seconds=EXPIRY_SECONDS + 1)
    lease = take(tmp_path)
    assert lease.taken_from == ELSEWHERE
    lease.release()


def test_a_server_whose_clock_was_set_back_is_not_waited_for(tmp_path: Path) -> None:
    leave(tmp_path, 1, ELSEWHERE, silent_seconds=-86_400)
    take(tmp_path).release()


def test_where_no_system_can_be_told_all_are_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.owner._BOOT", tmp_path / "none")
    mine = this_process()
    assert (mine.system, mine.state()) == ("", "unseen")
    leave(tmp_path, 1, mine)
    with pytest.raises(WorkdirError, match="renewed its lease 0 s ago"):
        take(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"7", b'{"host": "a"}', ELSEWHERE.encode()[:40], b"[" * 4000, b"\xff"]
)
def test_a_lease_that_names_nobody_holds_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(leases, "_READ_PAUSE_SECONDS", 0.0)
    leave(tmp_path, 1, content)
    with pytest.raises(
        WorkdirError, match=r"held by a process that did not name itself \(it renewed its lease 0 s ago"
    ):
        take(tmp_path)
    leave(tmp_path, 1, content, silent_seconds=EXPIRY_SECONDS + 1)
    take(tmp_path).release()


# Many at once ---------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_of_many_that_follow_a_dead_owner_at_once_exactly_one_wins(tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        die(folder)
        start, end, answers = FORK.Event(), FORK.Event(), FORK.SimpleQueue()

        def contend(folder: Path = folder, start: Any = start, end: Any = end, answers: Any = answers) -> None:
            start.wait(HANG_SECONDS)
            try:
                take(folder)
                answers.put((os.getpid(), "won"))
            except WorkdirError as error:
                answers.put((os.getpid(), str(error.given)))
            end.wait(HANG_SECONDS)  # a winner that ends is dead, and may be followed

        processes = [FORK.Process(target=contend) for _ in range(8)]
        for process in processes:
            process.start()
        start.set()
        told = dict(answers.get() for _ in processes)
        end.set()
        for process in processes:
            process.join(HANG_SECONDS)
        (winner,) = [pid for pid, said in told.items() if said == "won"]
        assert all(f"held by process {winner} on host" in told.pop(pid) for pid in list(told) if pid != winner)
        assert names(folder) == [".lease-000002"]


class Arena:
    """Processes that want the same folder, each of which gives it up, or waits in it for its death."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.folder.mkdir()
        self.inside, self.log = folder / "inside", folder / "log"
        self.log.touch()
        self.processes: list[BaseProcess] = []

    def start(self) -> None:
        process = FORK.Process(target=self._contend, args=(random.random(),))
        process.start()
        self.processes.append(process)

    def _contend(self, seed: float) -> None:
        choose = random.Random(seed)
        with self.log.open("ab", buffering=0) as log:
            while True:
                try:
                    lease = take(self.folder)
                except WorkdirError:
                    os.sched_yield()
                    continue
                if start_ticks(self.pid_inside()) != "0":
                    log.write(b"two at once\n")
                partial = self.inside.with_name(f"inside.{os.getpid()}")
                partial.write_text(str(os.getpid()))
                partial.replace(self.inside)
                log.write(b"%d\n" % os.getpid())
                if choose.random() < 0.5:
                    signal.pause()
                lease.check()
                self.inside.unlink()
                lease.release()

    def pid_inside(self) -> int:
        try:
            return int(self.inside.read_text())
        except FileNotFoundError:
            return 0

    def entries(self) -> list[bytes]:
        return self.log.read_bytes().splitlines()

    def kill(self, process: BaseProcess) -> None:
        process.kill()
        process.join(HANG_SECONDS)
        process.close()
        self.processes.remove(process)


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    # Who is killed between the creation of its lease and the writing of its name cannot be seen, only waited for.
    monkeypatch.setattr(leases, "EXPIRY_SECONDS", 0.2)
    monkeypatch.setattr(leases, "_READ_PAUSE_SECONDS", 0.005)
    found = Arena(tmp_path)
    yield found
    for process in list(found.processes):
        found.kill(process)


@pytest.mark.process
def test_never_two_at_once_however_many_are_killed(arena: Arena) -> None:
    choose, kills = random.Random(1), 0
    for _ in range(4):
        arena.start()
    deadline = time.monotonic() + HANG_SECONDS
    while kills < 15 or len(arena.entries()) < 30:
        assert time.monotonic() < deadline, f"{kills} kills, {len(arena.entries())} entries"
        victim = next((each for each in arena.processes if each.pid == arena.pid_inside()), None)
        if victim is None or choose.random() < 0.3:
            victim = choose.choice(arena.processes)
        arena.kill(victim)
        kills += 1
        arena.start()
        seen = len(arena.entries())
        while len(arena.entries()) < seen + choose.randrange(3) and time.monotonic() < deadline:
            if arena.inside.exists():
                break
    assert b"two at once" not in arena.entries()


@pytest.mark.parametrize("released", [True, False])
def test_who_is_slow_to_follow_a_dead_owner_withdraws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    """While it slept, others have come and gone: the number it creates is free again, and no longer the highest."""
    leave(tmp_path, 1, ELSEWHERE, silent_seconds=100)
    create, created = leases._create, []

    def sleep_first(path: Path, owner: Owner) -> bool:
        if not created:
            leave(tmp_path, 1, ELSEWHERE).unlink()
            leave(tmp_path, 3, replace(ELSEWHERE, released=released))
        created.append(path.name)
        return create(path, owner)

    monkeypatch.setattr(leases, "_create", sleep_first)
    if released:
        take(tmp_path).release()
        assert created == [".lease-000002", ".lease-000004"]
    else:
        with pytest.raises(WorkdirError, match="held by process 41 on host node7"):
            take(tmp_path)
        assert names(tmp_path) == [".lease-000003"]


# Taken over -----------------------------------------------------------------------------------------------------------


def take_over(lease: Lease) -> None:
    """What a process elsewhere does that has not heard of the owner for a minute."""
    leave(lease.path.parent, 2, ELSEWHERE)
    lease.path.unlink()


def delete_it(lease: Lease) -> None:
    lease.path.unlink()


def replace_it(lease: Lease) -> None:
    """All leases deleted by hand, and another start since."""
    leave(lease.path.parent, 1, ELSEWHERE)


@pytest.mark.parametrize(
    ("lose", "given"),
    [
        (take_over, "taken over by process 41 on host node7, since "),
        (replace_it, "taken over by process 41 on host node7, since "),
        (delete_it, ".lease-000001 is gone"),
    ],
)
def test_an_owner_that_was_followed_is_stopped(taken: Lease, lose: Callable[[Lease], None], given: str) -> None:
    lose(taken)
    left = names(taken.path.parent)
    with pytest.raises(WorkdirError) as raised:
        taken.check()
    error = raised.value
    assert error.what == f"The run in {taken.path.parent} is no longer this start's, which ends here."
    assert str(error.given).startswith(given)
    assert error.expected == f"held by {taken.owner}, without a break of more than 60 s"
    assert error.hint == (
        "let the other start go on; where there is none, the same command goes on from the last checkpoint"
    )
    taken.release()
    assert names(taken.path.parent) == left, "what is another's is not released"


def test_a_glance_asks_the_disk_only_where_there_is_reason_to(taken: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    take_over(taken)
    taken.check_if_stale()
    now = time.time()
    monkeypatch.setattr(leases.time, "time", lambda: now + 3 * RENEW_SECONDS + 1)
    with pytest.raises(WorkdirError, match="no longer this start's"):
        taken.check_if_stale()


def test_a_renewal_finds_that_it_was_taken_over(taken: Lease) -> None:
    take_over(taken)
    taken._renew()
    with pytest.raises(WorkdirError, match="no longer this start's"):
        taken.check_if_stale()


def test_a_thread_renews_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.01)
    lease = take(tmp_path)
    os.utime(lease.path, (0, 0))
    deadline = time.monotonic() + HANG_SECONDS
    while time.time() - lease.path.stat().st_mtime > 60:
        assert time.monotonic() < deadline
    lease.release()


def test_a_renewal_that_the_disk_refuses_is_said(
    taken: Lease, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", refused)
        taken._renew()
    assert caplog.messages == [f"{taken.path} cannot be renewed: Input/output error"]
    taken.check()


# The disk -------------------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        take(tmp_path)
    assert names(tmp_path) == []


def test_a_release_that_the_disk_refuses_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lease = take(tmp_path)
    caplog.set_level(logging.INFO)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        lease.release()
    assert caplog.messages == [
        f"{lease.path} cannot be released (No space left on device); it is void without this process"
    ]
    assert names(tmp_path) == [".lease-000001"]


def test_what_a_start_left_that_was_killed_at_the_clock_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".lease-clock-0123").touch()
    (tmp_path / ".lease-notes").touch()
    lease = take(tmp_path)
    assert names(tmp_path) == [".lease-000001", ".lease-notes"]
    lease.release()


# On a bucket ----------------------------------------------------------------------------------------------------------


def leave_on(place: RemotePath, number: int, owner: Owner) -> RemotePath:
    path = place / f".lease-{number:06d}"
    path.write_bytes(owner.encode())
    return path


def test_the_folder_on_a_bucket_is_held_by_one(bucket: RemotePath) -> None:
    """By conditional writes of a store of real code."""
    place = bucket / "runs" / "mine"
    lease = take(place)
    assert lease.path == place / ".lease-000001"
    lease.check()
    with pytest.raises(WorkdirError, match="is going on already"):
        take(place)
    with pytest.raises(WorkdirError, match="is going on already"):
        leases.check_free(place)
    assert not leases._create(place / ".lease-000001", this_process())
    lease.release()
    leases.check_free(place)
    second = take(place)
    assert second.path == place / ".lease-000002"
    assert [path.name for path in place.iterdir()] == [".lease-000002"]
    with pytest.raises(WorkdirError, match="no longer this start's"):
        lease.check()
    second.release()


def test_a_dead_process_holds_no_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    place = new_place()
    path = leave_on(place, 3, ELSEWHERE)
    with pytest.raises(WorkdirError) as caught:
        take(place)
    assert "it renewed its lease 0 s ago" in caught.value.given
    monkeypatch.setattr(leases, "EXPIRY_SECONDS", 0.0)
    lease = take(place)
    assert (lease.path, lease.taken_from) == (place / ".lease-000004", ELSEWHERE)
    assert not path.exists()
    lease.release()
    assert Owner.decode(lease.path.read_bytes()).released


def test_what_is_renewed_is_never_that_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a store has no conditional writes, the later of two that create one lease has it."""
    place = new_place()
    lease = take(place)
    before = lease.path.changed_unix_seconds()
    lease._renew()
    assert lease.path.changed_unix_seconds() > before
    leave_on(place, 1, ELSEWHERE)
    lease._renew()
    assert Owner.decode(lease.path.read_bytes()) == ELSEWHERE
    with pytest.raises(WorkdirError, match="no longer this start's"):
        lease.check_if_stale()
    lease.release()
    assert Owner.decode(lease.path.read_bytes()) == ELSEWHERE


def test_a_bucket_that_is_out_of_reach_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lease = take(new_place())

    def fail(_: RemotePath) -> float:
        raise OSError("no route to https://host/key?sig=secret")

    with monkeypatch.context() as patched:
        patched.setattr(RemotePath, "changed_unix_seconds", fail)
        lease._renew()
        lease._renew()
    assert caplog.messages == [f"{lease.path} cannot be renewed: no route to https://host/key"]
    lease.release()


def test_a_renewal_under_way_does_not_take_a_release_back(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = take(new_place())
    write, is_writing, may_end = RemotePath.write_bytes, threading.Event(), threading.Event()

    def slow(path: RemotePath, data: bytes) -> None:
        if threading.current_thread() is renewing:
            is_writing.set()
            may_end.wait(HANG_SECONDS)
        write(path, data)

    renewing = threading.Thread(target=lease._renew)
    monkeypatch.setattr(RemotePath, "write_bytes", slow)
    renewing.start()
    assert is_writing.wait(HANG_SECONDS)
    releasing = threading.Thread(target=lease.release)
    releasing.start()
    releasing.join(0.2)  # without the mend it is done now
    may_end.set()
    renewing.join(HANG_SECONDS)
    releasing.join(HANG_SECONDS)
    assert Owner.decode(lease.path.read_bytes()).released
    lease._renew()
    assert Owner.decode(lease.path.read_bytes()).released


def test_a_bucket_that_is_away_is_asked_once_for_a_release(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lease = take(new_place())
    caplog.set_level(logging.INFO)
    asked: list[str] = []

    def fail(scheme: str, _: Any) -> None:
        asked.append(scheme)
        raise OSError("no route to host")

    with monkeypatch.context() as patched:
        patched.setattr(remote_path, "_asked", fail)
        lease.release()
    assert asked == ["memory"]
    assert caplog.messages == [f"{lease.path} cannot be released (no route to host); it is void without this process"]


@pytest.mark.parametrize("overwrites", [False, True])
def test_a_store_without_conditional_writes_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, overwrites: bool
) -> None:
    if overwrites:  # as versions of s3fs do that know no mode="create"
        monkeypatch.setattr(RemotePath, "write_new", lambda path, data: path.write_bytes(data) or True)
    place = new_place()
    take(place).release()
    assert [str(place) in each and "no conditional writes" in each for each in caplog.messages] == [True] * overwrites
