"""Exchanges that the chief serves as a parameter server: backup workers, and asynchronous updates.

Worker 0, the chief, computes no towers: it hands the stream out to the others in slices, takes their gradients, makes
the updates and gives them the new parameters. A worker that is alone does all of it, as with `AllReduce()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from lockstep.checks import Checked, Hint, NonNegativeInt
from lockstep.errors import InputError
from lockstep.exchange.exchange import Alone, Connection
from lockstep.exchange.tree import assign_towers

if TYPE_CHECKING:
    from lockstep.workers.rank import Worker


class ServedExchange(Checked):
    """Base of the exchanges that the chief serves."""

    def num_slices(self, num_towers: int) -> int:
        """Gradients per update, and slices per batch."""
        raise NotImplementedError

    def check_batch_norm(self, batch_norm: str) -> None:
        """Refuse a policy of batch norm that several workers cannot be served with; raises InputError."""

    def connect(self, worker: Worker, num_towers: int) -> Connection:
        """Connect a worker that is alone with nobody; several are served by `train_steps`."""
        if worker.num_workers == 1:
            return Alone().connect(worker, num_towers)
        raise InputError(
            "Only ls.train and ls.train_steps serve several workers: in a loop of your own all make the same steps.",
            given=f"{self} with {worker.num_workers} workers, and train_step",
            expected="ls.train or ls.train_steps, or another exchange",
            hint="write for report in ls.train_steps(...); or use AllReduce()",
        )


@dataclass(frozen=True)
class Backups(ServedExchange):
    """The first N gradients of a step make its update, N being the number of towers; workers beyond N are backups.

    A gradient is that of one tower's slice of a batch. One that comes late, computed with parameters that have been
    updated since, is dropped; its examples are handed out again at once, so that each counts once an epoch. With fewer
    workers than towers some compute several slices an update. Where no gradient is dropped, the bits are those of
    `AllReduce(exact=True)`.

    Worker 0 serves and does not compute: five workers are four that compute.
    """

    def num_slices(self, num_towers: int) -> int:
        """Gradients per update, and slices per batch."""
        return num_towers

    def check_batch_norm(self, batch_norm: str) -> None:
        """Refuse "sync": each worker would wait for the statistics of all others, in the middle of its forward pass."""
        if batch_norm == "sync":
            raise InputError(
                "Backup workers cannot share the statistics of a batch: nobody waits for all of them.",
                given=f"{self}, batch_norm={batch_norm!r}",
                expected='batch_norm="mean", "first", "last", "none" or "frozen"',
                hint="choose another batch_norm (--set towers.batch_norm=mean), or AllReduce()",
            )


@dataclass(frozen=True)
class Asynchronous(ServedExchange):
    """Each gradient makes an update as it comes, whatever the parameters have become since it was computed.

    A gradient is that of a whole batch, whose towers one worker runs in turn. Nobody waits for anybody. Worker 0 serves
    and does not compute: with two workers in all, the bits are those of one worker that is alone.
    """

    staleness: Annotated[NonNegativeInt | None, Hint("0 takes fresh gradients alone, None takes all")] = None
    """Most updates that may have been made since the parameters of a gradient were fetched: one that is staler is
    dropped, and its examples are handed out again. None: there is no bound. It is about the number of workers that
    compute, less one, where they are equally fast."""
    startup_delay_steps: NonNegativeInt = 0
    """The first worker that computes begins at once, the others when so many updates are made, or the run is over."""

    def num_slices(self, num_towers: int) -> int:
        """Gradients per update, and slices per batch."""
        return 1


def is_served(exchange: object) -> bool:
    """Whether an exchange is served by the chief, who then computes no towers."""
    return isinstance(exchange, ServedExchange)


def num_computing(exchange: object, num_workers: int) -> int:
    """How many of the workers compute: all of them, or all but the chief."""
    return num_workers - 1 if is_served(exchange) and num_workers > 1 else num_workers


def towers_of(exchange: object, rank: int, num_workers: int, num_towers: int) -> range:
    """The towers of a worker in its first batch; what the chief of a served exchange would compute, if it did."""
    if isinstance(exchange, ServedExchange) and num_workers > 1:
        size = num_towers // exchange.num_slices(num_towers)
        first = max(0, rank - 1) * size % num_towers
        return range(first, first + size)
    return assign_towers(num_towers, num_workers)[rank]
