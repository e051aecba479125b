"""What a run would take with other numbers of workers: a written model over what was measured on one machine.

Everything here is a pure function of numbers; `docs/reference/plan.md` has the formulas and where they come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from lockstep.errors import InputError
from lockstep.exchange.exchange import AllReduce, is_exact
from lockstep.exchange.tree import assign_towers, rows_of_workers
from lockstep.recipes.recipe import Recipe
from lockstep.types import Epochs, Hours, Interval, Steps

Way = Literal["nothing", "shared memory", "all-reduce", "tree"]
Limit = Literal["compute", "input", "update", "exchange", "cores"]


@dataclass(frozen=True)
class Seating:
    """Where the towers of a recipe are computed with a number of workers."""

    num_workers: int
    num_hosts: int
    num_local: int
    """Workers of the host that has the most."""
    most_towers: int
    """Towers of the worker that has the most, for which the others wait."""
    fewest_towers: int
    tower_size: int
    num_rows: int
    """Partial sums that all workers together give to the fixed tree."""

    @classmethod
    def of(cls, recipe: Recipe, num_workers: int, per_host: int) -> Seating:
        """Deal the towers of a recipe, with so many workers a host.

        Raises:
            InputError: the library would refuse this number of workers.
        """
        if num_workers > 1 and not isinstance(recipe.exchange, AllReduce):
            raise InputError(
                "A plan of several workers knows one exchange.",
                given=f"{num_workers} workers with {recipe.exchange}",
                expected="AllReduce",
                hint='plan it with --set exchange.kind="all_reduce"',
            )
        towers = recipe.towers_for(num_workers)
        recipe.check_towers(num_workers)
        shares = [len(each) for each in assign_towers(towers.num_towers, num_workers)]
        return cls(
            num_workers=num_workers,
            num_hosts=-(-num_workers // per_host),
            num_local=min(num_workers, per_host),
            most_towers=max(shares),
            fewest_towers=min(shares),
            tower_size=recipe.batch_size // towers.num_towers,
            num_rows=rows_of_workers(towers.num_towers, num_workers).of_workers[-1].stop,
        )


@dataclass(frozen=True)
class Link:
    """The cost of an exchange: a time for each message, and one for each byte (the alpha-beta model)."""

    latency_seconds: float
    seconds_per_byte: float
    cpu_latency_seconds: float = 0.0
    """What the processors of one worker compute for each message."""
    cpu_seconds_per_byte: float = 0.0
    """What they compute for each byte that it sends."""

    def crowded(self, waiting: float) -> Link:
        """Return the link where each worker waits as often for the processors as they compute for it."""
        return replace(
            self,
            latency_seconds=self.latency_seconds + waiting * self.cpu_latency_seconds,
            seconds_per_byte=self.seconds_per_byte + waiting * self.cpu_seconds_per_byte,
        )


@dataclass(frozen=True)
class SentBucket:
    """Gradients that are sent together."""

    num_bytes: int
    early_seconds: float
    """How long before the end of the last tower's backward pass they are complete; 0: they are sent after it."""


@dataclass(frozen=True)
class WorkerCost:
    """What was measured of one worker, beside others that computed the same on the host."""

    num_local: int
    """How many workers computed on the host."""
    tower_size: int
    first_seconds: float
    """Forward and backward pass of one tower."""
    further_seconds: float
    """The same of each further tower of a worker, and the addition of its gradients."""
    first_cpu_seconds: float
    """What the processors computed for it, over all threads."""
    further_cpu_seconds: float
    update_seconds: float
    """The time from the summed gradients to the report of the step."""
    update_cpu_seconds: float
    input_seconds: float
    """The time from the request for the examples of one tower to the batch."""
    input_cpu_seconds: float
    memory_bytes: int
    """The most in use with one tower: of an accelerator by tensors, on a CPU by the process."""
    tower_bytes: int
    """The examples of one tower."""


@dataclass(frozen=True)
class SaveCost:
    """What was measured of a checkpoint."""

    num_bytes: int
    blocked_seconds: float
    """How long the training loop waited for it."""
    seconds: float
    """How long until it was on the disk."""
    cpu_seconds: float
    """What the processors computed for it."""


