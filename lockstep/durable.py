"""Durable writes: the bytes are on the disk when the call returns, not merely on their way. And opening to read."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lockstep.errors import LockstepError

_NO_ROOM, _NOT_ALLOWED = "make room, or name another folder", "get the right to write there, or name another folder"
_HINTS: dict[int | None, str] = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: "the disk is read-only: name a folder on another one",
}


@contextmanager
def atomic_write(
    path: Path, *, parents: bool = False, failure: type[LockstepError] | None = None
) -> Iterator[BinaryIO]:
    """Yield a new file that becomes `path` when the block ends without an error; until then nobody sees it.

    Several processes may do so at once: each writes its own, and the last one to end stays. A failure leaves what was
    there, and nothing else.

    With `parents` its folder, and those above it, are made if they are missing. `failure` is raised in place of the
    OSError with which the system refuses.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        if parents:
            make_folder(path.parent)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        if failure is None:
            raise
        raise failure(
            f"{path} cannot be written.",
            given=str(error),
            expected="a folder that may be written, on a disk with room",
            hint=_HINTS.get(error.errno, "name another folder"),
        ) from error
    finally:
        with suppress(OSError):  # where the folder is none, or is not ours to write, the file was never made
            temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make the folder, and those above it, if they are missing."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Write to the disk which files were created, renamed or deleted in a folder."""
    if os.name == "nt":  # no folder can be opened there, and names are written through
        return
    sync_and_close(os.open(path, os.O_RDONLY))


def sync_and_close(descriptor: int) -> None:
    """Wait until what was written to an open file or folder is on the disk; it is closed in any case."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_at_once(name: str, flags: int) -> int:
    """Open for the built-in `open` as its `opener`: where a pipe lies in the place of a file, it is not waited for."""
    return os.open(name, flags | os.O_NONBLOCK)
