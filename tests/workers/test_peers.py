from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import DataError, PeerLostError
from lockstep.workers.peers import PeerLimits, Peers, says_peer_is_lost
from lockstep.workers.pulse import Pulse

LIMITS = PeerLimits(
    beat_seconds=0.01, silent_seconds=10.0, slow_factor=6.0, suspect_seconds=1.0, ended_seconds=0.3, leave_seconds=0.3
)


class Workers:
    """Workers of one store, on a clock of the test: each looks when it is told to."""

    def __init__(self, num_workers: int, limits: PeerLimits | None = None) -> None:
        self.store = dist.HashStore()
        self.pulses = [Pulse() for _ in range(num_workers)]
        self.peers = [
            Peers(self.store, rank, num_workers, pulse, limits or LIMITS) for rank, pulse in enumerate(self.pulses)
        ]
        self.now = 100.0
        self.at("compute", step=7)

    def at(self, phase: Any, step: int = 7) -> None:
        for pulse in self.pulses:
            pulse.at(step, phase)

    def go_on(self, seconds: float, *ranks: int) -> None:
        """Let some time pass in which only these workers beat."""
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for rank in ranks:
                self.peers[rank].look(self.now)

    def said_to(self, rank: int) -> str | None:
        """What a worker is told when it asks whether the others live."""
        try:
            self.peers[rank].check()
        except PeerLostError as error:
            return f"{error.what} {error.given}"
        return None


def test_workers_that_beat_are_not_missed() -> None:
    workers = Workers(3)
    workers.go_on(300, 0, 1, 2)
    assert [workers.said_to(rank) for rank in range(3)] == [None] * 3


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_worker_without_a_beat_is_named_to_all_with_its_place(dead: int) -> None:
    workers = Workers(3)
    workers.go_on(1, 0, 1, 2)
    others = [rank for rank in range(3) if rank != dead]
    workers.go_on(10, *others)
    assert [workers.said_to(rank) for rank in others] == [None, None]
    workers.go_on(2, *others)
    place = "no sign of life for 10.5 s at step 7 (phase compute)"
    said = [f"worker {rank} lost worker {dead}. {place}" for rank in others]
    assert [workers.said_to(rank) for rank in others] == said


@pytest.mark.parametrize("phase", ["start", "first step", "save", "loop body"])
def test_a_worker_in_a_phase_that_may_take_long_has_longer(phase: str) -> None:
    workers = Workers(2)
    workers.at(phase, step=0)
    workers.go_on(1, 0, 1)
    workers.go_on(59, 0)
    assert workers.said_to(0) is None
    workers.go_on(2, 0)
    assert str(workers.said_to(0)).endswith(f"at step 0 (phase {phase})")


def test_minutes_of_compilation_are_no_death() -> None:
    workers = Workers(2)
    workers.at("first step", step=0)
    for _ in range(10):  # libraries that load keep Python, and so the thread, from running
        workers.go_on(50, 0)
        workers.go_on(0.5, 0, 1)
    assert workers.said_to(0) is None


def test_a_worker_that_was_itself_paused_blames_nobody() -> None:
    workers = Workers(2)
    workers.go_on(1, 0, 1)
    workers.now += 3600
    workers.go_on(1, 0)
    assert workers.said_to(0) is None


def test_a_worker_that_never_comes_is_missed_later() -> None:
    workers = Workers(2)
    workers.go_on(119, 0)
    assert workers.said_to(0) is None
    workers.go_on(3, 0)
    assert workers.said_to(0) == "worker 0 lost worker 1. it has not joined within 120 s"


@given(beats=st.binary())
def test_beats_that_are_none_of_ours_do_no_harm(beats: bytes) -> None:
    workers = Workers(2)
    workers.store.set("beat/1", beats.decode("latin1"))
    workers.go_on(130, 0)
    assert str(workers.said_to(0)).startswith("worker 0 lost worker 1.")


@given(left=st.text(min_size=1))
def test_farewells_that_are_none_of_ours_end_the_run_without_harm(left: str) -> None:
    workers = Workers(2)
    workers.store.set("left", left)
    workers.go_on(1, 0)
    assert str(workers.said_to(0)).startswith("worker 0 lost ")


# With their threads ---------------------------------------------------------------------------------------------------


def started(num_workers: int) -> Workers:
    workers = Workers(num_workers, LIMITS)
    for rank, peers in enumerate(workers.peers):
        peers.start()
        workers.store.wait([f"beat/{rank}"])
    return workers


def soon(asked: Callable[[], Any]) -> Any:
    """What is said in the end, within seconds."""
    for _ in range(500):
        if (said := asked()) is not None:
            return said
        time.sleep(0.01)
    raise TimeoutError