@dataclass(frozen=True)
class RunCosts:
    """What was measured of a recipe on this machine."""

    machine: str
    is_cpu: bool
    """Whether the workers compute on the cores of the host."""
    num_cores: int
    per_host: int
    num_probed: int
    """Workers that were started for it."""
    batch_size: int
    epoch_size: int
    """Examples in an epoch; 0 where the stream has none."""
    reads_ahead: bool
    """Whether loader processes or threads read while the worker computes."""
    workers: tuple[WorkerCost, ...]
    buckets: tuple[SentBucket, ...]
    save: SaveCost
    shared_memory: Link | None
    """The shared memory of a host, by the byte of each row and core; None where it was not tried."""
    messages: Link | None
    """Messages between workers of this machine; None where it was not tried."""
    backend: str
    """What carries the messages: "gloo" or "nccl"."""
    network: Link | None = None
    """Messages between hosts; None: as on this machine."""

    @property
    def gradient_bytes(self) -> int:
        """The bytes that each worker has for the exchange."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON."""
        return asdict(self)

    @classmethod
    def read(cls, saved: dict[str, Any]) -> RunCosts:
        """The costs that `as_json` has written."""
        made = {
            "workers": tuple(WorkerCost(**each) for each in saved["workers"]),
            "buckets": tuple(SentBucket(**each) for each in saved["buckets"]),
            "save": SaveCost(**saved["save"]),
            "shared_memory": Link(**saved["shared_memory"]) if saved["shared_memory"] else None,
            "messages": Link(**saved["messages"]) if saved["messages"] else None,
        }
        return cls(**{**saved, **made})

    def over(self, latency_seconds: float | None, bits_per_second: float | None) -> RunCosts:
        """Return the costs with hosts that a network of this latency, one way, and bandwidth joins.

        What the workers compute for each message, as measured on this machine, comes on top of its latency. None is
        what there is between two processes of this machine; where that was not measured either, nothing is known.
        """
        if self.messages is None and (latency_seconds is None or bits_per_second is None):
            return self
        here = self.messages or Link(0.0, 0.0)
        latency = here.latency_seconds + (latency_seconds or 0.0)
        seconds_per_byte = max(here.seconds_per_byte, 8 / bits_per_second if bits_per_second else 0.0)
        network = replace(here, latency_seconds=latency, seconds_per_byte=seconds_per_byte)
        return replace(self, network=network)


@dataclass(frozen=True)
class Prediction:
    """What a step, and the run, would take with a number of workers; times in seconds."""

    seating: Seating
    exchange: Way
    compute_seconds: float
    """Forward and backward passes of the worker with the most towers."""
    input_seconds: float
    """How long until its batch is there; beside the rest where loaders read ahead."""
    update_seconds: float
    exchange_seconds: float
    """What of the exchange does not go on beside the backward pass."""
    whole_exchange_seconds: float
    """All of the exchange."""
    step_seconds: float
    limit: Limit
    """What takes the most of a step; "cores" where those of the host are too few for all that is to be computed."""
    examples_per_second: float
    efficiency: float
    """The examples a second and worker, of those of one worker alone."""
    memory_bytes: int
    """The most that the chief has, while it saves, with as many towers as any worker."""
    epoch_seconds: float | None
    """An epoch with its saves; None where the stream has none."""
    finish_seconds: float | None
    """The run with its saves; None where the recipe names no end."""


def predict_step(costs: RunCosts, recipe: Recipe, num_workers: int) -> Prediction:
    """Predict a number of workers.

    Raises:
        InputError: the library would refuse it, or nothing was measured that could say.
    """
    found = _predicted(costs, recipe, Seating.of(recipe, num_workers, costs.per_host))
    alone = _predicted(costs, recipe, Seating.of(recipe, 1, costs.per_host))
    return replace(found, efficiency=found.examples_per_second / (num_workers * alone.examples_per_second))


