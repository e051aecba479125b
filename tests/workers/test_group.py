from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_processes import HANG_SECONDS

from lockstep.errors import InputError, LockstepError, PeerLostError, WorkerError
from lockstep.workers.group import MEMORY_NAME, Group, check_agreement
from lockstep.workers.socket_store import SocketStore
from lockstep.workers.store_server import StoreServer

NOBODY = 65534
NAMES = ["worker 0", "worker 1"]


def together(
    call: Callable[[Group, int], Any], num_workers: int = 3, timeout_seconds: float = HANG_SECONDS
) -> list[Any]:
    """What the call returns, or raises, on each of several workers that run as threads."""
    server = StoreServer()
    groups = [Group(SocketStore(server.connect()), rank, num_workers, timeout_seconds) for rank in range(num_workers)]

    def outcome(rank: int) -> Any:
        try:
            return call(groups[rank], rank)
        except LockstepError as error:
            return error

    with ThreadPoolExecutor(num_workers) as threads:
        return list(threads.map(outcome, range(num_workers)))


def test_gather_gives_all_values_by_rank_to_all() -> None:
    assert together(lambda group, rank: group.gather({"rank": rank})) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_broadcast_gives_the_value_of_the_chief() -> None:
    assert together(lambda group, rank: group.broadcast([rank, "x"])) == [[0, "x"]] * 3


def test_calls_follow_each_other_and_leave_nothing_behind() -> None:
    def call(group: Group, rank: int) -> tuple[list[Any], int]:
        for turn in range(50):
            assert group.gather([turn, rank]) == [[turn, 0], [turn, 1], [turn, 2]]
            group.barrier("between")
        return [], group.store.num_keys()

    # At most the values of the last two calls, for each worker.
    assert max(num_keys for _, num_keys in together(call)) <= 6


def test_agreement_passes_in_silence() -> None:
    assert together(lambda group, rank: group.agree("the recipe", {"lr": 0.1, "steps": [1, 2]})) == [None] * 3


def test_the_worker_that_differs_from_most_is_named_with_both_values() -> None:
    errors = together(lambda group, rank: group.agree("the model", {"a": [1, 2], "b": [3, 5 if rank == 0 else 4]}))
    for error in errors:
        assert isinstance(error, WorkerError)
        assert error.what == "The workers do not agree on the model: worker 0 differs."
        assert error.given == "worker 0: b: [1]: 5 instead of 4"
        assert error.expected == "the same as on worker 1"


def test_without_a_majority_the_chief_is_right() -> None:
    errors = together(lambda group, rank: group.agree("versions", {"torch": f"2.{rank}"}))
    assert errors[0].what == "The workers do not agree on versions: worker 1, worker 2 differ."
    assert errors[0].given == 'worker 1: torch: "2.1" instead of "2.0"; worker 2: torch: "2.2" instead of "2.0"'


@pytest.mark.parametrize(
    ("value", "reference", "difference"),
    [
        ({"a": 1}, {"b": 1}, '{"a": 1} instead of {"b": 1}'),
        ([1, 2], [1], "[1]: 2 instead of nothing"),
        ([1], [1, 2], "[1]: nothing instead of 2"),
        ([1, 3], [1, 2, 3], "[1]: 3 instead of 2"),
        (1, "1", '1 instead of "1"'),
    ],
)
def test_values_of_other_kinds_or_lengths_are_compared_as_far_as_they_go(
    value: Any, reference: Any, difference: str
) -> None:
    with pytest.raises(WorkerError) as caught:
        check_agreement("it", [reference, value], NAMES)
    assert caught.value.given == f"worker 1: {difference}"


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(JSONS, JSONS)
@settings(max_examples=25, deadline=None)
def test_two_values_agree_exactly_when_they_are_written_alike(one: Any, other: Any) -> None:
    check_agreement("it", [one, one], NAMES)
    if repr(one) != repr(other) and one != other:
        with pytest.raises(WorkerError, match=r"worker 1 differs\."):
            check_agreement("it", [one, other], NAMES)


def test_those_that_do_not_come_are_named() -> None:
    errors = together(lambda group, rank: group.barrier("saved") if rank == 1 else None, timeout_seconds=0.05)
    assert isinstance(errors[1], PeerLostError)
    assert errors[1].what == "worker 1 waited in vain for worker 0, worker 2 (barrier 'saved')."
    assert errors[1].given == "2 of 3 workers did not come within 0.05 s"


def test_different_calls_are_told_apart() -> None:
    errors = together(lambda group, rank: group.gather(1) if rank else group.barrier("saved"), num_workers=2)
    for error in errors:
        assert error.what == "The workers have made different calls, and would wait for each other for ever."
        assert error.given == "worker 0: barrier 'saved', worker 1: gather"


def test_a_value_too_large_for_the_store_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        Group(dist.HashStore(), 0, 2).gather("x" * (8 << 20))
    assert caught.value.what == "A value is too large to be passed between workers (gather)."
    assert caught.value.given == "8,388,622 bytes of JSON"


def test_a_store_that_goes_away_is_a_lost_peer() -> None:
    class GoneStore(dist.HashStore):  # type: ignore[misc]
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Connection was closed\nC++ frames follow")

    with pytest.raises(PeerLostError) as caught:
        Group(GoneStore(), 1, 2).barrier("saved")
    assert caught.value.what == "worker 1 lost the store of its run (barrier 'saved')."
    assert caught.value.given == "Connection was closed"


