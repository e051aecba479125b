"""Membership: who takes part in the run beside this worker, and who of them is lost, as it is told from outside.

The launcher begins a new generation when workers are lost, with those that are left, and when newcomers are ready, with
them too. A worker keeps the number that it was started with, and so its name; its rank is its place in the generation.
Where another launcher has started the workers there is one generation: see `lockstep.workers.peers`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lockstep.errors import PeerLostError
from lockstep.workers.channel import Message
from lockstep.workers.limits import GENERATION_SECONDS, VERDICT_SECONDS

if TYPE_CHECKING:
    from lockstep.workers.socket_store import SocketStore

GENERATION = "LOCKSTEP_GENERATION"
"""Set in the environment of workers that go on when others are lost: "0", or `NEWCOMER` for who comes later."""
NEWCOMER = "newcomer"


class Generation(NamedTuple):
    """The workers that take part from some moment on."""

    number: int
    members: tuple[int, ...]
    """The numbers with which its workers were started, by rank: those of the generation before come first."""
    lost: str = ""
    """Who of the generation before was lost, in words; empty where newcomers are all that is new."""
    why: str = ""

    def message(self) -> dict[str, object]:
        """The generation as its members receive it."""
        return {"generation": self.number, "members": self.members, "lost": self.lost, "why": self.why}

    @classmethod
    def of_message(cls, message: Message) -> Generation:
        """The generation that a message tells of."""
        return cls(message["generation"], tuple(message["members"]), message["lost"], message["why"])


class Membership:
    """Whether all workers that take part are there still; one thread receives the news, the main thread asks."""

    def __init__(self, number: int) -> None:
        self.number = number
        """The number of this worker, by which messages name it."""
        self._failure: tuple[str, str, str] | None = None
        """Who is lost, why, and what that worker has said on lines of its own."""
        self._at_failure: list[Callable[[], object]] = []
        self._changed = threading.Condition()

    def check(self) -> None:
        """Raise PeerLostError if a worker is lost; to be called now and then while others are waited for."""
        if self._failure is not None:
            raise self._error()

    def failure(self) -> PeerLostError | None:
        """The error that `check` raises, if any."""
        return None if self._failure is None else self._error()

    def connection_lost(self, reason: str) -> PeerLostError:
        """The error to raise when a connection has broken, as `reason` says; waits some seconds to know whose."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, VERDICT_SECONDS)
            return self._error(reason)

    def on_failure(self, action: Callable[[], object]) -> None:
        """Call this when a worker is lost, in the thread that receives it: it ends what the main thread may wait in."""
        with self._changed:
            if self._failure is None:
                self._at_failure.append(action)
                return
        action()

    def _record_failure(self, who: str, why: str, note: str = "") -> list[Callable[[], object]]:
        """Record the first failure; returns the actions that follow it, to be called without the lock."""
        with self._changed:
            self._failure = self._failure or (who, why, note)
            actions, self._at_failure = self._at_failure, []
            self._changed.notify_all()
        return actions  # after `check` raises: what the main thread reads is no longer to be trusted then

    def _error(self, reason: str = "the launcher has not said whom") -> PeerLostError:
        who, why, note = self._failure or ("another worker", reason, "")
        error = PeerLostError(
            f"worker {self.number} lost {who}.",
            given=why,
            expected="all workers to take part until the end",
            hint="read what that worker said last",
        )
        if note:
            error.add_note(note)
        return error


class Generations(Membership):
    """The membership of a worker that goes on when others are lost: the launcher says who takes part from then on.

    `notify` sends a message to the launcher.
    """

    def __init__(
        self, number: int, notify: Callable[[Mapping[str, object]], None] = lambda _: None, *, is_newcomer: bool = False
    ) -> None:
        super().__init__(number)
        self.is_newcomer = is_newcomer
        """This worker was started in the place of a lost one, and does not take part yet."""
        self.joined = -1 if is_newcomer else 0
        """The number of the generation that this worker is in; -1 before the first one of a newcomer."""
        self.places: Sequence[tuple[str, str]] = ()
        """The name of each worker in messages, and of its host, by number: also of the lost, whose places are taken."""
        self.store: SocketStore
        """All generations meet in it, each behind a prefix of its own; it is known once this worker joins."""
        self.num_loops = 0
        """Loops of the script that this worker has begun: those that go on together are in the same."""
        self.recover: Callable[[str], None] | None = None
        """Set in the body of a loop that goes on: to be called where a call of all workers has lost who is named."""
        self._notify = notify
        self._next: Generation | None = None
        """The newest, where this worker is not in it."""
        self._is_over = False
        """The launcher ends all of them."""
        self._takes_newcomers = True

    def receive(self, message: Message) -> None:
        """Take in what the launcher says; the thread that keeps the pulse calls it."""
        with self._changed:
            if "generation" in message:
                self._next = Generation.of_message(message)
            else:
                self._is_over = True
            actions = self._record_failure(message["lost"], message["why"]) if message["lost"] else []
            self._changed.notify_all()
        for action in actions:
            action()

    @property
    def regroup_requested(self) -> bool:
        """Whether newcomers are to join, which waits for a boundary between two steps."""
        return self._next is not None and self._failure is None and self._takes_newcomers

    def dismiss_newcomers(self) -> None:
        """Have the launcher take nobody in any more, as they could not come to where this worker is."""
        self._takes_newcomers = False
        self._notify({"dismiss": True})

    def next(self) -> Generation:
        """Wait for the newest generation after the one that this worker is in; a failure that led to it is forgotten.

        Raises:
            PeerLostError: the launcher ends all workers, or does not say who goes on.
        """
        if self.is_newcomer:
            self._notify({"ready": True})
        elif not self._knows_next():
            self._notify({"broken": self.joined})
        with self._changed:
            # Who is lost of the present generation may not be known yet; a newcomer waits as long as it has to.
            self._changed.wait_for(self._knows_next, None if self.is_newcomer else GENERATION_SECONDS)
            if self._is_over or self._next is None:
                raise self._error()
            newest, self._next = self._next, None
            self.joined, self._failure, self._at_failure = newest.number, None, []
        return newest

    def _knows_next(self) -> bool:
        return self._is_over or self._next is not None

    def meet(self) -> SocketStore:
        """The store of the present generation alone: it answers no more when one of its members is lost."""
        store = self.store.within(f"{self.joined}/")
        self.on_failure(store.shut_down)
        return store

    def forget_since(self, number: int) -> None:
        """Delete what the generations before the present one have stored, from this number on; the chief calls it."""
        for each in range(number, self.joined):
            self.store.forget(f"{each}/")

    def confirm(self) -> None:
        """Tell the launcher that all members of the generation have come."""
        self.is_newcomer = False
        self._notify({"joined": self.joined})
