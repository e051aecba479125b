"""Requests to an object store, made again after a wait where it may help: backoff with full jitter.

The waits are those of "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015): before the n-th repeat, a random
time of up to 0.2 s * 2**n, 20 s at most. Credentials that have expired are another case: whoever gives them has to
give new ones, which is waited for.

Requests `at_once` end with the first error. Ctrl-C waits for none of them: their threads end with the process. Nor does
a process that is to end (`ended_by`) wait for a store that no longer answers.
"""

from __future__ import annotations

import errno
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, TypeVar

from lockstep.errors import LockstepError, StoreError
from lockstep.screen import log, one_line

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_AT_ONCE = 8
NUM_TRIES = 8
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.2, 20.0
_CREDENTIALS_WAIT_SECONDS, _CREDENTIALS_POLL_SECONDS = 300.0, 5.0
"""Less than a loader's `timeout_seconds`, so that it is this wait that says what is wrong."""
_FINAL = (LockstepError, FileNotFoundError, IsADirectoryError, NotADirectoryError, NotImplementedError)
_FINAL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG}
"""What the disk of this machine says of a download."""
_FINAL_KINDS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError"}
"""Errors that another try does not mend; of libraries that are not loaded here, by their names."""
_EXPIRED = {
    *("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"),  # S3's codes
    *(
        "UnauthorizedSSOTokenError",
        "SSOTokenLoadError",
        "TokenRetrievalError",
        "CredentialRetrievalError",
    ),  # botocore's
    "RefreshError",  # Google's
}
_OF_AZURE = "ClientAuthenticationError"
_SAYS_EXPIRED = re.compile(r"expire|not valid in the specified time")
"""Azure's error for all that it does not take, a wrong key, too: only its text says what is wrong."""
_QUERY, _USER = re.compile(r"(://[^\s?]+)\?\S*"), re.compile(r"://[^\s/@]*@")
_MOST_CHARACTERS = 300
_LOOK_SECONDS, _LAST_SECONDS = 0.1, 3.0
"""How often is looked whether there is to be an end, and how long a store may then be silent."""
_end: ContextVar[threading.Event | None] = ContextVar("end", default=None)
"""Ends the waits of this thread, see `ended_by`."""


class Ending(threading.Event):
    """Is set `grace_seconds` after it was asked for: by `set`, or by `is_asked`, called until it has said so once."""

    def __init__(self, is_asked: Callable[[], object], grace_seconds: float = 0.0) -> None:
        super().__init__()
        self._is_asked, self._grace_seconds = is_asked, grace_seconds
        self._asked_at: float | None = None

    def is_set(self) -> bool:
        """Whether requests that fail are to be made again no more."""
        if self._asked_at is None and self._is_asked():
            self.set()
        return self._asked_at is not None and time.monotonic() - self._asked_at >= self._grace_seconds

    def set(self) -> None:
        """Ask for the end: the time of grace counts from here."""
        self._asked_at = self._asked_at or time.monotonic()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, for so many seconds; returns whether it is set."""
        until = time.monotonic() + (timeout or 0.0)
        while not self.is_set() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))
        return self.is_set()


@contextmanager
def ended_by(event: threading.Event) -> Iterator[None]:
    """Have the requests of this thread fail at their first error once an event is set, and their waits end with it.

    What is being asked then is waited for as long as the store answers at all.
    """
    token = _end.set(event)
    try:
        yield
    finally:
        _end.reset(token)


def wait_before_try(seconds: float, error: Exception) -> None:
    """Wait before another try; raises the error once there is to be none."""
    if (end := _end.get()) is None:
        time.sleep(seconds)
    elif end.wait(seconds):
        raise error


def with_retries(
    request: Callable[[], Result],
    what: str,
    *,
    tries: int = NUM_TRIES,
    before_repeat: Callable[[], None] | None = None,
    probe: Callable[[], object] | None = None,
) -> Result:
    """Make a request until it succeeds, or has failed so often that the error is raised; `what` names it in the log.

    What `before_repeat` raises, when it is called after a wait, is raised at once. Where there is a `probe`, a small
    request of the same store, it is made once this thread is to end (`ended_by`) and the answer does not come: if it
    raises, or has no answer either, a TimeoutError is raised, and the request left alone.

    Raises:
        StoreError: the credentials have expired, and no new ones have come.
    """
    number, waited = 1, 0.0
    while True:
        if before_repeat and (number > 1 or waited):
            before_repeat()
        try:
            return _unless_silent(request, probe, end) if probe and (end := _end.get()) else request()
        except Exception as error:
            if (end := _end.get()) and end.is_set():
                raise
            if has_expired(error):
                waited = _wait_for_credentials(error, what, waited)
                continue
            is_final = isinstance(error, _FINAL) or getattr(error, "errno", None) in _FINAL_ERRNOS
            if is_refused(error) or is_final or number == tries:
                raise
            wait_seconds = random.uniform(0, min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2**number))
            number += 1
            log.info("%s: %s; try %d of %d follows in %.1f s", what, told(error), number, tries, wait_seconds)
            wait_before_try(wait_seconds, error)


def _unless_silent(request: Callable[[], Result], probe: Callable[[], object], end: threading.Event) -> Result:
    """Make a request in a thread, which is left alone if the store is silent once there is to be an end."""
    answer = _begun(request)
    while not wait([answer], _LOOK_SECONDS).done:
        if end.is_set() and not wait([answer], _LAST_SECONDS).done:
            probed = _begun(probe)
            both: list[Future[Any]] = [answer, probed]
            wait(both, _LAST_SECONDS, FIRST_COMPLETED)
            if not answer.done() and (not probed.done() or probed.exception()):
                raise TimeoutError("the store does not answer")
    return answer.result()


def _begun(request: Callable[[], Result]) -> Future[Result]:
    """Begin to make a request, in a thread that ends with the process."""
    answer: Future[Result] = Future()

    def work() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="request", daemon=True).start()
    return answer


def at_once(request: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Make a request for each item, `MOST_AT_ONCE` at a time, and return the results in the order of the items.

    The first error is raised, once those under way have ended, too; an interrupt is raised at once. Where this thread
    is to end (`ended_by`) and not all are made, that is an InterruptedError.
    """
    outer = _end.get()
    end = Ending(outer.is_set if outer else lambda: False)
    todo, ended = [*items], SimpleQueue[BaseException | None]()
    numbered = enumerate(todo)
    results: dict[int, Result] = {}

    def work() -> None:
        try:
            with ended_by(end):
                for number, item in numbered:
                    results[number] = request(item)
                    if end.is_set():
                        break
            ended.put(None)
        except BaseException as error:
            end.set()
            ended.put(error)

    try:
        num_threads = min(MOST_AT_ONCE, len(todo))
        for _ in range(num_threads):
            threading.Thread(target=work, name="request", daemon=True).start()
        errors = [error for _ in range(num_threads) if (error := ended.get())]
    finally:
        end.set()
    if errors:
        raise errors[0]
    if len(results) < len(todo):
        raise InterruptedError("this process is to end")
    return [results[number] for number in sorted(results)]


