"""Requests to an object store, made again after a wait where it may help: backoff with full jitter.

The waits are those of "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015): before the n-th repeat, a random
time of up to 0.2 s * 2**n, 20 s at most.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from lockstep.errors import LockstepError
from lockstep.screen import log

Result = TypeVar("Result")

NUM_TRIES = 8
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.2, 20.0
_FINAL = (LockstepError, FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)
"""Errors that another try does not mend."""


def with_retries(request: Callable[[], Result], what: str, *, tries: int = NUM_TRIES) -> Result:
    """Make a request until it succeeds, or has failed so often that the error is raised; `what` names it in the log."""
    for number in range(1, tries):
        try:
            return request()
        except _FINAL:
            raise
        except Exception as error:
            wait_seconds = random.uniform(0, min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2**number))
            log.info("%s: %s; try %d of %d follows in %.1f s", what, error, number + 1, tries, wait_seconds)
            time.sleep(wait_seconds)
    return request()
