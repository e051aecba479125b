"""What survival.py measures of served exchanges inside of workers: one that is slow, and what serving costs.

Each part is called in all workers at once; the chief, worker 0, serves and reports. To compute is to sleep here, so
that workers are as fast as they are meant to be, however few cores there are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from measuring import compared, report, take_turns
from torch import Tensor, nn

import lockstep as ls
from lockstep.exchange.exchange import Exchange
from lockstep.exchange.tree import PartialSum, TreeSum
from lockstep.served.leases import Leases
from lockstep.served.parameter_server import Client, Server
from lockstep.workers.rank import Worker

SLOW, UPDATE, RATE = "slow", "update", "rate"
SLOW_AIM = 1 / 0.9
"""Of the time of a step, beside that without a slow worker."""
SECONDS = 0.02
"""That a tower computes; ten times that on the slow worker."""
SLOWER = 10
WIDTH = 512
"""Of a square matrix of 1 MB."""
MEGABYTES = (1, 25)
NUM_TENSORS = 8
WARM_UP_UPDATES = 8
"""In which the memory is touched for the first time."""


@dataclass(frozen=True)
class Contender:
    """An exchange, and whether the last worker is slow."""

    exchange: Exchange
    num_towers: int
    is_slow: bool


# A slow worker ------------------------------------------------------------------------------------------------------


def slow(rounds: int, is_quick: bool) -> None:
    """Steps where one of four workers that compute is ten times as slow as the others, and where none is."""
    here = ls.join("cpu")
    num_computing = here.num_workers - 1
    contenders = {
        "backup, none slow": Contender(ls.Backups(), num_computing - 1, False),
        "backup": Contender(ls.Backups(), num_computing - 1, True),
        "all-reduce": Contender(ls.AllReduce(), here.num_workers, True),
        "asynchronous, none slow": Contender(ls.Asynchronous(), 1, False),
        "asynchronous": Contender(ls.Asynchronous(), 1, True),
    }
    steps = {name: Steps(here, contender) for name, contender in contenders.items()}
    per_round = 5 if is_quick else 30
    times = take_turns(contenders, rounds, lambda name: steps[name].milliseconds(per_round))
    if not here.is_chief:
        return
    for ours, theirs, aim in (
        ("backup", "backup, none slow", SLOW_AIM),
        ("backup", "all-reduce", None),
        ("asynchronous", "asynchronous, none slow", None),
    ):
        line = compared({"ours": times[ours], "theirs": times[theirs]})
        comparison = f"{num_computing} workers, one {SLOWER} times as slow: {ours} / {theirs}"
        report(comparison, {**line, **steps[ours].arrivals(), "aim": aim})


class Steps:
    """The training of a net of 1 MB by one exchange, whose towers take the same time, but for those that are slow."""

    def __init__(self, here: Worker, contender: Contender) -> None:
        torch.manual_seed(0)
        is_slow = contender.is_slow and here.rank == here.num_workers - 1
        self._seconds = SECONDS * (SLOWER if is_slow else 1)
        self._towers, self._exchange = ls.Towers(contender.num_towers), contender.exchange
        self._state = ls.TrainState(nn.Linear(WIDTH, WIDTH), ls.optim.SGD(0.001))
        data = ls.data.Arrays({"x": torch.randn(6000, WIDTH)})
        self._loader = ls.data.Loader(data, batch_size=60)
        self._last: ls.StepReport | None = None

    def milliseconds(self, per_round: int) -> float:
        """Train a step to warm up, and then so many: milliseconds of each, as the chief sees it."""
        ends = []
        until = ls.Steps(self._state.step + per_round + 1)
        reports = ls.train_steps(self._state, self._losses, self._loader, self._towers, self._exchange, until=until)
        for each in reports:
            self._last = each
            ends.append(time.perf_counter())
        seconds = ends[-1] - ends[0]
        return seconds / max(1, len(ends) - 1) * 1000  # other workers may not hear of all steps

    def arrivals(self) -> dict[str, object]:
        """What has become of the gradients of the last round."""
        arrivals = self._last.arrivals if self._last is not None else None
        if arrivals is None:
            return {}
        return {"used": arrivals.used, "dropped": arrivals.dropped, "staleness": arrivals.staleness}

    def _losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        time.sleep(self._seconds)
        return {"loss": (model(batch["x"]) - batch["x"]).square().mean()}


# What it costs ------------------------------------------------------------------------------------------------------


def update(rounds: int, is_quick: bool) -> None:
    """One update from the gradients of all workers that compute nothing: served, and by torch's all-reduce."""
    here = ls.join("cpu")
    store = dist.PrefixStore("by hand", here.group.store)
    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.num_workers)
    computing = dist.new_group(range(1, here.num_workers))
    num_computing = here.num_workers - 1
    for megabytes in MEGABYTES[:1] if is_quick else MEGABYTES:
        num_updates = 50 if megabytes == 1 else 15
        contenders: dict[str, Callable[[], Turn]] = {
            "shared memory": partial(served, here, megabytes, num_updates, num_computing, 0),
            "network": partial(served, elsewhere(here), megabytes, num_updates, num_computing, 0),
            "all_reduce": partial(reduced, here, megabytes, num_updates, computing),
        }
        turns = take_turns(contenders, rounds, lambda name: contenders[name]().milliseconds)  # noqa: B023
        if here.is_chief:
            for name in ("shared memory", "network"):
                comparison = f"update of {megabytes} MB, {num_computing} workers: {name} / dist.all_reduce"
                line = compared({"ours": turns[name], "theirs": turns["all_reduce"]})
                report(comparison, {**line, "aim": None})