def _predicted(costs: RunCosts, recipe: Recipe, seating: Seating) -> Prediction:
    cost, further = _cost_of(costs, seating), seating.most_towers - 1
    crowd = seating.num_local / costs.num_cores if costs.is_cpu else 0.0
    compute_cpu = cost.first_cpu_seconds + further * cost.further_cpu_seconds
    measured = cost.first_seconds + further * cost.further_seconds
    # Workers come to each part of a step at the same time: those that are more than cores wait in turn.
    waiting = max(0.0, crowd - 1)
    compute, update = measured + waiting * compute_cpu, cost.update_seconds + waiting * cost.update_cpu_seconds
    given, loading_cpu = (seating.most_towers * each for each in (cost.input_seconds, cost.input_cpu_seconds))
    sent = _exchanged(costs, recipe, seating, slowed=compute / measured, waiting=waiting)
    in_line = compute + update + sent.exposed_seconds + (0.0 if costs.reads_ahead else given)
    busy = crowd * (compute_cpu + cost.update_cpu_seconds + loading_cpu + sent.cpu_seconds)
    step = max(in_line, given, busy)
    parts: dict[Limit, float] = {"compute": compute, "update": update, "exchange": sent.exposed_seconds}
    if not costs.reads_ahead or given == step:
        parts["input"] = given
    is_full = busy > max(in_line, given)
    return Prediction(
        seating=seating,
        exchange=sent.way,
        compute_seconds=compute,
        input_seconds=given,
        update_seconds=update,
        exchange_seconds=sent.exposed_seconds,
        whole_exchange_seconds=sent.seconds,
        step_seconds=step,
        limit="cores" if is_full else max(parts, key=lambda name: parts[name]),
        examples_per_second=costs.batch_size / step,
        efficiency=1.0,
        memory_bytes=cost.memory_bytes + further * cost.tower_bytes + sent.memory_bytes + costs.save.num_bytes,
        epoch_seconds=_with_saves(costs, recipe, costs.epoch_size / costs.batch_size, step),
        finish_seconds=_finish_seconds(costs, recipe, step),
    )


def _cost_of(costs: RunCosts, seating: Seating) -> WorkerCost:
    """What was measured of towers of this size, with the most workers on the host that are not more than these."""
    found = [each for each in costs.workers if each.tower_size == seating.tower_size]
    if not found:
        raise InputError(
            "Towers of this size were not measured.",
            given=f"{seating.num_workers} workers, towers of {seating.tower_size} examples",
            expected=f"towers of {', '.join(str(each.tower_size) for each in costs.workers)} examples",
            hint="measure again with this number among --workers",
        )
    fitting = [each for each in found if each.num_local <= seating.num_local]
    return max(fitting, key=lambda each: each.num_local) if fitting else min(found, key=lambda each: each.num_local)


# The exchange -------------------------------------------------------------------------------------------------------


class _Sent(NamedTuple):
    """What the exchange of a step takes."""

    way: Way
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    """What of it does not go on beside the backward pass."""
    cpu_seconds: float = 0.0
    """What the processors of each worker compute for it."""
    memory_bytes: int = 0


def way_of(recipe: Recipe, seating: Seating, *, is_cpu: bool) -> Way:
    """Return how the gradients of all workers are summed, as `AllReduce.connect` chooses it."""
    exchange = recipe.exchange
    if seating.num_workers == 1 or not isinstance(exchange, AllReduce):
        return "nothing"
    if (exchange.transport or "shared_memory") == "shared_memory" and is_cpu and seating.num_hosts == 1:
        return "shared memory"
    if exchange.transport == "shared_memory":
        raise InputError(
            "Shared memory reaches only the workers of one CPU host.",
            given=f"{seating.num_workers} workers on {seating.num_hosts} hosts",
            expected="all workers on the CPU of one host",
            hint="leave exchange.transport out to let Lockstep choose; or --workers-per-host",
        )
    # Two terms have one sum, in whatever order all-reduce takes them.
    return "tree" if is_exact(exchange) and seating.num_rows > 2 else "all-reduce"


