from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch.distributed as dist
from worker_processes import HANG_SECONDS

from lockstep.errors import DataError, PeerLostError
from lockstep.workers.channel import Channel, Message
from lockstep.workers.peers import Peers, process_behind, says_peer_is_lost
from lockstep.workers.pulse import Pulse


class Watched:
    """A worker of two, and the watcher's end of its connection."""

    def __init__(self, rank: int = 0, store: dist.Store | None = None, *, leaves_last: bool = False) -> None:
        ours, theirs = socket.socketpair()
        self.watcher, self.pulse = Channel(ours), Pulse()
        self.pulse.at(7, "compute")
        self.peers = Peers(Channel(theirs), rank, 2, self.pulse, store or dist.HashStore(), leaves_last=leaves_last)
        self.watcher.send({"watched": True})
        self.peers.start()

    def close(self) -> None:
        """End the watcher, and wait until the worker has noticed."""
        self.watcher.close()
        self.peers._thread.join(HANG_SECONDS)

    def heard(self, word: str) -> Message:
        """The next message with a word, within seconds."""
        return soon(lambda: next((message for message in self.watcher.receive(0.1) if word in message), None))

    def error(self) -> PeerLostError | None:
        """What the worker is told when it asks whether the others live."""
        try:
            self.peers.check()
        except PeerLostError as error:
            return error
        return None


def soon(asked: Callable[[], Any]) -> Any:
    """What is said in the end, within seconds."""
    for _ in range(500):
        if (said := asked()) is not None:
            return said
        time.sleep(0.01)
    raise TimeoutError


@pytest.fixture
def watched() -> Iterator[Callable[..., Watched]]:
    """Make a worker that is watched until the test ends."""
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(closing(Watched(*arguments, **options)))


@pytest.fixture
def worker(watched: Callable[..., Watched]) -> Watched:
    return watched()


def test_a_worker_says_where_it_is(worker: Watched) -> None:
    beat = worker.heard("phase")
    assert (beat["step"], beat["phase"]) == (7, "compute")
    assert worker.error() is None


def test_a_worker_begins_when_it_is_watched() -> None:
    ours, theirs = socket.socketpair()
    peers = Peers(Channel(theirs), 0, 2, Pulse(), dist.HashStore())
    watcher = Channel(ours)
    threading.Timer(0.1, watcher.send, [{"lost": "host b", "why": "its watcher has not come"}]).start()
    with pytest.raises(PeerLostError, match="worker 0 lost host b"):
        peers.start()
    watcher.close()
    peers._thread.join(HANG_SECONDS)


def test_a_failure_is_told_with_its_reason_and_what_the_lost_worker_has_said(worker: Watched) -> None:
    why = "worker 1 on b failed at step 7 (phase compute):\nTraceback (most recent call last):\nValueError: boom"
    worker.watcher.send({"lost": "worker 1 on b", "why": why})
    error = soon(worker.error)
    assert error.what == "worker 0 lost worker 1 on b."
    assert error.given == "worker 1 on b failed at step 7 (phase compute)"
    assert error.__notes__ == ["Traceback (most recent call last):\nValueError: boom"]


def test_the_first_failure_is_the_one_that_counts(worker: Watched) -> None:
    for rank in (1, 2):
        worker.watcher.send({"lost": f"worker {rank}", "why": "killed"})
    assert soon(worker.error).what == "worker 0 lost worker 1."
    assert worker.peers.connection_lost("Broken pipe").what == "worker 0 lost worker 1."


def test_what_waits_is_ended_when_a_worker_is_lost(worker: Watched) -> None:
    ended: list[PeerLostError | None] = []
    worker.peers.on_failure(lambda: ended.append(worker.error()))
    worker.watcher.send({"lost": "worker 1", "why": "killed"})
    [error] = soon(lambda: ended or None)
    assert error is not None  # who comes back from waiting finds the reason there


def test_of_a_broken_connection_the_reason_is_waited_for(worker: Watched) -> None:
    threading.Timer(0.2, worker.watcher.send, [{"lost": "worker 1", "why": "killed"}]).start()
    said = worker.peers.connection_lost("Connection closed by peer")
    assert (said.what, said.given) == ("worker 0 lost worker 1.", "killed")


