"""What exchange.py measures inside of workers: steps, bare sums, shared memory, the watch, and towers computed again.

Each part is called in all workers at once; the chief reports.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from accelerator_peers import net
from measuring import compared, interleave, report
from parity_step import LR, MOMENTUM, Step, losses, mnist_batch, plain, seeded
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from lockstep.exchange.exchange import Connection, Exchange
from lockstep.exchange.tree import PartialSum, TreeSum
from lockstep.models.mnist import MnistNet
from lockstep.training.replicas import checksum_of
from lockstep.training.step import bind
from lockstep.workers.rank import Worker

STEPS, BARE, SHARED, WATCH, REPLAY = "steps", "bare", "shared", "watch", "replay"
DDP_AIM, EXACT_AIM, EXACT_AIM_ODD, SHARED_AIM, WATCH_AIM, REPLAY_AIM = 1.0, 1.03, 1.3, 1.10, 0.005, 0.01
WIDTH = 512
"""Of a square matrix of 1 MB."""
MEGABYTES = (1, 25, 100)
COMPARE_STEPS = REPLAY_STEPS = 100
WATCHED_SECONDS = 5.0


class NoExchange:
    """Each worker makes the update of its own towers, and the workers come to differ."""

    def connect(self, worker: Worker, num_towers: int) -> Connection:
        return self

    def total(self, sums: TreeSum) -> PartialSum:
        return sums.total()

    def close(self) -> None:
        return


@dataclass(frozen=True)
class Contest:
    """A net and its batches, over which the exchanges take turns."""

    make: Callable[[], nn.Module]
    batch: dict[str, Tensor]
    """Of this worker."""
    per_round: int
    """Steps in a turn."""
    is_net: bool = True
    """It computes as much as real nets do for what they send."""


# Steps --------------------------------------------------------------------------------------------------------------


def steps(rounds: int, is_quick: bool) -> None:
    """Whole steps over gloo: ours beside DDP, and exact beside ours."""
    here = join_gloo()
    is_power_of_two = here.num_workers & here.num_workers - 1 == 0
    exact_aim = EXACT_AIM if is_power_of_two else EXACT_AIM_ODD
    for name, contest in contests(here.rank, is_quick).items():
        ddp = DistributedDataParallel(seeded(contest.make), gradient_as_bucket_view=True)
        contenders = {
            "ours": our_step(contest, ls.AllReduce(transport="gloo")),
            "DDP": plain(ddp, contest.batch, False),
            "exact": our_step(contest, ls.AllReduce(transport="gloo", exact=True)),
        }
        times, found = take_turns(contenders, rounds, contest.per_round)
        check_same(found)
        tell(f"{name}, {here.num_workers} workers: AllReduce / DDP", times, "ours", "DDP", DDP_AIM)
        aim = exact_aim if contest.is_net else None
        tell(f"{name}, {here.num_workers} workers: exact / AllReduce", times, "exact", "ours", aim)


def contests(rank: int, is_quick: bool) -> dict[str, Contest]:
    """By name; the batch of a worker does not depend on how many there are."""
    size, pixels, megabytes = (2, 64, MEGABYTES[:1]) if is_quick else (8, 112, MEGABYTES)
    generator = torch.Generator().manual_seed(1 + rank)
    photos = torch.randint(0, 256, (size, 3, pixels, pixels), dtype=torch.uint8, generator=generator)
    vectors = torch.randn(16, WIDTH, generator=generator) / WIDTH**0.5
    labels = torch.randint(1, WIDTH, (16,), generator=generator)
    squares = {
        f"{number} MB": Contest(lambda number=number: Matrices(number), {"image": vectors, "label": labels}, 6, False)
        for number in megabytes
    }
    return {
        **squares,
        "MNIST net": Contest(MnistNet, mnist_batch(64, rank), 6),
        "ResNet-50": Contest(Photos, {"image": photos, "label": labels[:size]}, 1),
    }


class Matrices(nn.Module):
    """The mean of so many matrices' products: a step moves it as little as one of them, however many there are."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number))

    def forward(self, vectors: Tensor) -> Tensor:
        outputs = [layer(vectors) for layer in self.layers]
        return torch.stack(outputs).mean(0)


