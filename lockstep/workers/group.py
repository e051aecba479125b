"""The control plane between the workers of a run: small JSON values, compared and passed around. No pickle.

All workers make the same calls in the same order. No call ends before all workers have made it, so every call is a
barrier, and the values of the call before can be deleted: the store never holds more than two values a worker.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

# The stores are torch.distributed's, by the name under which they have types.
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import DistNetworkError, DistStoreError

from lockstep.errors import DisagreementError, InputError, PeerLostError, WorkerError
from lockstep.workers.limits import LAUNCHED_TIMEOUT_SECONDS, TIMEOUT_SECONDS, WATCHED_TIMEOUT_SECONDS
from lockstep.workers.membership import Membership
from lockstep.workers.pulse import Pulse, of_this_process
from lockstep.workers.socket_store import SocketStore
from lockstep.workers.store_server import MAX_VALUE_BYTES

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

_LONGEST_PAUSE_SECONDS = 0.05
MEMORY_NAME = "lockstep-exchange"
"""The name of the memfds that workers share."""


def timeout_seconds(pulse: Pulse) -> float:
    """How long a worker waits for the others; where our launcher watches them, the launcher ends the wait."""
    return LAUNCHED_TIMEOUT_SECONDS if pulse.launched else WATCHED_TIMEOUT_SECONDS


class Group:
    """The workers of a run, as one of them reaches the others: through a store. Every call waits for all workers.

    All calls raise PeerLostError, naming the workers, when some do not come in time, and WorkerError when workers have
    made different calls. A worker that is alone waits for nobody, and sends itself its values.

    torch.distributed takes the store too, behind a prefix of its own. While the others are waited for, the membership
    says whether they are there still; it is None where this worker is alone, or our launcher watches them and ends all
    when one is lost.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_workers: int,
        timeout_seconds: float = TIMEOUT_SECONDS,
        membership: Membership | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self.store, self.membership = store, membership
        self._pulse = pulse or of_this_process()
        self.names = [f"worker {each}" for each in range(num_workers)]
        """The workers in messages, by rank; once they know each other, with their hosts where there are several."""
        self._rank, self._num_workers = rank, num_workers
        self._timeout = timedelta(seconds=timeout_seconds)
        self._turn = 0
        self._checks: list[Callable[[], object]] = []
        self._at_end: list[Callable[[BaseException | None], object]] = []
        self._farewell: Callable[[BaseException | None], object] | None = None
        self._owner = os.getpid()

    @classmethod
    def alone(cls) -> Group:
        """The group of a worker that is alone."""
        return cls(HashStore(), 0, 1)

    def check_peers(self) -> None:
        """Raise PeerLostError if another worker is known to be gone: for loops that wait, a microsecond a call."""
        if self.membership is not None:
            self.membership.check()
        for check in self._checks:
            check()

    def watch(self, check: Callable[[], object]) -> None:
        """Let `check_peers` call this, too."""
        self._checks.append(check)

    def at_end(self, action: Callable[[BaseException | None], object]) -> None:
        """Call this when this worker leaves, with the error that ends it, if any; the last one is called first."""
        self._at_end.append(action)

    def say_farewell_by(self, action: Callable[[BaseException | None], object]) -> None:
        """Call this, too, when this worker leaves: before all else where an error ends it, which the others learn."""
        self._farewell = action

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the others; `error` is what ends this worker, where it is one."""
        if os.getpid() != self._owner:  # a child that this worker has forked
            return
        if self._farewell is not None and error is not None:
            self._farewell(error)
        self._checks.clear()
        try:
            while self._at_end:
                self._at_end.pop()(error)
        finally:
            if self._farewell is not None and error is None:
                self._farewell(None)

    def barrier(self, name: str) -> None:
        """Wait for all workers; the name says where, in errors."""
        self._meet(f"barrier {name!r}", None)

    def gather(self, value: JSON) -> list[Any]:
        """Return the values of all workers, by rank, on every worker."""
        return self._meet("gather", value)

    def broadcast(self, value: JSON) -> Any:
        """Return the chief's value on every worker."""
        return self._meet("broadcast", None if self._rank else value)[0]

    def agree(self, what: str, value: JSON) -> None:
        """Check that all workers have the same value; see `check_agreement`."""
        if self._num_workers > 1:
            check_agreement(what, self._meet(f"agree on {what}", value), self.names)

    def share_memory(self, descriptor: int | None) -> int:
        """Open the chief's memfd on every worker of this host; the others give None. All close what they get."""
        inherited = self.store if isinstance(self.store, SocketStore) else None
        key = f"memory/{self._turn}"
        with self._reaching_store("share memory"):
            if inherited and descriptor is not None:
                inherited.share(key, descriptor)
            place = self._meet("share memory", [os.getpid(), descriptor])[0]
            if descriptor is None:
                descriptor = inherited.open(key, self._timeout) if inherited else _open_memory_of(place)
            self.barrier("memory is shared")
            if inherited:
                inherited.delete_key(key)
        return descriptor

    def _meet(self, call: str, value: JSON) -> list[Any]:
        payload = json.dumps([call, value])
        if self._num_workers == 1:
            return [json.loads(payload)[1]]
        if len(payload) > MAX_VALUE_BYTES - 1024:
            raise InputError(
                f"A value is too large to be passed between workers ({call}).",
                given=f"{len(payload):,} bytes of JSON",
                expected=f"less than {MAX_VALUE_BYTES:,} bytes",
                hint="pass a digest or a path instead of the data",
            )
        keys = [f"{self._turn}/{rank}" for rank in range(self._num_workers)]
        with self._reaching_store(call):
            self.store.set(keys[self._rank], payload)
            with self._pulse.waiting():
                self._wait(call, keys)
            arrived = [_parsed(*each) for each in zip(self.names, self.store.multi_get(keys), strict=True)]
            if self._turn:
                self.store.delete_key(f"{self._turn - 1}/{self._rank}")
        self._turn += 1
        _check_calls([each[0] for each in arrived], self.names)
        return [each[1] for each in arrived]

    @contextmanager
    def _reaching_store(self, call: str) -> Iterator[None]:
        """Raise PeerLostError where the store is lost in the block; it also ends its answers when a worker is lost."""
        lost = ""
        try:
            yield
        except DistNetworkError as error:
            lost = str(error).splitlines()[0]
        if lost:
            if self.membership is not None:
                self.membership.check()
            raise PeerLostError(
                f"{self.names[self._rank]} lost the store of its run ({call}).",
                given=lost,
                expected="a store that lives as long as the workers",
                hint="read what the launcher, or the worker that holds the store, said last",
            )

    def _wait(self, call: str, keys: list[str]) -> None:
        if self._have_come(keys):
            return
        missing = [name for name, key in zip(self.names, keys, strict=True) if not self.store.check([key])]
        if missing:
            seconds = self._timeout.total_seconds()
            raise PeerLostError(
                f"{self.names[self._rank]} waited in vain for {', '.join(missing)} ({call}).",
                given=f"{len(missing)} of {self._num_workers} workers did not come within {seconds:g} s",
                expected="all workers to make the same calls",
                hint="read what the missing workers said last",
            )

    def _have_come(self, keys: list[str]) -> bool:
        """Wait for keys of the store, up to the timeout; meanwhile see whether the others live."""
        if self.membership is None or isinstance(self.store, SocketStore):  # whose answer ends when a worker is lost
            with suppress(DistStoreError):
                self.store.wait(keys, self._timeout)
                return True
            return False
        deadline = time.monotonic() + self._timeout.total_seconds()
        for key in keys:
            pause = 0.001
            while not self.store.check([key]):  # TCPStore logs each wait that ends too soon
                self.membership.check()
                if time.monotonic() > deadline:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return True