def test_a_broken_connection_between_living_workers_is_told_as_it_was_said(
    worker: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.workers.membership.VERDICT_SECONDS", 0.1)
    said = worker.peers.connection_lost("Connection reset by peer")
    assert (said.what, said.given) == ("worker 0 lost another worker.", "Connection reset by peer")


def test_a_watcher_that_is_gone_is_missed(worker: Watched) -> None:
    worker.watcher.close()
    assert soon(worker.error).what == "worker 0 lost the watcher of its host."


def test_a_worker_of_torchrun_ends_with_it(watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    worker = watched()
    worker.heard("phase")
    assert worker.error() is None
    monkeypatch.setattr(os, "getppid", lambda: 1)  # as who loses its parent
    assert soon(worker.error).what == "worker 0 lost its launcher."


def test_the_stacks_of_a_worker_are_told_when_they_are_asked_for(worker: Watched) -> None:
    worker.watcher.send({"show": "stacks"})
    assert "test_the_stacks_of_a_worker_are_told" in worker.heard("stacks")["stacks"]


def test_what_a_recipe_allows_is_told(worker: Watched) -> None:
    worker.pulse.hang_seconds = 0.0
    assert soon(lambda: worker.heard("hang_seconds")["hang_seconds"]) == 0.0


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("boom"), "error", "ValueError: boom\n"),
        (DataError("A photo is broken.", given="1.jpg", expected="a JPEG", hint="x"), "error", "A photo is broken."),
        (PeerLostError("worker 0 lost worker 1.", given="", expected="", hint=""), "peer", "worker 0 lost worker 1."),
    ],
)
def test_a_worker_that_fails_says_why(worker: Watched, error: Exception, kind: str, text: str) -> None:
    worker.peers.leave(error)
    said = worker.heard("failed")
    assert (said["step"], said["phase"], said["kind"]) == (7, "compute", kind)
    assert text in said["failed"]


def test_a_worker_that_ends_says_so_after_its_last_place(worker: Watched) -> None:
    worker.peers.leave(None)
    messages: list[Message] = []
    soon(lambda: messages.extend(worker.watcher.receive(0.1)) or (messages[-1] if "leaves" in messages[-1] else None))
    assert [messages[-2]["phase"], messages[-1]] == ["end", {"leaves": "now"}]


def test_the_last_to_leave_waits_for_the_others(watched: Callable[..., Watched]) -> None:
    store = dist.HashStore()
    chief, other = watched(0, store, leaves_last=True), watched(1, store)
    leaving = threading.Thread(target=chief.peers.leave, args=(None,))
    leaving.start()
    assert chief.heard("leaves") == {"leaves": "last"}
    leaving.join(0.2)
    assert leaving.is_alive()
    other.peers.leave(None)
    leaving.join(HANG_SECONDS)
    assert not leaving.is_alive()


def test_the_last_to_leave_waits_for_nobody_who_is_lost(watched: Callable[..., Watched]) -> None:
    chief = watched(leaves_last=True)
    leaving = threading.Thread(target=chief.peers.leave, args=(None,))
    leaving.start()
    chief.watcher.send({"lost": "worker 1", "why": "killed"})
    leaving.join(HANG_SECONDS)
    assert not leaving.is_alive()


class GoneStore(dist.HashStore):
    """A store whose server is gone."""

    def add(self, key: str, amount: int) -> int:
        raise dist.DistNetworkError("Broken pipe\nand frames of C++")


def test_a_store_that_is_gone_keeps_nobody_from_leaving(
    watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.workers.peers.LEAVE_SECONDS", HANG_SECONDS)
    leaving = threading.Thread(target=watched(0, GoneStore(), leaves_last=True).peers.leave, args=(None,))
    leaving.start()
    leaving.join(HANG_SECONDS / 2)
    assert not leaving.is_alive()


def test_the_system_says_who_is_at_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert process_behind(ours) == (os.getpid(), os.geteuid())


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