def rate(rounds: int, is_quick: bool) -> None:
    """Asynchronous updates from workers that compute nothing, and how stale their gradients are."""
    here = ls.join("cpu")
    for megabytes in MEGABYTES[:1] if is_quick else MEGABYTES:
        num_updates = 300 if megabytes == 1 else 40
        for name, worker in (("shared memory", here), ("network", elsewhere(here))):
            turns = [served(worker, megabytes, num_updates, 1, None) for _ in range(rounds)]
            if not here.is_chief:
                continue
            ages = [age for turn in turns for age, times in turn.staleness.items() for _ in range(times)]
            line = compared({"ours": [turn.milliseconds for turn in turns]})
            line |= {"staleness_mean": statistics.mean(ages), "staleness_max": max(ages), "aim": None}
            report(f"asynchronous update of {megabytes} MB, {here.num_workers - 1} workers: {name}", line)


@dataclass(frozen=True)
class Turn:
    """Some updates: milliseconds of each, and the gradients used by their staleness."""

    milliseconds: float
    staleness: Mapping[int, int]


def served(worker: Worker, megabytes: int, num_updates: int, required: int, staleness: int | None) -> Turn:
    """Make updates from gradients that are there already."""
    parameters = [torch.zeros((megabytes << 18) // NUM_TENSORS) for _ in range(NUM_TENSORS)]
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    if not worker.is_chief:
        client = Client(worker, gradients, parameters)
        while not (told := client.fetch()).is_over:
            if told.tensors is not None:
                torch._foreach_copy_(parameters, [*told.tensors])
            if told.slice is not None:
                client.send(told.slice, told.version, PartialSum(gradients, [1.0]))
        client.close()
        return Turn(0.0, {})
    num_computing = worker.num_workers - 1
    leases = Leases(
        count(), slice_size=1, epoch_size=0, num_workers=num_computing, required=required, staleness=staleness
    )
    server = Server(worker, gradients, parameters, leases)
    server.publish(parameters, None)
    for number in range(WARM_UP_UPDATES + num_updates):
        if number == WARM_UP_UPDATES:
            began = time.perf_counter()
        sums = TreeSum()
        for index, arrival in enumerate(server.next_update()):
            sums.add(index, arrival.partial)
        torch._foreach_add_(parameters, sums.total().tensors, alpha=-0.1)
        server.publish(parameters, None)
    milliseconds = (time.perf_counter() - began) / num_updates * 1000
    server.end(None)
    server.wait_for_end()
    server.close()
    return Turn(milliseconds, dict(leases.behind))


def reduced(worker: Worker, megabytes: int, num_updates: int, computing: dist.ProcessGroup) -> Turn:
    """The same updates on each of the workers that compute, by all-reduce; the chief waits for them."""
    parameters = [torch.zeros((megabytes << 18) // NUM_TENSORS) for _ in range(NUM_TENSORS)]
    gradient = torch.ones(megabytes << 18)
    for number in range(WARM_UP_UPDATES + num_updates):
        if number == WARM_UP_UPDATES:
            dist.barrier()
            began = time.perf_counter()
        if worker.is_chief:
            continue
        dist.all_reduce(gradient, group=computing)
        gradient.mul_(1 / computing.size())
        torch._foreach_add_(parameters, list(gradient.chunk(NUM_TENSORS)), alpha=-0.1)
    dist.barrier()
    return Turn((time.perf_counter() - began) / num_updates * 1000, {})


def elsewhere(worker: Worker) -> Worker:
    """The worker as if on a host of its own: it takes the way over the network, here the loopback."""
    return replace(worker, host=f"host{worker.rank}")


PARTS = {SLOW: slow, UPDATE: update, RATE: rate}
