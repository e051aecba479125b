from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import Pipe

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from worker_processes import HANG_SECONDS

from lockstep.errors import WorkerError
from lockstep.workers import store_server
from lockstep.workers.socket_store import SocketStore
from lockstep.workers.store_server import MAX_VALUE_BYTES, StoreAddress, StoreServer

SOON = timedelta(milliseconds=20)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer()
    yield server
    server.close()


def stores(server: StoreServer) -> list[Store]:
    """As our own groups call it, and as torch's code does."""
    store = SocketStore(server.connect())
    server.__dict__.setdefault("kept", []).append(store)
    return [store, PrefixStore("prefix", store)]


def outcomes(store: Store) -> list[object]:
    """What each operation of a store answers."""
    store.set("a", "1")
    store.set("a", "2")
    store.append("a", "3")
    store.multi_set(["b", "c"], ["x", "y"])
    return [
        store.get("a"),
        store.multi_get(["c", "b", "a"]),
        store.add("n", 2),
        store.add("n", -5),
        store.get("n"),
        store.compare_set("new", "", "first"),
        store.compare_set("new", "other", "second"),
        store.compare_set("new", "first", "third"),
        store.get("new"),
        store.check(["a", "n"]),
        store.check(["a", "nothing"]),
        store.delete_key("a"),
        store.delete_key("a"),
        store.check(["a"]),
        store.wait(["b", "c"]),
    ]


def test_who_is_not_let_in_says_so_and_not_that_the_launcher_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "START_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: server.accept()[0].close())
        with pytest.raises(WorkerError, match="did not let this host in") as error:
            SocketStore(StoreAddress(*server.getsockname(), key="of this test, and of nobody else"))
    assert error.value.given.startswith("what listens there did not let this host in: ")
    assert error.value.hint == "read the screen of host 0: strangers may crowd its port"


@pytest.mark.parametrize("which", [0, 1])
def test_it_answers_as_torchs_own_store_does(server: StoreServer, which: int) -> None:
    assert outcomes(stores(server)[which]) == outcomes(dist.HashStore())


def test_values_of_any_bytes_come_back(server: StoreServer) -> None:
    store = SocketStore(server.connect())
    for value in (b"", bytes(range(256)), os.urandom(MAX_VALUE_BYTES)):
        store.set("key", value)
        assert store.get("key") == value


def test_one_worker_waits_for_what_another_sets(server: StoreServer) -> None:
    first, second = SocketStore(server.connect()), SocketStore(server.connect())
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(first.get, "late")
        second.set("late", "there")
        assert waiting.result(timeout=HANG_SECONDS) == b"there"


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.wait(["a", "b"], SOON),
        lambda store: (store.set_timeout(SOON), store.get("b")),
        lambda store: store.open("b", SOON),
    ],
)
def test_what_does_not_come_in_time_is_named(server: StoreServer, ask: Callable[[SocketStore], object]) -> None:
    store = SocketStore(server.connect())
    store.set("a", "1")
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0\.02 s for .*b"):
        ask(store)
    assert store.get("a") == b"1"  # The next request is answered as any other.


def test_a_clone_is_not_kept_waiting(server: StoreServer) -> None:
    store = SocketStore(server.connect())
    clone = store.clone()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.get, "late")
        clone.set("late", "there")
        assert waiting.result(timeout=HANG_SECONDS) == b"there"


def test_an_open_file_travels_without_a_name(server: StoreServer) -> None:
    first, second = SocketStore(server.connect()), SocketStore(server.connect())
    memory = os.memfd_create("test")
    os.write(memory, b"shared")
    first.share("file", memory)
    os.close(memory)
    arrived = second.open("file", SOON)
    first.delete_key("file")
    assert os.pread(arrived, 6, 0) == b"shared"
    os.close(arrived)
    with pytest.raises(dist.DistStoreError):
        second.open("file", SOON)


@pytest.mark.parametrize(
    "request_", [b"\xff", b"[]", b"7", b'["eval", "1"]', b'["set"]', json.dumps(["wait", 7, 0]).encode()]
)
def test_what_is_no_request_ends_its_own_connection_alone(server: StoreServer, request_: bytes) -> None:
    bad, good = server.connect(), SocketStore(server.connect())
    bad.send_bytes(request_)
    with pytest.raises(EOFError):
        bad.recv_bytes()
    good.set("a", "1")
    assert good.get("a") == b"1"


def test_what_cannot_be_stored_is_said_and_changes_nothing(server: StoreServer) -> None:
    store = SocketStore(server.connect())
    with pytest.raises(ValueError, match="a value of the store has at most 8,388,608 bytes, not 8,388,609"):
        store.set("long", bytes(MAX_VALUE_BYTES + 1))
    store.set("long", bytes(MAX_VALUE_BYTES))
    with pytest.raises(ValueError, match="append 'long': 8,388,609 bytes are too many"):
        store.append("long", b"1")
    store.set("text", "one")
    with pytest.raises(ValueError, match="add 'text': b'one' is no number"):
        store.add("text", 1)
    assert (len(store.get("long")), store.get("text")) == (MAX_VALUE_BYTES, b"one")
    store.wait(["text"], timedelta.max)


def test_a_store_whose_launcher_is_gone_says_so(server: StoreServer) -> None:
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises(dist.DistNetworkError, match="the launcher, which holds the store, is gone"):
        SocketStore(ours).check(["a"])


@pytest.mark.process
def test_a_forked_child_does_not_mix_its_requests_with_those_of_its_parent(server: StoreServer) -> None:
    store = SocketStore(server.connect())
    child = os.fork()
    if not child:
        try:
            store.set("a", "of the child")
        except ValueError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not store.check(["a"])


def test_stores_behind_other_prefixes_do_not_meet(server: StoreServer) -> None:
    store = SocketStore(server.connect())
    first, second = store.within("1/"), store.within("2/")
    first.set("a", "x")
    second.multi_set(["a", "b"], ["y", "z"])
    assert (first.get("a"), second.multi_get(["a", "b"]), store.get("1/a")) == (b"x", [b"y", b"z"], b"x")
    assert (first.check(["b"]), first.clone().get("a"), second.within("deep/").check(["a"])) == (False, b"x", False)
    store.forget("2/")
    assert (second.check(["a"]), second.check(["b"]), first.check(["a"])) == (False, False, True)


def test_forgotten_files_are_closed(server: StoreServer) -> None:
    store = SocketStore(server.connect())
    ours, theirs = Pipe()
    store.within("1/").share("memory", theirs.fileno())
    theirs.close()
    store.forget("1/")
    with pytest.raises(EOFError):
        ours.recv_bytes()


def test_a_wait_ends_when_the_store_is_shut_down_and_others_go_on(server: StoreServer) -> None:
    root = SocketStore(server.connect())
    store = root.within("1/")
    clone = store.clone()
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(each.get, "never") for each in (store, clone)]
        store.shut_down()
        for wait in waits:
            with pytest.raises(dist.DistNetworkError):
                wait.result(HANG_SECONDS)
    with pytest.raises(dist.DistNetworkError):
        store.set("a", "1")
    root.set("a", "1")
