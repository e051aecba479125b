"""A worker's end of the launcher's store, as a store of torch.distributed: our groups and gloo's meet in it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

# The stores are torch.distributed's, by the name under which they have types.
from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

from lockstep.errors import WorkerError
from lockstep.workers.connections import NotLetInError, receive_descriptor, send_descriptor, shut_down
from lockstep.workers.store_server import MAX_VALUE_BYTES, StoreAddress


class SocketStore(Store):
    """The store behind an inherited socket, or at the address of another host; see `StoreServer`.

    One request is under way at a time: while a thread waits for a key, the others of its process wait too, unless they
    use a clone. It also carries open files, which torch's stores do not. All of its keys have a prefix.

    Raises:
        DistNetworkError: nobody answers at the address.
        WorkerError: somebody answers there, and does not let this process in.
    """

    def __init__(self, way: Connection | StoreAddress, prefix: str = "") -> None:
        super().__init__()
        self._prefix = prefix
        self._address = way if isinstance(way, StoreAddress) else None
        with _reached():
            self._connection = way.connect() if isinstance(way, StoreAddress) else way
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._clones: list[SocketStore] = []

    @property
    def _limit(self) -> timedelta:
        limit: timedelta = self.timeout  # type: ignore[attr-defined]  # of every store, and missing in torch's stubs
        return limit

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value."""
        self._ask("set", key, values=[value])

    def get(self, key: str) -> bytes:
        """The value of a key; waits for it, up to `timeout`."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys; waits for them, up to `timeout`."""
        there, values = self._ask("get", list(keys), self._limit.total_seconds())
        if not there:
            raise _timed_out(keys, self._limit)
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Store values, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def append(self, key: str, value: bytes | str) -> None:
        """Append to the value of a key, which may be new."""
        self._ask("append", key, values=[value])

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key, 0 where it is new; returns the sum."""
        total: int = self._ask("add", key, int(amount))[0]
        return total

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Store the desired value if the present one is as expected; returns the value that is there then."""
        return self._ask("compare_set", key, values=[expected, desired])[1][0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        limit = self._limit if timeout is None else timeout
        if not self._ask("wait", list(keys), limit.total_seconds())[0]:
            raise _timed_out(keys, limit)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", list(keys))[0])

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it was there."""
        return bool(self._ask("delete", key)[0])

    def forget(self, prefix: str) -> None:
        """Delete all keys that begin so, and close the files that are shared under them."""
        self._ask("forget", prefix)

    def num_keys(self) -> int:
        """How many keys there are."""
        return int(self._ask("count")[0])

    # Torch's own code calls them by these names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """Whether there are append, multi_get and multi_set."""
        return True

    def clone(self) -> SocketStore:
        """The same store through a connection of its own."""
        # Torch holds only its own half of the object: without a name here, the Python half would be gone at once.
        self._clones.append(self.within(""))
        return self._clones[-1]

    def within(self, prefix: str) -> SocketStore:
        """The same store through a connection of its own, for keys behind a further prefix."""
        return SocketStore(self._address or self._further_connection(), self._prefix + prefix)

    def shut_down(self) -> None:
        """End requests that are under way, and all later ones, with DistNetworkError; from any thread."""
        for clone in self._clones:
            clone.shut_down()
        shut_down(self._connection)

    def _further_connection(self) -> Connection:
        ours, theirs = Pipe()
        with theirs:
            self._ask("connect", descriptor=theirs.fileno())
        return ours

    def share(self, key: str, descriptor: int) -> None:
        """Let the other workers open a file that is open here."""
        self._ask("share", key, descriptor=descriptor)

    def open(self, key: str, timeout: timedelta) -> int:
        """Wait for the file that is shared under a key; returns a descriptor, which the caller closes."""
        with self._lock, _reached():
            there, _ = self._ask("open", key, timeout.total_seconds())
            if there:
                return receive_descriptor(self._connection)
        raise _timed_out([key], timeout)

    def _ask(
        self, operation: str, *arguments: object, values: Sequence[bytes | str] = (), descriptor: int | None = None
    ) -> tuple[Any, list[bytes]]:
        """Make a request; returns its result and the values that it asked for."""
        if os.getpid() != self._owner:
            raise ValueError("a child that a worker has forked cannot use the worker's store")
        if arguments:
            keys, *rest = arguments
            arguments = (
                [self._prefix + key for key in keys] if isinstance(keys, list) else f"{self._prefix}{keys}",
                *rest,
            )
        brought = [value.encode() if isinstance(value, str) else value for value in values]
        if any(len(value) > MAX_VALUE_BYTES for value in brought):
            raise ValueError(
                f"a value of the store has at most {MAX_VALUE_BYTES:,} bytes, not {max(map(len, brought)):,}"
            )
        with self._lock, _reached():
            self._connection.send_bytes(json.dumps([operation, *arguments]).encode())
            for value in brought:
                self._connection.send_bytes(value)
            if descriptor is not None:
                send_descriptor(self._connection, descriptor)
            result, num_values, error = json.loads(self._connection.recv_bytes(MAX_VALUE_BYTES))
            if error is not None:
                raise ValueError(f"{operation} {arguments[0]!r}: {error}")
            return result, [self._connection.recv_bytes(MAX_VALUE_BYTES) for _ in range(num_values)]


@contextmanager
def _reached() -> Iterator[None]:
    """Raise as torch's stores do where nobody answers."""
    try:
        yield
    except NotLetInError as error:
        raise WorkerError(
            "The launcher of the chief's host, which holds the store of the run, did not let this host in.",
            given=str(error),
            expected="a port at which it compares the keys of the run",
            hint="read the screen of host 0: strangers may crowd its port",
        ) from None
    except (EOFError, OSError) as error:
        raise DistNetworkError(f"the launcher, which holds the store, is gone ({error!r})") from None


def _timed_out(keys: Sequence[str], timeout: timedelta) -> DistStoreError:
    return DistStoreError(f"wait timeout after {timeout.total_seconds():g} s for {', '.join(keys)}")