class Others:
    """What is known of the other workers: after some questions, that one is gone."""

    def __init__(self, num_questions: int = 3) -> None:
        self.num_questions = num_questions
        self.told: list[BaseException | str | None] = []

    def check(self) -> None:
        self.num_questions -= 1
        if self.num_questions < 0:
            raise PeerLostError("worker 0 lost worker 1.", given="", expected="", hint="")

    def leave(self, error: BaseException | None) -> None:
        self.told.append(error)


def test_a_wait_ends_where_a_worker_is_known_to_be_gone() -> None:
    with pytest.raises(PeerLostError, match="worker 0 lost worker 1"):
        Group(dist.HashStore(), 0, 2, 3600, Others()).barrier("saved")  # type: ignore[arg-type]


def test_a_wait_for_workers_that_live_ends_when_they_have_come_or_in_time() -> None:
    store = dist.HashStore()
    store.set("0/1", json.dumps(["gather", 2]))
    group = Group(store, 0, 2, 0.05, Others(1000))  # type: ignore[arg-type]
    assert group.gather(1) == [1, 2]
    with pytest.raises(PeerLostError, match="waited in vain for worker 1"):
        group.gather(1)


@pytest.mark.parametrize("error", [None, ValueError("boom")])
def test_who_leaves_in_peace_tells_the_others_last_and_with_an_error_first(error: Exception | None) -> None:
    others = Others()
    group = Group(dist.HashStore(), 0, 2)
    group.say_farewell_by(others.leave)
    for name in ("first", "second"):
        group.at_end(lambda _, name=name: others.told.append(name))
    group.leave(error)
    assert others.told == [*([error] if error else []), "second", "first", *([] if error else [None])]
    group.leave(error)
    assert others.told.count("first") == 1


def test_a_child_that_a_worker_has_forked_does_not_leave_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others()
    group = Group(dist.HashStore(), 0, 2)
    group.say_farewell_by(others.leave)
    group.at_end(others.leave)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    group.leave()
    assert others.told == []


def test_alone_values_look_as_if_they_came_from_another_worker() -> None:
    group = Group.alone()
    assert group.gather({"shape": (1, 2)}) == [{"shape": [1, 2]}]
    assert group.broadcast((1, 2)) == [1, 2]
    group.barrier("saved")
    group.agree("the recipe", 1)
    assert group.store.num_keys() == 0


def shared(group: Group, rank: int) -> bytes:
    """What each worker reads in the memory that the chief shares."""
    memory = None
    if rank == 0:
        memory = os.memfd_create(MEMORY_NAME)
        os.write(memory, b"of the chief")
    descriptor = group.share_memory(memory)
    read = os.pread(descriptor, 20, 0)
    os.close(descriptor)
    return read


def test_all_workers_open_the_memory_of_the_chief() -> None:
    assert together(shared) == [b"of the chief"] * 3


def test_under_other_launchers_too() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        read = threads.map(lambda rank: shared(Group(store, rank, 2), rank), range(2))
        assert list(read) == [b"of the chief"] * 2


def forged(tmp_path: Path) -> dict[str, object]:
    """What a stranger may write in the chief's place, by the reason for which it is not opened."""
    file = tmp_path / "victim.bin"
    file.write_bytes(b"mine")
    descriptor = os.open(file, os.O_RDWR)
    return {
        "no process and descriptor": str(file),
        f"descriptor {descriptor} of process {os.getpid()}: a file that is no memory of Lockstep": [
            os.getpid(),
            descriptor,
        ],
        "descriptor 0 of process 0: No such file or directory": [0, 0],
        "descriptor '../../../etc/passwd' of process 1: no process and descriptor": [1, "../../../etc/passwd"],
        "descriptor True of process 1: no process and descriptor": [1, True],
    }


def test_no_file_that_a_stranger_names_is_opened(tmp_path: Path) -> None:
    for reason, place in forged(tmp_path).items():
        store = dist.HashStore()
        store.set("0/0", json.dumps(["share memory", place]))
        with pytest.raises(WorkerError) as caught:
            Group(store, 1, 2).share_memory(None)
        assert caught.value.what == "The chief's shared memory cannot be opened."
        assert reason in str(caught.value.given)
    assert (tmp_path / "victim.bin").read_bytes() == b"mine"


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_memory_of_another_user_is_not_opened() -> None:
    ready, child = os.pipe(), os.fork()
    if not child:
        os.setuid(NOBODY)
        os.write(ready[1], str(os.memfd_create(MEMORY_NAME)).encode())
        signal.pause()
    try:
        store = dist.HashStore()
        store.set("0/0", json.dumps(["share memory", [child, int(os.read(ready[0], 8))]]))
        with pytest.raises(WorkerError, match="a process of another user"):
            Group(store, 1, 2).share_memory(None)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("payload", ["no JSON", "[1, 2]", '["gather"]', "7", '"gather"', "[" * 100_000])
def test_what_is_no_call_is_named_with_its_worker(payload: str) -> None:
    store = dist.HashStore()
    store.set("0/1", payload)
    with pytest.raises(WorkerError) as caught:
        Group(store, 0, 2).gather(1)
    assert caught.value.what == "What worker 1 has sent cannot be read."
    assert caught.value.given == repr(payload.encode()[:80])
