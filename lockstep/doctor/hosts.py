"""The network to other hosts, as far as this host can say: names, the interface that leads there, and what answers."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lockstep.doctor.check_result import Check, CheckResult, judged
from lockstep.errors import InputError
from lockstep.workers.connections import (
    INTERFACE_OF_GLOO,
    INTERFACE_OF_NCCL,
    address_of,
    address_towards,
    interface_of,
    interfaces,
    leads_out,
    run_key,
)
from lockstep.workers.limits import CONNECT_SECONDS

_USUAL_PORT, _MOST_PORT = 29500, 65535
_NUM_CALLS, _SLOW_SECONDS, _MOST_AT_ONCE = 3, 0.005, 64
_NOBODY_SETS_IT, _TIMEX_BYTES, _MAXERROR = 5, 256, struct.Struct("24x l")
"""What adjtimex(2) tells: the state of a clock that nothing sets, the most bytes, and where in them the error is."""


class HostPort(NamedTuple):
    """Another host, and the port where it is called."""

    name: str
    port: int = _USUAL_PORT

    @classmethod
    def of(cls, text: str) -> HostPort:
        """Read `NAME`, `NAME:PORT`, an address, or `[ADDRESS]:PORT`.

        Raises:
            InputError: it has none of these forms.
        """
        name, colon, port = text.rpartition(":")
        if not colon or (":" in name and not text.startswith("[")):
            name, port = text, str(_USUAL_PORT)
        with suppress(UnicodeError, ValueError):
            if name.strip("[]").encode("idna") and 0 < int(port) <= _MOST_PORT:
                return cls(name.strip("[]"), int(port))
        raise InputError(
            "This cannot be the name of a host.",
            given=f"--hosts {text}",
            expected=f"a name or an address, and a port from 1 to {_MOST_PORT} if you like",
            hint="--hosts node1 node2, or --hosts node1:29500",
        )


def host_checks(places: Sequence[HostPort]) -> dict[str, Check]:
    """Return the checks of a run over this host and others, all of which are called at once; none without others."""
    if not places:
        return {}
    return {"interfaces": _interfaces, "key": _key, "clocks": _clocks, "hosts": partial(_hosts, places)}


def _interfaces() -> Iterator[CheckResult]:
    there = interfaces()
    for variable in (INTERFACE_OF_GLOO, INTERFACE_OF_NCCL):
        name = os.environ.get(variable, "").partition(",")[0].lstrip("^=")
        if variable == INTERFACE_OF_GLOO and name and address_of(name) is None:
            found = f"{variable}={os.environ[variable]}, and this host has {', '.join(there)}"
            yield CheckResult(
                "interfaces", found, "fails", f"unset {variable}: the one that leads to the others is taken"
            )
        elif name:
            yield CheckResult("interfaces", f"{variable}={os.environ[variable]}, of {', '.join(there)}")
    if INTERFACE_OF_GLOO not in os.environ:
        yield CheckResult("interfaces", f"the one that leads to the others, of {', '.join(there)}")


def _key() -> Iterator[CheckResult]:
    try:
        length = len(run_key(os.environ))
    except InputError as error:
        yield CheckResult("key", f"{error.what.rstrip('.')}: {error.given}", "warn", error.hint)
    else:
        yield CheckResult("key", f"{length} characters", numbers={"characters": length})


def _clocks() -> Iterator[CheckResult]:
    room = ctypes.create_string_buffer(_TIMEX_BYTES)
    state = getattr(ctypes.CDLL(None), "adjtimex", lambda _: -1)(room)
    if state == _NOBODY_SETS_IT:
        mend = "run chrony or systemd-timesyncd on each host: the lines of their logs are else in no order"
        yield CheckResult("clocks", "nothing keeps the clock of this host right", "warn", mend)
    elif state >= 0:
        error = _MAXERROR.unpack_from(room.raw)[0] / 1e6
        yield CheckResult(
            "clocks", f"that of this host is right to {1e3 * error:.0f} ms", numbers={"error_seconds": error}
        )


def _hosts(places: Sequence[HostPort]) -> Iterator[CheckResult]:
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        yield from pool.map(_way_to, places)


def _way_to(place: HostPort) -> CheckResult:
    """Call a host: whether anybody listens matters less than whether its system answers."""
    checked = f"host {place.name}"
    try:
        address = str(socket.getaddrinfo(place.name, place.port, type=socket.SOCK_STREAM)[0][4][0])
        own = address_towards(address, place.port)
    except OSError as error:
        mend = "check its spelling; or add it to the names that this host knows, in /etc/hosts or the DNS"
        return CheckResult(checked, f"cannot be found: {error.strerror or error}", "fails", mend)
    if not leads_out(address) or own == address:
        return CheckResult(checked, f"{address} is this host itself")
    interface = interface_of(own) or "an unknown interface"
    way = f"{address} by {interface} ({', '.join([own, *_facts_of(interface)])})"
    try:
        listens, seconds = min(_call(address, place.port) for _ in range(_NUM_CALLS))
    except OSError as error:
        why = "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        mend = f"start it, and let no firewall between the hosts drop port {place.port} or any other"
        return CheckResult(checked, f"does not answer at port {place.port}, {way}: {why}", "fails", mend)
    return judged(
        checked,
        f"answers in {1e3 * seconds:.2f} ms, {way}; {'somebody' if listens else 'nobody'} listens at port {place.port}",
        {"seconds": seconds, "port": place.port},
        is_bad=seconds > _SLOW_SECONDS,
        mend="a nearer network: each update waits for some of these",
    )


def _call(address: str, port: int) -> tuple[bool, float]:
    """Return whether somebody listens there, and after how many seconds its system has answered."""
    began = time.perf_counter()
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
        listens = True
    except ConnectionRefusedError:  # which is an answer, too
        listens = False
    return listens, time.perf_counter() - began


def _facts_of(interface: str) -> Iterator[str]:
    """Yield what the system says of an interface; a virtual one has no speed."""
    folder = Path("/sys/class/net") / interface
    with suppress(OSError, ValueError):
        yield f"MTU {int((folder / 'mtu').read_text())}"
        speed = int((folder / "speed").read_text())
        if speed > 0:
            yield f"{speed / 1000:g} Gbit/s"
