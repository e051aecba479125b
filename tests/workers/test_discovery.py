from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from worker_processes import HANG_SECONDS

from lockstep.errors import LockstepError, PeerLostError, WorkerError
from lockstep.workers.discovery import Discovery, Location, discover


def place(rank: int, host: str = "") -> Location:
    return Location(host or f"node{rank}", f"10.0.0.{rank + 1}", host or f"node{rank}")


def called(
    store: dist.Store, num_workers: int, ranks: list[int] | None = None, seconds: float = HANG_SECONDS
) -> list[Any]:
    """What the workers that look for each other find, or raise."""

    def outcome(rank: int) -> Any:
        try:
            return discover(store, rank, num_workers, place(rank), seconds)
        except LockstepError as error:
            return error

    ranks = [*range(num_workers)] if ranks is None else ranks
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(outcome, ranks))


def test_all_learn_where_all_are() -> None:
    rolls = called(dist.HashStore(), 3)
    assert rolls == [rolls[0]] * 3
    assert rolls[0].locations == [place(rank) for rank in range(3)]


def test_who_is_missing_is_named_to_all_who_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in called(dist.HashStore(), 4, ranks=[0, 2], seconds=0.2):
        assert isinstance(error, PeerLostError)
        assert error.what.endswith("waited in vain for worker 1, worker 3.")
        assert error.given == "within 0.2 s came worker 0 on node0, worker 2 on node2"


def test_a_chief_that_does_not_come_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.workers.discovery._TELL_SECONDS", 0.1)
    [error] = called(dist.HashStore(), 2, ranks=[1], seconds=0.1)
    assert error.what == "worker 1 waited in vain for worker 0."
    assert error.given == "within 0.1 s came worker 1 on node1"


def test_each_restart_is_a_start_of_its_own_whatever_is_left_in_the_store() -> None:
    store = dist.HashStore()
    starts = [{found.start for found in called(store, 2)} for _ in range(3)]
    assert all(len(names) == 1 for names in starts)
    assert all(one != other for one, other in pairwise(starts))


def test_workers_that_are_quicker_than_their_chief_wait_for_it_and_not_for_the_last_one() -> None:
    store = dist.HashStore()
    last = called(store, 2)[0].start
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(discover, store, 1, 2, place(1), 10.0)
        time.sleep(0.1)
        assert not early.done()
        found = discover(store, 0, 2, place(0), 10.0)
        assert early.result(HANG_SECONDS) == found
    assert found.start != last


def test_a_restart_may_have_fewer_workers() -> None:
    store = dist.HashStore()
    called(store, 3)
    assert [len(found.locations) for found in called(store, 2)] == [2, 2]


def test_hosts_have_the_workers_that_see_each_other() -> None:
    places = [place(0, "a"), place(1, "b"), place(2, "a"), Location("b", "10.0.0.9", "another b")]
    found = Discovery("start", places)
    assert found.hosts() == [[0, 2], [1], [3]]
    assert found.host_names() == ["a", "b (host 1)", "b (host 2)"]


def test_a_place_is_told_from_that_of_another_container_of_the_same_name() -> None:
    here = Location.here("10.0.0.1")
    assert here == Location.here("10.0.0.1")
    assert "net:[" in here.system
    assert "pid:[" in here.system


@given(said=st.lists(st.none() | st.text() | st.lists(st.text(), max_size=5).map(json.dumps), min_size=1))
def test_what_is_no_roll_does_no_harm(said: list[str | None]) -> None:
    class Forged(dist.HashStore):
        def get(self, key: str) -> bytes:
            return json.dumps(said).encode() if key.endswith("/workers") else super().get(key)

    try:
        found = discover(Forged(), 0, 1, place(0))
    except (WorkerError, PeerLostError):
        return
    assert all(isinstance(each, Location) for each in found.locations)
