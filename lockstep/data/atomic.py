"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lockstep.errors import DataError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that becomes `path` when the block ends without an error; until then nobody sees it.

    Several processes may do so at once: each writes its own, and the last one to end stays.

    Raises:
        DataError: the system refuses to write it.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written.",
            given=str(error),
            expected="a folder that may be written, on a disk with room",
            mend="make room, or name another folder",
        ) from error
    finally:
        _forget(temporary)


def _forget(temporary: Path) -> None:
    try:
        temporary.unlink(missing_ok=True)
    except OSError:  # Where the folder is none, or is not ours to write, the file was never made.
        return


def _sync_folder(path: Path) -> None:
    if os.name == "nt":  # No folder can be opened there, and names are written through.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