def _parsed(name: str, payload: bytes) -> tuple[str, Any]:
    """Return the call that a worker has made, and its value."""
    try:
        call, value = json.loads(payload)
        if isinstance(call, str):
            return call, value
    except (ValueError, TypeError, RecursionError):
        pass
    raise WorkerError(
        f"What {name} has sent cannot be read.",
        given=f"{payload[:80]!r}",
        expected="a call and its value, as JSON",
        hint="start all workers with the same version of Lockstep, and let nobody else reach the store at MASTER_ADDR",
    )


def _open_memory_of(place: Any) -> int:
    """Open a memfd of another process, named by a pid and a descriptor in a store that others may write."""
    pid, number = place if isinstance(place, list) and len(place) == 2 else (None, None)
    why = "no process and descriptor"
    if type(pid) is int and type(number) is int:
        process = Path(f"/proc/{pid}")
        try:
            if process.stat().st_uid != os.geteuid():
                why = "a process of another user"
            elif not str((process / f"fd/{number}").readlink()).startswith(f"/memfd:{MEMORY_NAME} "):
                why = "a file that is no memory of Lockstep"
            else:
                return os.open(process / f"fd/{number}", os.O_RDWR)
        except OSError as error:
            why = str(error.strerror)
    raise WorkerError(
        "The chief's shared memory cannot be opened.",
        given=f"descriptor {number!r} of process {pid!r}: {why}",
        expected="a chief that runs on this host as the same user",
        hint="start the workers of one host as one user and in one container, or use AllReduce('gloo')",
    )


