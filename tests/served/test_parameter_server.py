from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from signal import SIGKILL
from typing import Any

import pytest
import torch
from thread_workers import run_threads
from torch import Tensor
from worker_processes import HANG_SECONDS, run_workers

from lockstep.errors import PeerLostError, WorkerError
from lockstep.exchange.tree import PartialSum
from lockstep.served.leases import Leases
from lockstep.served.parameter_server import Client, Published, Server
from lockstep.workers.rank import Worker, join

GRADIENTS = [torch.zeros(5, 3).t(), torch.zeros(4)]
MAX_STEPS = 20

transports = pytest.mark.parametrize("over_network", [False, True], ids=["one_host", "hosts"])


def placed(worker: Worker, over_network: bool) -> Worker:
    """The worker on a host of its own, for others reach it over the network then."""
    return replace(worker, host=f"host{worker.rank}") if over_network else worker


def new_parameters() -> list[Tensor]:
    return [torch.zeros(5, 3).t(), torch.zeros(4), torch.zeros((), dtype=torch.int64)]


def leases_of(num_workers: int, required: int, staleness: int | None = 0) -> Leases:
    return Leases(
        itertools.count(0, 10),
        slice_size=10,
        epoch_size=0,
        num_workers=num_workers,
        required=required,
        staleness=staleness,
    )


def gradient(start: int) -> PartialSum:
    values = torch.arange(15.0).view(5, 3).t() + start
    return PartialSum([values, values[:, 0].repeat(2)[:4]], [start / 3, float("nan")])


def serve(worker: Worker, leases: Leases, num_updates: int) -> list[list[tuple[int, list[Tensor], list[float]]]]:
    """Make updates that add the gradients to the parameters; returns what came in each."""
    parameters, updates = new_parameters(), []
    with closing(Server(worker, GRADIENTS, parameters, leases)) as server:
        server.publish(parameters, {"update": 0})
        for update in range(1, num_updates + 1):
            arrivals = server.next_update()
            updates.append(
                [(a.lease.slice, [t.clone() for t in a.partial.tensors], list(a.partial.numbers)) for a in arrivals]
            )
            for arrival in arrivals:
                for parameter, value in zip(parameters, arrival.partial.tensors, strict=False):
                    parameter.add_(value)
            parameters[2] += 1
            server.publish(parameters, {"update": update})
        server.end("that is all")
        server.wait_for_end()
    return updates


def compute(
    worker: Worker, during: Callable[[Client, Published], None] = lambda *_: None
) -> tuple[list[int], list[Tensor]]:
    """Send gradients until the end; returns the versions that came, and the last parameters."""
    parameters = new_parameters()
    versions = []
    with closing(Client(worker, GRADIENTS, parameters)) as client:
        while True:
            told = client.fetch()
            if told.tensors is not None:
                torch._foreach_copy_(parameters, [*told.tensors])
            if told.is_over:
                break
            during(client, told)
            if told.tensors is not None:
                versions.append(told.version)
                assert told.message == {"update": told.version}
            assert int(parameters[2]) == told.version
            if told.slice is not None:
                client.send(told.slice, told.version, gradient(told.slice), {"names": ["loss"]})
    assert told.end == "that is all"
    return versions, parameters


@transports
@pytest.mark.parametrize(("num_computing", "required"), [(1, 1), (3, 3), (2, 4), (3, 2)])
def test_updates_have_the_first_gradients_in_the_order_of_the_stream(
    num_computing: int, required: int, over_network: bool
) -> None:
    def work(worker: Worker) -> Any:
        worker = placed(worker, over_network)
        return serve(worker, leases_of(num_computing, required), 6) if worker.is_chief else compute(worker)

    updates, *computed = run_threads(work, num_computing + 1)
    starts = [[start for start, *_ in update] for update in updates]
    assert all(len(update) == required and update == sorted(update) for update in starts)
    assert len({*itertools.chain(*starts)}) == 6 * required, "no slice twice"
    total = new_parameters()
    for start, tensors, numbers in itertools.chain(*updates):
        expected = gradient(start)
        assert all(map(torch.equal, tensors, expected.tensors))
        assert [tensor.stride() for tensor in tensors] == [tensor.stride() for tensor in GRADIENTS]
        assert numbers[0] == start / 3
        assert numbers[1] != numbers[1]
        for tensor, value in zip(total, tensors, strict=False):
            tensor.add_(value)
    for versions, parameters in computed:
        assert versions == sorted(versions)
        assert torch.equal(parameters[0], total[0])
        assert int(parameters[2]) == 6


@transports
def test_asynchronous_workers_get_their_own_update_first(over_network: bool) -> None:
    def work(worker: Worker) -> Any:
        worker = placed(worker, over_network)
        if worker.is_chief:
            leases = leases_of(1, 1, staleness=None)
            serve(worker, leases, 5)
            return leases.behind
        return compute(worker)[0]

    behind, versions = run_threads(work, 2)
    assert versions == [0, 1, 2, 3, 4]
    assert behind == {0: 5}


