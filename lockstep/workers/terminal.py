"""Output that outlives its terminal, or has none: whatever becomes of the screen, the run still has to save."""

from __future__ import annotations

import errno
import io
import os
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
    """Have `sys.stdout` and `sys.stderr` of this process raise nothing when their terminal is closed, or missing."""
    while (nowhere := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # What was closed is open now; else a file that is opened later would be taken for the screen.
    os.close(nowhere)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))
            continue
        if not stream.isatty():
            continue
        stream.flush()
        raw = _Terminal(descriptor, "w", closefd=False)
        lasting = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True
        )
        setattr(sys, name, lasting)