def has_expired(error: BaseException | None) -> bool:
    """Tell whether a request has failed for credentials that have expired."""
    while error is not None:
        response = getattr(error, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else type(error).__name__
        if code in _EXPIRED or (code == _OF_AZURE and _SAYS_EXPIRED.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_refused(error: BaseException) -> bool:
    """Tell whether a store has refused a request for who made it, for its rights or its credentials."""
    return isinstance(error, PermissionError) or type(error).__name__ in _FINAL_KINDS or says_forbidden(error)


def says_forbidden(error: BaseException) -> bool:
    """Tell whether an error is a refusal but no PermissionError: gcsfs makes an OSError, Azure and the hub theirs."""
    is_of_gcsfs = type(error) is OSError and str(error).startswith("Forbidden:")
    is_of_hub = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
    return is_of_gcsfs or is_of_hub or (type(error).__name__ == _OF_AZURE and not has_expired(error))


def told(error: BaseException) -> str:
    """Say on one line what is wrong, without queries of URLs, which may be signed, and users, who have passwords."""
    text = f"{error.what} {error.given}" if isinstance(error, LockstepError) else f"{error}" or type(error).__name__
    return _USER.sub("://", _QUERY.sub(r"\1", one_line(text)))[:_MOST_CHARACTERS]


def _wait_for_credentials(error: Exception, what: str, waited: float) -> float:
    """Wait a while for new credentials; returns for how long they have been waited for."""
    if not waited:
        log.warning(
            "%s: the credentials have expired (%s). New ones are waited for, for %.0f s: renew them where they come "
            "from, as `aws sso login` does",
            *(what, told(error), _CREDENTIALS_WAIT_SECONDS),
        )
    if waited >= _CREDENTIALS_WAIT_SECONDS:
        raise StoreError(
            f"{what} may be read no longer: the credentials have expired.",
            given=told(error),
            expected=f"new ones within {_CREDENTIALS_WAIT_SECONDS:.0f} s",
            hint="renew them (aws sso login, gcloud auth application-default login, az login), or give a role that is "
            "renewed by itself, and start the same command again: it goes on from its last checkpoint",
        ) from error
    wait_before_try(_CREDENTIALS_POLL_SECONDS, error)
    return waited + _CREDENTIALS_POLL_SECONDS