def test_a_worker_that_fails_says_why() -> None:
    workers = started(3)
    workers.peers[1].leave(DataError("A photo is broken.", given="1.jpg", expected="a JPEG", hint="remove it"))
    why = "it failed at step 7 (phase compute): DataError: A photo is broken."
    assert [soon(lambda rank=rank: workers.said_to(rank)) for rank in (0, 2)] == [
        f"worker {rank} lost worker 1. {why}" for rank in (0, 2)
    ]
    for rank in (0, 2):
        workers.peers[rank].leave(None)


def test_the_first_to_leave_is_the_one_that_all_are_told_of() -> None:
    workers = started(3)
    workers.peers[2].leave(ValueError("first"))
    workers.peers[1].leave(ValueError("second"))
    assert soon(lambda: workers.said_to(0)).endswith("ValueError: first")
    workers.peers[0].leave(None)


def test_a_survivor_is_never_the_cause() -> None:
    workers = started(2)
    workers.peers[0].leave(PeerLostError("worker 0 lost worker 1.", given="", expected="", hint=""))
    assert not workers.store.check(["left"])
    workers.peers[1].leave(None)


def test_a_worker_that_has_ended_is_missed_only_by_those_who_wait_for_it() -> None:
    workers = started(2)
    workers.peers[1].leave(None)
    began = time.monotonic()
    assert soon(lambda: workers.said_to(0)) == "worker 0 lost worker 1. it has ended before the others"
    assert time.monotonic() - began >= LIMITS.ended_seconds
    workers.peers[0].leave(None)


def test_what_waits_is_ended_when_a_worker_is_lost() -> None:
    workers = started(2)
    ended: list[int] = []
    workers.peers[0].at_loss(lambda: ended.append(0))
    workers.peers[1].leave(ValueError("boom"))
    soon(lambda: ended or None)
    workers.peers[0].leave(None)


def test_of_a_broken_connection_the_silent_end_is_named() -> None:
    workers = started(3)
    workers.peers[2].leave(PeerLostError("silent", given="", expected="", hint=""))  # it beats no longer
    said = workers.peers[0].lost("Connection closed by peer")
    assert said.what == "worker 0 lost worker 2."
    for rank in (0, 1):
        workers.peers[rank].leave(None)


def test_a_broken_connection_between_living_workers_is_told_as_it_was_said() -> None:
    workers = started(2)
    said = workers.peers[0].lost("Connection reset by peer")
    assert (said.what, said.given) == ("worker 0 lost another worker.", "Connection reset by peer")
    for peers in workers.peers:
        peers.leave(None)


class GoneStore(dist.HashStore):
    """A store whose server is gone."""

    def clone(self) -> GoneStore:
        return self

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Broken pipe\nand frames of C++")


@pytest.mark.parametrize(
    ("store_rank", "who", "store"),
    [(None, "the store of the run", "it"), (0, "worker 0", "the store of the run, which it holds,")],
)
def test_a_store_that_is_gone_is_missed_by_those_who_wait(store_rank: int | None, who: str, store: str) -> None:
    peers = Peers(GoneStore(), 1, 2, Pulse(), LIMITS, store_rank=store_rank)
    peers.start()

    def said() -> PeerLostError | None:
        try:
            peers.check()
        except PeerLostError as error:
            return error
        return None

    found = soon(said)
    assert (found.what, found.given) == (f"worker 1 lost {who}.", f"{store} is gone: Broken pipe")


def test_a_store_that_does_not_answer_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(dist.HashStore(), 0, 2, Pulse(), LIMITS)  # its thread, never started, stands for one that is stuck
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    for _ in range(11):
        peers.check()
    with pytest.raises(PeerLostError, match="worker 0 lost the store of the run") as caught:
        peers.check()
    assert caught.value.given == "it does not answer"


def test_who_holds_the_store_waits_for_the_others_to_leave() -> None:
    store = dist.HashStore()
    chief, other = (Peers(store, rank, 2, Pulse(), PeerLimits(0.01), store_rank=0) for rank in range(2))
    chief.start()
    other.start()
    left = threading.Thread(target=chief.leave, args=(None,))
    left.start()
    left.join(0.3)
    assert left.is_alive()
    other.leave(None)
    left.join(5)
    assert not left.is_alive()


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("[../gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:22949", True),
        ("Last error:\nsocketProgressOpt: Call to recv from 10.0.0.1<33> failed : Connection reset by peer", True),
        ("Net : Connection closed by remote peer user<50260>", True),
        ("ncclRemoteError: A call failed possibly due to a network error", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10", False),
    ],
)
def test_what_torch_says_of_lost_peers_is_known(text: str, is_lost: bool) -> None:
    assert says_peer_is_lost(text) is is_lost
