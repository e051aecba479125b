from __future__ import annotations

from typing import Any

import pytest
import torch
from thread_workers import thread_workers

import lockstep as ls
from lockstep import tensors
from lockstep.errors import InputError, WorkerError
from lockstep.exchange import bucketed, transports
from lockstep.exchange.bucketed import BucketedTransport
from lockstep.exchange.exchange import AllReduce, Alone, Reducer
from lockstep.exchange.transports import SharedMemoryTransport, TreeTransport
from lockstep.exchange.tree import PartialSum, TreeSum
from lockstep.workers.rank import Worker

GPU = torch.device("meta")  # any device that is not the CPU


def worker(num_workers: int = 2, **fields: Any) -> Worker:
    return thread_workers(num_workers, **fields)[0]


def sums(*numbers: float) -> TreeSum:
    found = TreeSum()
    for tower, number in enumerate(numbers):
        found.add(tower, PartialSum([torch.tensor([number])], [number]))
    return found


def numbers_of(*numbers: float) -> TreeSum:
    found = TreeSum()
    for tower, number in enumerate(numbers):
        found.add(tower, PartialSum([], [number]))
    return found


@pytest.mark.parametrize("exchange", [Alone(), AllReduce(), AllReduce(exact=True), AllReduce("nccl")])
def test_one_worker_adds_up_its_towers_by_itself(exchange: Alone | AllReduce) -> None:
    connection = exchange.connect(ls.join(), 3)
    total = connection.total(sums(1.0, 2.0, 4.0))
    assert (total.tensors[0].item(), total.numbers) == (7.0, [7.0])
    connection.close()


def test_alone_refuses_other_workers() -> None:
    with pytest.raises(InputError, match="leaves out the towers of the other workers") as raised:
        Alone().connect(worker(2), 2)
    assert raised.value.given == "Alone() with 2 workers"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "shared_memory"),
        ({"num_local_workers": 1}, "gloo"),
        ({"device": GPU}, "nccl"),
        ({"device": GPU, "shares_device": True}, "gloo"),
    ],
)
def test_the_transport_follows_from_device_and_hosts(fields: dict[str, Any], expected: str) -> None:
    assert AllReduce().resolve(worker(**fields)) == expected
    assert AllReduce("gloo").resolve(worker(**fields)) == "gloo"


def test_workers_of_one_cpu_host_share_memory() -> None:
    assert isinstance(AllReduce().connect(worker(), 2), SharedMemoryTransport)


@pytest.mark.parametrize("name", ["gloo", "nccl"])
def test_an_exact_sum_over_a_network_is_that_of_the_tree(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bucketed, transports):
        monkeypatch.setattr(module, "collectives", lambda worker, backend: backend)
    here = worker(device=GPU, num_local_workers=1)
    assert isinstance(AllReduce(name, exact=True).connect(here, 5), TreeTransport)
    assert isinstance(AllReduce(name).connect(here, 5), BucketedTransport)


def test_an_exact_sum_of_two_terms_is_an_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucketed, "collectives", lambda worker, backend: backend)
    for num_towers in (2, 3, 4, 8):
        assert isinstance(AllReduce("gloo", exact=True).connect(worker(), num_towers), BucketedTransport)


@pytest.mark.parametrize(
    ("exchange", "fields", "given"),
    [
        (AllReduce("shared_memory"), {"device": GPU}, "device meta, 2 of 2 workers here"),
        (AllReduce("shared_memory"), {"num_local_workers": 1}, "device cpu, 1 of 2 workers here"),
        (AllReduce("nccl"), {}, "AllReduce(transport='nccl') on cpu"),
        (
            AllReduce("nccl"),
            {"device": GPU, "shares_device": True},
            "AllReduce(transport='nccl') on meta, which workers share",
        ),
    ],
)
def test_a_transport_that_cannot_do_it_is_refused(exchange: AllReduce, fields: dict[str, Any], given: str) -> None:
    with pytest.raises(InputError) as raised:
        exchange.connect(worker(**fields), 2)
    assert raised.value.given == given


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"compression": "int8"}, "AllReduce(compression='int8')"),
        ({"compression": "bf16", "exact": True}, "AllReduce(exact=True, compression='bf16')"),
    ],
)
def test_a_compression_that_cannot_be_is_refused(options: dict[str, Any], given: str) -> None:
    with pytest.raises(InputError) as raised:
        AllReduce(**options)
    assert raised.value.given == given