class Photos(nn.Module):
    """ResNet-50 on pixels from 0 to 255."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net("resnet50")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images.float() / 255)
        return logits


def our_step(contest: Contest, exchange: Exchange, replay_steps: int = 0) -> Step:
    """One tower a worker."""
    here = ls.join()
    state = ls.TrainState(seeded(contest.make), ls.optim.SGD(LR, momentum=MOMENTUM, nesterov=True))
    state.replay_steps = replay_steps
    bound = bind(state, ls.Towers(here.num_workers, channels_last=True), exchange)
    size = len(contest.batch["label"]) * here.num_workers
    towers = range(here.rank, here.rank + 1)
    batch = ls.Batch(contest.batch, position=0, batch_size=size, towers=towers, epoch_size=size)

    def step(state: ls.TrainState = state) -> float:  # held here: its step does not keep it alive
        return bound(losses, batch).total

    return step


# Bare sums ----------------------------------------------------------------------------------------------------------


def bare(rounds: int, is_quick: bool) -> None:
    """The sum of one tensor over the workers: by torch, by AllReduce, exact, and through shared memory."""
    here = join_gloo()
    exchanges = {
        "ours": ls.AllReduce(transport="gloo"),
        "exact": ls.AllReduce(transport="gloo", exact=True),
        "shared memory": ls.AllReduce(transport="shared_memory"),
    }
    for megabytes in MEGABYTES[:1] if is_quick else MEGABYTES:
        values = torch.randn(megabytes << 18)
        plain_sum = values.clone()
        connections = {name: exchange.connect(here, here.num_workers) for name, exchange in exchanges.items()}
        contenders: dict[str, Step] = {"all_reduce": lambda values=plain_sum: bare_sum(values)}
        for name, connection in connections.items():
            contenders[name] = lambda connection=connection, values=values: summed(connection, here.rank, values)
        times, _ = take_turns(contenders, rounds, 100 // megabytes if megabytes > 1 else 30)
        for name in exchanges:
            what = f"sum of {megabytes} MB, {here.num_workers} workers: {name} / dist.all_reduce"
            tell(what, times, name, "all_reduce", None)
        for connection in connections.values():
            connection.close()


def bare_sum(values: Tensor) -> float:
    dist.all_reduce(values)
    values.mul_(0.1)  # else it grows without bound
    return 0.0


def summed(connection: Connection, rank: int, values: Tensor) -> float:
    sums = TreeSum()
    sums.add(rank, PartialSum([values], [1.0]))
    connection.total(sums)
    return 0.0


# Shared memory ------------------------------------------------------------------------------------------------------


def shared(rounds: int, is_quick: bool) -> None:
    """Two workers of one host beside the same two without an exchange."""
    here = join_gloo()
    for size, aim in ((256, SHARED_AIM), (64, None)):
        contest = Contest(MnistNet, mnist_batch(size // here.num_workers, here.rank), 6)
        contenders = {"shared memory": our_step(contest, ls.AllReduce()), "none": our_step(contest, NoExchange())}
        times, _ = take_turns(contenders, rounds, contest.per_round)
        tell(f"MNIST net, batch {size}: shared memory / no exchange", times, "shared memory", "none", aim)


# A tower computed again ---------------------------------------------------------------------------------------------


def replay(rounds: int, is_quick: bool) -> None:
    """What it takes to compute a tower again on all workers at each hundredth step, as a share of all steps."""
    here = join_gloo()
    for name, contest in contests(here.rank, is_quick).items():
        if contest.is_net:
            contenders = {"again": our_step(contest, ls.AllReduce(), 1), "plain": our_step(contest, ls.AllReduce())}
            times, found = take_turns(contenders, rounds, contest.per_round)
            check_same(found)
            more = [(again - plain) / REPLAY_STEPS for again, plain in zip(times["again"], times["plain"], strict=True)]
            tell(f"{name}: a tower again / step", {**times, "more": more}, "more", "plain", REPLAY_AIM)


# The watch ----------------------------------------------------------------------------------------------------------


def watch(rounds: int, is_quick: bool) -> None:
    """What the watch computes, as a share of the time of a step: the beats, and the checksums of the model."""
    here = ls.join("cpu")
    contest = Contest(MnistNet, mnist_batch(64, here.rank), 6)
    step = our_step(contest, ls.AllReduce())
    step()
    before, began, count = watching_seconds(), time.perf_counter(), 0
    while count < 10 or here.group.broadcast(time.perf_counter() - began) < WATCHED_SECONDS * rounds / 15:
        for _ in range(contest.per_round):
            step()
            count += 1
    seconds = time.perf_counter() - began
    share = (watching_seconds() - before) / seconds
    model = seeded(MnistNet)
    tensors = [*model.parameters(), *model.buffers(), *(torch.zeros_like(each) for each in model.parameters())]
    checksum = interleave({"ours": lambda: checksum_of(tensors, 1)}, rounds, per_round=10)["ours"]
    if here.is_chief:
        launcher = "our launcher" if here.pulse.launched else "another launcher"
        step_ms = 1000 * seconds / count
        parts = {"beats": share * step_ms, "checksum": min(checksum) / COMPARE_STEPS}
        for name, milliseconds in parts.items():
            line = {**compared({"ours": [milliseconds], "theirs": [step_ms]}), "aim": WATCH_AIM}
            report(f"MNIST net, {launcher}: {name} / step", line)


def watching_seconds() -> float:
    """CPU seconds of this worker's threads that beat and listen, and of the process that watches it."""
    threads = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("lockstep")]
    times = [Path(f"/proc/self/task/{thread}/schedstat") for thread in threads]
    times += [Path(f"/proc/{pid}/schedstat") for pid in watchers()]
    return sum(int(path.read_text().split()[0]) for path in times) / 1e9


def watchers() -> list[int]:
    """Our launcher, which has started the fork server that this worker is from; else what this worker has started."""
    if ls.join().pulse.launched:
        return [parent_of(os.getppid())]
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# Measuring ----------------------------------------------------------------------------------------------------------


def join_gloo() -> Worker:
    """Join the run, with a default process group for DDP beside it."""
    here = ls.join("cpu")
    store = dist.PrefixStore("by hand", here.group.store)
    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.num_workers)
    return here


def take_turns(
    contenders: Mapping[str, Step], rounds: int, per_round: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds of each by round, all workers together, and what each has returned."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    calls = {name: lambda name=name: found[name].append(contenders[name]()) for name in contenders}
    times = interleave(calls, rounds, per_round=per_round, before=lambda name: dist.barrier())
    return times, found


def check_same(found: Mapping[str, list[float]]) -> None:
    """All compute the same: their first losses are equal, on the mean over the workers."""
    first = torch.tensor([values[0] for values in found.values()])
    dist.all_reduce(first)
    assert torch.allclose(first, first[0].expand_as(first), rtol=1e-3), dict(zip(found, first.tolist(), strict=True))


def tell(comparison: str, times: Mapping[str, list[float]], ours: str, theirs: str, aim: float | None) -> None:
    if ls.join().is_chief:
        report(comparison, {**compared({"ours": times[ours], "theirs": times[theirs]}), "aim": aim})


PARTS = {STEPS: steps, BARE: bare, SHARED: shared, WATCH: watch, REPLAY: replay}
