"""Discovery: the workers that another launcher has started find each other in its store, and learn where all are.

A launcher that restarts workers keeps its store, with what the dead have left there, and its hosts may count restarts
differently. So each worker draws a number at random. The chief's is the name of the start: the others answer under it,
and go on when the chief's list has their own number. What all of them store from then on begins with that name.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import PeerLostError, WorkerError
from lockstep.workers.limits import START_SECONDS

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TELL_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 0.2
"""Between two looks into the store, which answers all workers."""


@dataclass(frozen=True)
class Location:
    """Where a worker runs."""

    host: str
    address: str
    """Address of the host, in the network that leads to the store."""
    system: str
    """The same for workers that see each other's processes and sockets, as those of one container do."""

    @classmethod
    def here(cls, address: str) -> Location:
        """The place of this process."""
        name = socket.gethostname()
        system = [name]
        for kind in ("net", "pid"):
            with suppress(OSError):
                system.append(str(Path(f"/proc/self/ns/{kind}").readlink()))
        return cls(name.partition(".")[0], address, " ".join(system))


@dataclass(frozen=True)
class Discovery:
    """The workers of one start."""

    start: str
    """Its name: what these workers store begins with it."""
    locations: Sequence[Location]

    def hosts(self) -> list[list[int]]:
        """The ranks on each host; the chief's host is the first."""
        ranks: dict[str, list[int]] = {}
        for rank, location in enumerate(self.locations):
            ranks.setdefault(location.system, []).append(rank)
        return list(ranks.values())

    def host_names(self) -> list[str]:
        """The name of each host; with its number where several have the same name."""
        names = [self.locations[ranks[0]].host for ranks in self.hosts()]
        return [f"{name} (host {host})" if names.count(name) > 1 else name for host, name in enumerate(names)]


def discover(
    store: Store, rank: int, num_workers: int, here: Location, timeout_seconds: float = START_SECONDS
) -> Discovery:
    """Wait until all workers of this start have come; each of them calls it.

    Raises:
        PeerLostError: some have not come in time; all who have are told which.
    """
    own = secrets.token_hex(8)
    entry = json.dumps([own, here.host, here.address, here.system])
    deadline = time.monotonic() + timeout_seconds
    start = _announce(store, own, entry, num_workers, deadline) if rank == 0 else _answer(store, rank, entry, deadline)
    found = _found(store, start) if start else [None]
    missing = [f"worker {other}" for other, place in enumerate(found) if place is None]
    if missing:
        came = [f"worker {other} on {place.host}" for other, place in enumerate(found) if place]
        raise PeerLostError(
            f"worker {rank} waited in vain for {', '.join(missing)}.",
            given=f"within {timeout_seconds:g} s came {', '.join(came) or f'worker {rank} on {here.host}'}",
            expected=f"all {num_workers} workers to start, and to call lockstep.join",
            hint="read what the missing workers said last, and whether their launcher has started them",
        )
    return Discovery(start, [place for place in found if place])


def _announce(store: Store, start: str, entry: str, num_workers: int, deadline: float) -> str:
    """Announce the start, as the chief, and store the list of what each worker reports: None for who has not come."""
    keys = [f"{start}/{rank}" for rank in range(num_workers)]
    store.set(keys[0], entry)
    store.set("start", start)
    for pause in _pauses(deadline):
        if store.check(keys):
            break
        time.sleep(pause)
    entries = [store.get(key).decode() if store.check([key]) else None for key in keys]
    store.set(f"{start}/workers", json.dumps(entries))
    for key in keys:
        store.delete_key(key)
    return start


def _answer(store: Store, rank: int, entry: str, deadline: float) -> str:
    """Wait for the list on which this very worker is, and return the start's name; "" where none has come in time."""
    start = ""
    for pause in _pauses(deadline + _TELL_SECONDS):
        if store.check(["start"]) and (named := store.get("start").decode()) != start:
            start = named
            store.set(f"{start}/{rank}", entry)
        if start and store.check([f"{start}/workers"]) and entry in json.loads(store.get(f"{start}/workers")):
            return start
        time.sleep(pause)
    return ""


def _pauses(deadline: float) -> Iterator[float]:
    """Yield pauses that grow, in seconds, until the deadline."""
    pause = 0.005
    while time.monotonic() < deadline:
        yield pause
        pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)


def _found(store: Store, start: str) -> list[Location | None]:
    """Read the list: the place of each worker, None for who has not come."""
    text = store.get(f"{start}/workers")
    try:
        return [None if each is None else Location(*map(str, json.loads(each)[1:])) for each in json.loads(text)]
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise WorkerError(
        "What the workers have said of themselves cannot be read.",
        given=f"{text[:80]!r}",
        expected="the places of all workers, as JSON",
        hint="start all workers with the same version of Lockstep, and let nobody else reach the store at MASTER_ADDR",
    )