def _exchanged(costs: RunCosts, recipe: Recipe, seating: Seating, *, slowed: float, waiting: float) -> _Sent:
    """Predict the exchange of a step whose backward pass takes `slowed` times as long as the measured one."""
    way = way_of(recipe, seating, is_cpu=costs.is_cpu)
    if way == "nothing":
        return _Sent(way)
    link = costs.shared_memory if way == "shared memory" else costs.messages
    if seating.num_hosts > 1 and costs.network:
        link = costs.network
    if link is None:
        raise InputError(
            "What the exchange would take was not measured: that takes two workers on this machine.",
            given=f"{costs.num_probed} worker{'' if costs.num_probed == 1 else 's'}, and no network",
            expected="the latency and the bandwidth of the network",
            hint="give both, in milliseconds and Gbit/s: --latency 0.05 --bandwidth 25",
        )
    link = link.crowded(waiting)
    num_bytes, num_workers, rows = costs.gradient_bytes, seating.num_workers, seating.num_rows / seating.num_workers
    if way == "shared memory":
        work = seating.num_rows * num_bytes * link.seconds_per_byte
        seconds = link.latency_seconds + work / min(num_workers, costs.num_cores)
        return _Sent(way, seconds, seconds, work / num_workers, int((rows + 1) * num_bytes))
    if way == "tree":
        seconds, sent = _tree_seconds(link, seating, num_bytes), (rows + 1) * (num_workers - 1) / num_workers
        return _Sent(way, seconds, seconds, sent * num_bytes * link.cpu_seconds_per_byte, int(rows * num_bytes))
    seconds = sum(ring_seconds(link, num_workers, bucket.num_bytes) for bucket in costs.buckets)
    exposed = exposed_seconds(costs.buckets, link, num_workers, slowed)
    sent = 2 * (num_workers - 1) / num_workers
    return _Sent(way, seconds, exposed, sent * num_bytes * link.cpu_seconds_per_byte, num_bytes)


def ring_seconds(link: Link, num_workers: int, num_bytes: int) -> float:
    """The time of an all-reduce in a ring: every worker sends 2 (W - 1) messages of a W-th of the bytes.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    return 2 * (num_workers - 1) * (link.latency_seconds + num_bytes / num_workers * link.seconds_per_byte)


def _tree_seconds(link: Link, seating: Seating, num_bytes: int) -> float:
    """Two rounds in which every worker sends each other one its share: of its rows, then of the sum.

    The workers of a host share its link to the other hosts.
    """
    num_workers, num_local = seating.num_workers, seating.num_local if seating.num_hosts > 1 else 1
    share = num_local * (num_workers - num_local) / num_workers
    rows = seating.num_rows / num_workers + 1
    return 2 * link.latency_seconds + rows * share * num_bytes * link.seconds_per_byte


def exposed_seconds(buckets: Sequence[SentBucket], link: Link, num_workers: int, slowed: float = 1.0) -> float:
    """How long after the backward pass the last bucket has arrived, if each is sent when it and the line are ready.

    Li et al., PyTorch Distributed: Experiences on accelerating data parallel training, 2020.
    """
    free = -math.inf
    for bucket in buckets:
        free = max(free, -slowed * bucket.early_seconds) + ring_seconds(link, num_workers, bucket.num_bytes)
    return max(0.0, free)


# The whole run ------------------------------------------------------------------------------------------------------


def _with_saves(costs: RunCosts, recipe: Recipe, num_steps: float, step_seconds: float) -> float | None:
    """Add the saves to the time of some steps; None where there are none of these."""
    seconds, every = num_steps * step_seconds, recipe.checkpoints.every
    if not seconds or not every.amount:
        return seconds or None
    number = _in_units(costs, every, num_steps, seconds) / every.amount
    # A thread writes: on a CPU it takes from the chief what it computes.
    each = max(costs.save.blocked_seconds, costs.save.cpu_seconds if costs.is_cpu else 0.0)
    return max(seconds + number * each, number * costs.save.seconds)


def _in_units(costs: RunCosts, every: Interval, num_steps: float, seconds: float) -> float:
    if every.unit == "steps":
        return num_steps
    if every.unit == "seconds":
        return seconds
    return num_steps * costs.batch_size / costs.epoch_size if costs.epoch_size else 0.0


def _finish_seconds(costs: RunCosts, recipe: Recipe, step_seconds: float) -> float | None:
    end = recipe.end
    if isinstance(end, Hours):
        return 3600.0 * end.count
    if isinstance(end, Steps):
        return _with_saves(costs, recipe, end.count, step_seconds)
    if isinstance(end, Epochs) and costs.epoch_size:
        return _with_saves(costs, recipe, end.steps(costs.epoch_size, costs.batch_size), step_seconds)
    return None