@transports
def test_a_gradient_that_comes_too_late_is_dropped_and_its_slice_leased_anew(over_network: bool) -> None:
    has_begun, is_late = threading.Event(), threading.Event()

    def dawdle(client: Client, told: Published) -> None:
        if told.version == 0:
            has_begun.set()
            while not client.is_late(0):
                time.sleep(0.01)
            is_late.set()

    def outrun(_: Client, told: Published) -> None:
        if told.version in (0, 3):
            assert (is_late if told.version else has_begun).wait(HANG_SECONDS)

    def work(worker: Worker) -> Any:
        worker = placed(worker, over_network)
        if worker.is_chief:
            leases = leases_of(2, 1)
            updates = serve(worker, leases, 8)
            return [update[0][0] for update in updates], leases.dropped
        if worker.rank == 1:
            return compute(worker, dawdle)
        return compute(worker, outrun)

    (starts, dropped), *_ = run_threads(work, 3)
    assert len({*starts}) == 8, "no slice twice"
    assert {0, 10, 20} < {*starts}
    assert is_late.is_set()
    assert dropped[1] >= 1


@transports
def test_slices_of_a_worker_that_goes_are_computed_by_the_others(over_network: bool) -> None:
    gone = threading.Event()

    def stay(_: Client, told: Published) -> None:
        assert gone.wait(HANG_SECONDS)

    def work(worker: Worker) -> Any:
        worker = placed(worker, over_network)
        if worker.is_chief:
            return serve(worker, leases_of(2, 2), 4)
        if worker.rank == 2:
            return compute(worker, stay)
        client = Client(worker, GRADIENTS, new_parameters())
        told = client.fetch()
        client.close()
        gone.set()
        return told.slice

    updates, left, _ = run_threads(work, 3)
    assert left in [start for start, *_ in itertools.chain(*updates[:2])]


def test_a_server_whose_workers_are_all_gone_says_so() -> None:
    def work(worker: Worker) -> None:
        parameters = new_parameters()
        if not worker.is_chief:
            Client(worker, GRADIENTS, parameters).close()
            return
        server = Server(worker, GRADIENTS, parameters, leases_of(2, 1))
        server.publish(parameters, None)
        with pytest.raises(PeerLostError, match="lost all workers that compute"):
            server.next_update()
        server.close()

    run_threads(work, 3)


@transports
def test_a_worker_whose_server_is_gone_says_so(over_network: bool) -> None:
    def work(worker: Worker) -> None:
        worker, parameters = placed(worker, over_network), new_parameters()
        if worker.is_chief:
            Server(worker, GRADIENTS, parameters, leases_of(1, 1)).close()
            return
        client = Client(worker, GRADIENTS, parameters)
        with pytest.raises(PeerLostError, match="lost the chief"):
            client.fetch()
        client.close()

    run_threads(work, 2)


def test_workers_that_wait_learn_of_a_version_at_which_the_server_pauses() -> None:
    """All workers may be needed there, as for an evaluation; the one without a lease must not wait for the end."""
    both, knows = threading.Barrier(2), threading.Event()

    def work(worker: Worker) -> Any:
        parameters = new_parameters()
        if worker.is_chief:
            with closing(Server(worker, GRADIENTS, parameters, leases_of(2, 1, staleness=None))) as server:
                server.publish(parameters, "first")
                server.next_update()
                server.publish(parameters, "second")  # the gradient of the other worker waits, and so does the worker
                server.pause()
                assert knows.wait(HANG_SECONDS)
                server.resume()
                server.next_update()
                server.publish(parameters, "third")
                server.end(None)
                server.wait_for_end()
            return None
        told = []
        with closing(Client(worker, GRADIENTS, parameters)) as client:
            while not told or not told[-1].is_over:
                told.append(client.fetch())
                if len(told) == 1:
                    both.wait(HANG_SECONDS)
                if told[-1].slice is not None:
                    client.send(told[-1].slice, told[-1].version, gradient(0))
                elif not told[-1].is_over:
                    knows.set()
        return [each.message for each in told if each.slice is None and not each.is_over]

    _, *told = run_threads(work, 3)
    assert sorted(told) == [[], ["second"]]


