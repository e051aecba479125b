"""Generations of the workers of a run whose survivors go on when some are lost: who takes part now.

The launcher begins a new generation when workers are lost, with those that are left, and when newcomers are ready, with
them too. A worker keeps the number that it was started with, and so its name; its rank is its place in the generation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from lockstep.errors import PeerLostError
from lockstep.workers.channel import Message

if TYPE_CHECKING:
    from lockstep.workers.socket_store import SocketStore

GENERATION = "LOCKSTEP_GENERATION"
"""Set in the environment of workers that go on when others are lost: "0", or `NEWCOMER` for who comes later."""
NEWCOMER = "newcomer"

_VERDICT_SECONDS = 3.0
"""In which the launcher finds out whose end has broken a connection."""
_WORD_SECONDS = 15.0
"""In which it says, after that, who goes on."""


class Generation(NamedTuple):
    """The workers that take part from some moment on."""

    number: int
    members: tuple[int, ...]
    """The numbers with which its workers were started, by rank: those of the generation before come first."""
    lost: str = ""
    """Who of the generation before was lost, in words; empty where newcomers are all that is new."""
    why: str = ""

    def message(self) -> dict[str, object]:
        """The generation as its members hear of it."""
        return {"generation": self.number, "members": self.members, "lost": self.lost, "why": self.why}

    @classmethod
    def of_message(cls, message: Message) -> Generation:
        """The generation that a message tells of."""
        return cls(message["generation"], tuple(message["members"]), message["lost"], message["why"])


class Generations:
    """What the launcher has said of generations to this worker. In its group it stands for its peers.

    Args:
        number: of this worker.
        tell: sends a message to the launcher.
        is_newcomer: the worker was started in the place of a lost one.
    """

    def __init__(
        self, number: int, tell: Callable[[Mapping[str, object]], None] = lambda _: None, *, is_newcomer: bool = False
    ) -> None:
        self.number, self.is_newcomer = number, is_newcomer
        self.joined = -1 if is_newcomer else 0
        """The number of the generation that this worker is in; -1 before the first one of a newcomer."""
        self.places: list[tuple[str, str]] = []
        """The name of each worker in messages, and of its host, by number."""
        self.store: SocketStore
        """In which all generations meet, each behind a prefix of its own; set when this worker joins."""
        self._tell = tell
        self._newest: Generation | None = None
        self._loss: tuple[str, str] | None = None
        """Who is lost of the present generation, and why."""
        self._is_over = False
        """The launcher ends all of them."""
        self._at_loss: list[Callable[[], object]] = []
        self._changed = threading.Condition()

    # What the thread hears that keeps the pulse ---------------------------------------------------------------------

    def hear(self, message: Message) -> None:
        """Take in what the launcher says."""
        actions: list[Callable[[], object]] = []
        with self._changed:
            if "generation" in message:
                self._newest = Generation.of_message(message)
            else:
                self._is_over = True
            if message["lost"]:
                self._loss = self._loss or (message["lost"], message["why"])
                actions, self._at_loss = self._at_loss, []
            self._changed.notify_all()
        # After `check` raises: what the main thread reads is no longer to be trusted then.
        for action in actions:
            action()

    @property
    def regroup_requested(self) -> bool:
        """Whether newcomers are to join, which waits for a boundary between two steps."""
        return self._newest is not None and self._newest.number > self.joined and self._loss is None

    # What the main thread asks ----------------------------------------------------------------------------------------

    def next(self) -> Generation:
        """Wait for the newest generation after the one that this worker is in; a loss that led to it is forgotten.

        Raises:
            PeerLostError: the launcher ends all workers, or does not say who goes on.
        """
        if self.is_newcomer:
            self._tell({"ready": True})
        elif not self._knows_next():
            self._tell({"broken": self.joined})
        with self._changed:
            # Who is lost of the present generation may not be known yet; a newcomer waits as long as it has to.
            self._changed.wait_for(self._knows_next, None if self.is_newcomer else _WORD_SECONDS)
            newest = self._newest
            if self._is_over or newest is None or newest.number <= self.joined:
                raise self._error()
            self.joined, self._loss, self._at_loss = newest.number, None, []
        return newest

    def _knows_next(self) -> bool:
        return self._is_over or (self._newest is not None and self._newest.number > self.joined)

    def confirm(self) -> None:
        """Tell the launcher that all members of the generation have come."""
        self.is_newcomer = False
        self._tell({"joined": self.joined})

    def check(self) -> None:
        """Raise PeerLostError if a worker of the present generation is lost."""
        if self._loss is not None:
            raise self._error()

    def loss(self) -> PeerLostError | None:
        """The error that `check` raises, if any."""
        return None if self._loss is None else self._error()

    def lost(self, said: str) -> PeerLostError:
        """The error to raise when a connection has broken; waits some seconds until it is known whose.

        Args:
            said: the words of torch.distributed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._loss is not None, _VERDICT_SECONDS)
            return self._error(said)

    def _error(self, said: str = "the launcher has not said whom") -> PeerLostError:
        who, why = self._loss or ("another worker", said)
        return PeerLostError(
            f"worker {self.number} lost {who}.",
            given=why,
            expected="all workers to take part until the end",
            hint="read what that worker said last",
        )

    def at_loss(self, action: Callable[[], object]) -> None:
        """Call this, in the thread that keeps the pulse, when a worker of the present generation is lost."""
        with self._changed:
            if self._loss is None:
                self._at_loss.append(action)
                return
        action()

    def leave(self, error: BaseException | None) -> None:
        """Do nothing: the launcher sees by itself that this worker leaves, and is told why."""
