"""Requests that fail are made again, unless that mends nothing."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace

import pytest

from lockstep.errors import StoreRefusedError
from lockstep.storage import remote_path, retries
from lockstep.storage.remote_path import RemotePath, store_error
from lockstep.storage.retries import MOST_AT_ONCE, NUM_TRIES, at_once, ended_by, has_expired, with_retries


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(retries.time, "sleep", found.append)
    return found


def failing(times: int, error: Exception) -> tuple[list[int], object]:
    calls: list[int] = []

    def request() -> str:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return "done"

    return calls, request


def test_it_succeeds_in_the_end(waits: list[float]) -> None:
    calls, request = failing(3, TimeoutError("slow down"))
    assert with_retries(request, "s3://b/x") == "done"  # type: ignore[arg-type]
    assert len(calls) == 4
    assert all(0 <= wait <= 0.2 * 2**number for number, wait in enumerate(waits, start=1))


def test_it_gives_up(waits: list[float]) -> None:
    calls, request = failing(99, OSError("503"))
    with pytest.raises(OSError, match="503"):
        with_retries(request, "s3://b/x")  # type: ignore[arg-type]
    assert len(calls) == NUM_TRIES == len(waits) + 1


@pytest.mark.parametrize("error", [PermissionError("403"), OSError(errno.ENOSPC, "No space left on device")])
def test_what_no_repeat_mends_is_raised_at_once(waits: list[float], error: OSError) -> None:
    calls, request = failing(99, error)
    with pytest.raises(type(error)):
        with_retries(request, "s3://b/x")  # type: ignore[arg-type]
    assert (len(calls), waits) == (1, [])


def test_once_it_is_to_end_nothing_is_tried_again(waits: list[float]) -> None:
    end = threading.Event()
    calls: list[int] = []

    def request() -> None:
        calls.append(1)
        if len(calls) == 2:
            end.set()
        raise OSError("503")

    for num_calls in (2, 3):
        with ended_by(end), pytest.raises(OSError, match="503"):
            with_retries(request, "s3://b/x")
        assert len(calls) == num_calls
    assert waits == []


def test_requests_at_once_come_in_order_and_end_with_the_first_error() -> None:
    assert at_once(lambda number: number**2, range(20)) == [number**2 for number in range(20)]
    begun, ended = list[int](), list[int]()

    def request(number: int) -> None:
        begun.append(number)
        if number == 3:
            raise OSError("503")
        while len(begun) < MOST_AT_ONCE:
            pass
        ended.append(number)

    with pytest.raises(OSError, match="503"):
        at_once(request, range(1000))
    assert len(ended) == len(begun) - 1 < 999  # those under way have ended
    assert at_once(request, []) == []


def test_once_it_is_to_end_a_silent_store_is_left_alone_and_a_slow_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retries, "_LAST_SECONDS", 0.1)
    monkeypatch.setattr(retries, "_LOOK_SECONDS", 0.01)
    silent, end, probes = threading.Event(), threading.Event(), list[int]()

    def probe() -> None:
        probes.append(1)
        if len(probes) == 3:
            raise ConnectionError("refused")

    def silence() -> str:
        silent.wait(60.0)
        return "late"

    threading.Timer(0.2, end.set).start()
    with ended_by(end), pytest.raises(TimeoutError, match="the store does not answer"):
        with_retries(silence, "s3://b/x", probe=probe)
    assert len(probes) == 3  # while it answers, what is sent is sent
    with ended_by(end), pytest.raises(TimeoutError):
        with_retries(silence, "s3://b/x", probe=silence)
    threading.Timer(0.3, silent.set).start()
    with ended_by(end):
        assert with_retries(silence, "s3://b/x", probe=list) == "late"


def test_requests_at_once_end_as_the_thread_that_makes_them() -> None:
    end, begun = threading.Event(), list[int]()

    def request(number: int) -> int:
        begun.append(number)
        if len(begun) == 20:
            end.set()
        return number

    with ended_by(end), pytest.raises(InterruptedError):
        at_once(request, range(1000))
    assert len(begun) < 20 + MOST_AT_ONCE


class OfTheHubError(Exception):
    """As huggingface_hub makes them."""

    response = SimpleNamespace(status_code=403)


class ClientAuthenticationError(Exception):
    """As Azure's."""


@pytest.mark.parametrize(
    "error",
    [
        OSError("Forbidden: https://storage.googleapis.com/b\nx does not have storage.objects.list access"),
        ClientAuthenticationError("Server failed to authenticate the request. ErrorCode:AuthenticationFailed"),
        PermissionError("403"),
        OfTheHubError("Client error '403 Forbidden' for url"),
    ],
)
def test_no_rights_are_no_reason_to_try_again(waits: list[float], error: Exception) -> None:
    calls, request = failing(99, error)
    with pytest.raises(type(error)):
        with_retries(request, "gs://b/x")  # type: ignore[arg-type]
    assert (len(calls), waits) == (1, [])
    assert isinstance(store_error("gs://b/x", error), StoreRefusedError)


def test_azure_says_by_its_text_alone_that_credentials_have_expired() -> None:
    assert has_expired(ClientAuthenticationError("Signature not valid in the specified time frame: Expiry [...]"))
    assert has_expired(ClientAuthenticationError("AADSTS700082: The refresh token has expired due to inactivity"))
    assert not has_expired(ClientAuthenticationError("Make sure the value of Authorization header is formed correctly"))


def test_a_refusal_of_gcsfs_is_a_permission_error(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise OSError("Forbidden: no access")

    monkeypatch.setattr(remote_path, "filesystem", forbidden)
    with pytest.raises(PermissionError, match="no access"):
        RemotePath("memory://b/x").read_bytes()
    assert waits == []