def test_a_worker_that_reads_nothing_holds_nobody_up() -> None:
    """What is sent to it is more than the system keeps: the server waits for it in a thread of its own."""
    wide = [torch.zeros(5_000_000)]
    done = threading.Event()

    def work(worker: Worker) -> Any:
        worker, parameters = placed(worker, over_network=True), [tensor.clone() for tensor in wide]
        if worker.is_chief:
            with closing(Server(worker, GRADIENTS, parameters, leases_of(2, 1))) as server:
                for _ in range(6):
                    server.publish(parameters, None)
                    [arrival] = server.next_update()
                    assert arrival.lease.worker == 1
                server.publish(parameters, None)
                done.set()
                server.end(None)
                server.wait_for_end()
            return None
        with closing(Client(worker, GRADIENTS, parameters)) as client:
            if worker.rank == 2:
                client._frames.send({"fetch": True})
                assert done.wait(HANG_SECONDS)
                client._frames.shut_down()
                return None
            while not (told := client.fetch()).is_over:
                assert told.slice is not None
                client.send(told.slice, told.version, gradient(told.slice))
        return None

    run_threads(work, 3)


@transports
def test_what_others_have_counted_is_told_or_else_is_to_be_counted_in_a_moment(over_network: bool) -> None:
    told: dict[int, list[Any]] = {}

    def work(worker: Worker) -> None:
        worker, parameters = placed(worker, over_network), new_parameters()
        if worker.is_chief:
            with closing(Server(worker, GRADIENTS, parameters, leases_of(2, 3))) as server:
                server.publish(parameters, None)
                worker.group.barrier("both have counted")
                server.end(None)
                server.wait_for_end()
            return
        with closing(Client(worker, GRADIENTS, parameters)) as client:
            start = client.fetch().slice
            assert start is not None
            known, missing = client.share_counts({start: {"boxes": start / 3}}, [0, 10])
            while missing:  # the other one is late
                known, missing = client.share_counts({}, [0, 10])
            told[worker.rank] = [known, client.share_counts({}, [0, 70])]
            worker.group.barrier("both have counted")
            client.fetch()

    run_threads(work, 3)
    of_first = {0: {"boxes": 0.0}}
    assert told[1] == told[2] == [{**of_first, 10: {"boxes": 10 / 3}}, (of_first, [70])]


@pytest.mark.parametrize(
    "said",
    [
        {"gradient": [0, 0, ["a"]], "message": None},
        {"gradient": [10**30, 0, []], "message": None},
        {"gradient": [0, 0, [1.0]]},
        {"counts": [[0, {"boxes": "many"}]], "batch": [0]},
        {"counts": [0], "batch": [0]},
        {"take": "everything"},
    ],
)
def test_what_no_worker_sends_is_an_error_of_the_chief_that_names_the_sender(said: dict[str, Any]) -> None:
    def work(worker: Worker) -> None:
        parameters = new_parameters()
        if not worker.is_chief:
            with closing(Client(worker, GRADIENTS, parameters)) as client:
                client.fetch()
                client._frames.send(said)
                with pytest.raises(PeerLostError):
                    client.fetch()
            return
        with closing(Server(worker, GRADIENTS, parameters, leases_of(1, 1))) as server:
            server.publish(parameters, None)
            with pytest.raises(WorkerError, match="What worker 1 has sent to the chief cannot be read"):
                server.next_update()

    run_threads(work, 2)


def train_until_killed(num_updates: int, victim: int) -> Any:
    """In a process each: the victim ends by SIGKILL when it has work to do, or work of others to take."""
    worker = join("cpu")
    try:
        if not worker.is_chief:
            return compute(worker, lambda *_: os.kill(os.getpid(), SIGKILL) if worker.rank == victim else None)[0]
        leases = leases_of(worker.num_workers - 1, 2)
        if victim == 0:
            with closing(Server(worker, GRADIENTS, new_parameters(), leases)) as server:
                server.publish(new_parameters(), {"update": 0})
                server.next_update()
                os.kill(os.getpid(), SIGKILL)
        return [[start for start, *_ in update] for update in serve(worker, leases, num_updates)]
    except PeerLostError as error:
        return str(error)


@pytest.mark.process
def test_where_nobody_watches_over_the_run_a_worker_that_is_killed_ends_it_for_all() -> None:
    """Under our launcher it is the launcher that ends it, or lets the others go on."""
    chief, _, other = run_workers(train_until_killed, 3, 10**6, 1, lost=[1])
    assert chief.startswith("worker 0 lost worker 1")
    assert other.startswith("worker 2 lost worker 1")


@pytest.mark.process
def test_workers_whose_chief_is_killed_say_so() -> None:
    _, *said = run_workers(train_until_killed, 3, 5, 0, lost=[0])
    assert all("lost" in text for text in said), said


def test_workers_with_other_tensors_are_refused() -> None:
    def work(worker: Worker) -> None:
        parameters = new_parameters()[worker.rank :]
        rule = [leases_of(1, 1)] if worker.is_chief else []
        with pytest.raises(WorkerError, match="do not agree on the tensors to exchange: worker 1 differs"):
            (Server if worker.is_chief else Client)(worker, GRADIENTS, parameters, *rule)

    run_threads(work, 2)