def test_nothing_is_compressed_in_shared_memory() -> None:
    with pytest.raises(InputError, match="Nothing is compressed in shared memory") as raised:
        AllReduce(compression="bf16").connect(worker(), 2)
    assert raised.value.given == "AllReduce(compression='bf16') with 2 workers on one host"
    assert AllReduce(compression="bf16").connect(ls.join(), 2).total(sums(1.0, 2.0)).tensors[0].item() == 3.0, "alone"


class OtherWorker:
    """An exchange with one more worker, which always sends these numbers; keeps what was connected and sent."""

    def __init__(self, *theirs: float) -> None:
        self.theirs = theirs
        self.connected: list[int] = []
        self.sent: list[list[tuple[int, list[float]]]] = []

    def connect(self, worker: Worker, num_towers: int) -> OtherWorker:
        self.connected.append(num_towers)
        return self

    def total(self, sums: TreeSum) -> PartialSum:
        self.sent.append([(node.start, partial.numbers) for node, partial in sums.nodes])
        return sums.total().plus(PartialSum([], list(self.theirs)))

    def close(self) -> None:
        return


def test_gradients_go_through_one_connection_and_counts_through_another() -> None:
    other = OtherWorker(10.0)
    here = worker(group=type("Group", (), {"agree": lambda *_: None})())
    reducer = Reducer(other, here, 3, own=[0, 1])
    assert other.connected == [3]
    assert reducer.counted([{"a": 1.0}, {"a": 2.0}]) == {"a": 13.0}
    assert reducer.counted([{"a": 3.0}, {"a": 4.0}]) == {"a": 17.0}
    assert other.connected == [3, 3], "the second connection serves again"
    assert reducer.total(numbers_of(1.0, 2.0)).numbers == [13.0]
    assert other.connected == [3, 3]


def test_counts_of_each_leaf_stand_at_its_place_in_the_tree() -> None:
    other = OtherWorker(0.0)
    here = worker(group=type("Group", (), {"agree": lambda *_: None})())
    Reducer(other, here, 4, own=[1, 2]).counted([{"a": 1.0}, {"a": 2.0}])
    assert other.sent == [[(1, [1.0]), (2, [2.0])]]


def test_what_a_device_counts_stays_there_and_is_nan_where_it_is_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "READ_AT_ONCE", frozenset())
    counted = Reducer(Alone(), ls.join(), 2, own=[0, 1]).counted(
        [
            {"a": torch.tensor(2), "b": 1.0, "c": torch.tensor(3.0)},
            {"a": torch.tensor(5), "b": 2, "c": torch.tensor(-1)},
        ]
    )
    assert all(isinstance(count, torch.Tensor) for count in counted.values())
    assert (float(counted["a"]), float(counted["b"])) == (7.0, 3.0)
    assert counted["c"].isnan()  # type: ignore[union-attr]


def test_counts_are_summed_by_name() -> None:
    other = OtherWorker(10.0, 100.0)
    agreed: list[tuple[str, Any]] = []
    here = worker(group=type("Group", (), {"agree": lambda _, what, value: agreed.append((what, value))})())
    reducer = Reducer(other, here, 3, own=[0, 1])
    for _ in range(2):
        assert reducer.counted([{"b": 1, "a": torch.tensor(2)}, {"a": 3.0, "b": 4}]) == {"a": 15.0, "b": 105.0}
    assert agreed == [("what is counted", ["a", "b"])], "once"


def test_nothing_to_count_needs_no_exchange() -> None:
    other = OtherWorker()
    assert Reducer(other, ls.join(), 1, own=[0]).counted([{}]) == {}
    assert other.sent == []


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"a": -1}, "The count of 'a' is -1.0."),
        ({"a": float("inf")}, "The count of 'a' is inf."),
        ({"a": torch.tensor(float("nan"))}, "The count of 'a' is nan."),
        ({"a": torch.ones(2)}, "count of 'a'"),
        ({"a": "2"}, "count of 'a'"),
        ([1], "what counts"),
        ({"b": 1}, "The count function returned other names than before."),
        ({"a": 1, "b": 1}, "The count function returned other names than before."),
    ],
)
def test_counts_that_cannot_be_used_are_refused(counts: Any, message: str) -> None:
    reducer = Reducer(OtherWorker(0.0), ls.join(), 1, own=[0])
    reducer.counted([{"a": 1}])
    with pytest.raises(InputError, match=message):
        reducer.counted([counts])


def test_workers_that_count_different_things_are_refused() -> None:
    def disagree(_: object, what: str, value: object) -> None:
        raise WorkerError(f"not agreed on {what}", given="a", expected="b", hint="c")

    here = worker(group=type("Group", (), {"agree": disagree})())
    with pytest.raises(WorkerError, match="not agreed on what is counted"):
        Reducer(OtherWorker(), here, 2, own=[0]).counted([{"a": 1}])
