"""Output that outlives its terminal: when a window or a connection is closed, the run still has to save."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any, TextIO


class _Terminal(io.FileIO):
    """A terminal that takes what is written after it is closed, in place of an error."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(memoryview(data))


def outlive_terminal() -> None:
    """Have `sys.stdout` and `sys.stderr` of this process raise nothing when their terminal is closed."""
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None or not stream.isatty():
            continue
        stream.flush()
        raw = _Terminal(stream.fileno(), "w", closefd=False)
        lasting = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True
        )
        setattr(sys, name, lasting)
