"""Tracebacks of a user's script: the user's own frames, and one line for what lies between them of other packages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import dropwhile, groupby
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException
from typing import Any

_OURS = str(Path(__file__).parent) + os.sep
_PYTHON = str(Path(os.__file__).parent) + os.sep
_PACKAGES = ("site-packages", "dist-packages")


def short_traceback(error: BaseException) -> str:
    """Format an error with the frames of the user's code, whole where it has passed through none."""
    shown = TracebackException.from_exception(error)
    chain = list(_chain(shown))
    if any(package_of(frame.filename) is None for each in chain for frame in each.stack):
        for each in chain:
            each.stack = _Folded(each.stack)
    return "".join(shown.format())


def place_in_script(error: BaseException) -> str:
    """Name the last line of the user's code that an error, or its cause, has passed through; "" where there is none."""
    for each in (error.__cause__, error):
        stack = TracebackException.from_exception(each).stack if each else ()
        if own := [frame for frame in stack if package_of(frame.filename) is None]:
            return f"{own[-1].filename}, line {own[-1].lineno}: {own[-1].line}"
    return ""


def package_of(filename: str) -> str | None:
    """Name the package that a frame's file belongs to; None for the user's own code."""
    if filename.startswith(_OURS):
        return "lockstep"
    parts = Path(filename).parts
    for folder in _PACKAGES:
        if folder in parts[:-1]:
            return parts[parts.index(folder) + 1].removesuffix(".py")
    return "Python" if filename.startswith((_PYTHON, "<frozen ")) else None


class _Folded(StackSummary):
    """Frames of which the user's are shown, after those by which the script was started."""

    def format(self, **options: Any) -> Iterator[str]:  # type: ignore[override]
        started = dropwhile(_is_foreign, self) if any(not _is_foreign(frame) for frame in self) else self
        for is_foreign, group in groupby(started, _is_foreign):
            frames = list(group)
            if not is_foreign:
                yield from StackSummary.from_list(frames).format(**options)
                continue
            packages = ", ".join(dict.fromkeys(package_of(frame.filename) or "" for frame in frames))
            yield f"  ... {len(frames)} {'frame' if len(frames) == 1 else 'frames'} of {packages}\n"


def _is_foreign(frame: FrameSummary) -> bool:
    return package_of(frame.filename) is not None


def _chain(shown: TracebackException) -> Iterator[TracebackException]:
    """Yield an error, those that it came from or was raised with, and theirs."""
    yield shown
    for other in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if other is not None:
            yield from _chain(other)