def check_agreement(what: str, values: Sequence[JSON], names: Sequence[str]) -> None:
    """Refuse values of workers that are not all the same; the error names the workers of `unlike_most`."""
    reference, odd = unlike_most(values)
    if odd:
        raise DisagreementError(
            f"The workers do not agree on {what}: {', '.join(names[rank] for rank in odd)} "
            f"differ{'' if len(odd) > 1 else 's'}.",
            given="; ".join(f"{names[rank]}: {_difference(values[rank], values[reference])}" for rank in odd),
            expected=f"the same as on {names[reference]}",
            hint="start all workers with the same code, arguments, seed, files and versions",
        )


def unlike_most(values: Sequence[JSON]) -> tuple[int, list[int]]:
    """Find the ranks whose values differ from that of most workers, or from that of rank 0 where no majority agrees.

    Returns:
        A rank whose value is the one that the others are compared with, and the ranks that differ from it.
    """
    texts = [_text(value) for value in values]
    most, count = Counter(texts).most_common(1)[0]
    reference = texts.index(most) if 2 * count > len(texts) else 0
    return reference, [rank for rank, text in enumerate(texts) if text != texts[reference]]


def _difference(value: JSON, reference: JSON, path: str = "") -> str:
    """Describe where a value first differs from the reference, and how."""
    if isinstance(value, dict) and isinstance(reference, dict) and list(value) == list(reference):
        key = next(key for key in value if _text(value[key]) != _text(reference[key]))
        return _difference(value[key], reference[key], f"{path}{key}: ")
    if isinstance(value, list) and isinstance(reference, list):
        both = zip_longest(map(_text, value), map(_text, reference), fillvalue="nothing")
        index, (given, expected) = next((index, pair) for index, pair in enumerate(both) if len({*pair}) > 1)
        if index < min(len(value), len(reference)):
            return _difference(value[index], reference[index], f"{path}[{index}]: ")
        return f"{path}[{index}]: {given:.200} instead of {expected:.200}"
    return f"{path}{_text(value):.200} instead of {_text(reference):.200}"


def _text(value: JSON) -> str:
    return json.dumps(value, sort_keys=True)


def _check_calls(calls: Sequence[str], names: Sequence[str]) -> None:
    if len(set(calls)) > 1:
        raise WorkerError(
            "The workers have made different calls, and would wait for each other for ever.",
            given=", ".join(f"{name}: {call}" for name, call in zip(names, calls, strict=True)),
            expected="the same calls in the same order on all workers",
            hint="make calls that concern all workers outside of any `if worker.is_chief`",
        )
