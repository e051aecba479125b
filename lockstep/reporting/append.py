"""A file that only grows, by whole pieces that are safe from a kill as soon as they are written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from lockstep.durable import sync_folder
from lockstep.errors import WorkdirError, WorkdirLostError


class AppendOnly:
    """A file open for appending; opening raises WorkdirError where the disk refuses, and all else WorkdirLostError.

    A piece is a single call to the system with no buffer in between: what a killed process has written stays written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _explained(path, WorkdirError):
            self._file = path.open("ab", buffering=0)
            self._size = os.fstat(self._file.fileno()).st_size

    def cut(self, size: int) -> None:
        """Shorten the file to `size` bytes: at any moment it has the old length or the new one."""
        with _explained(self.path):
            os.ftruncate(self._file.fileno(), size)
        self._size = size
        self.flush()

    def cut_torn_line(self) -> None:
        """Drop what comes after the last end of a line."""
        with _explained(self.path):
            content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self.cut(whole)

    def write(self, piece: bytes) -> None:
        """Append a piece; a disk that takes only a part of it keeps none of it."""
        with _explained(self.path):
            try:
                if self._file.write(piece) != len(piece):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file.fileno(), self._size)
                raise
        self._size += len(piece)

    def flush(self) -> None:
        """Return once all pieces are on the disk, safe from a loss of power too."""
        with _explained(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; nothing is left to write."""
        self._file.close()


def append_line(path: Path, line: str) -> None:
    """Add a line to a file of lines, made if need be; the line is on the disk when this returns.

    What a loss of power has left of a line at the end of the file goes first: the new one would be glued to it.
    """
    is_new = not path.exists()
    with closing(AppendOnly(path)) as file:
        file.cut_torn_line()
        file.write(line.encode() + b"\n")
        file.flush()
    if is_new:
        sync_folder(path.parent)


def no_folder(folder: Path) -> WorkdirLostError:
    """The error for a folder that is not there, or no longer, where a run writes to it."""
    return WorkdirLostError(
        f"The folder {folder} is not there.",
        given=f"no folder {folder}",
        expected="a folder that stays as long as a run writes to it",
        hint="if it was deleted or moved while the run went on, put it back: the same command goes on from the last "
        "checkpoint in it, and what is not put back is lost",
    )


@contextmanager
def _explained(path: Path, kind: type[WorkdirError] = WorkdirLostError) -> Iterator[None]:
    """Raise what the system refuses as an error that says how to mend it."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT and not path.parent.exists():
            raise no_folder(path.parent) from error
        raise kind(
            f"{path} cannot be written: {error.strerror}.",
            given=f"{path} ({error.strerror})",
            expected="a file that can be created and extended, on a disk with space left",
            hint="make space, or give a workdir that can be written; what was written before is intact",
        ) from error
