"""Which example a thread is reading, for whoever waits for it.

Who reads an example names it; who runs the reading listens. A read that hangs can so be named from outside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class _Thread(threading.local):
    tell: Callable[[str], None] | None = None


_thread = _Thread()


def listen(tell: Callable[[str], None]) -> None:
    """From now on, be told each example that this thread begins to read."""
    _thread.tell = tell


def now_reading(name: str) -> None:
    """Say which example, or which file, this thread begins to read; where nobody listens, costs a function call."""
    if _thread.tell is not None:
        _thread.tell(name)
