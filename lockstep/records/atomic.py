"""Data files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lockstep import durable
from lockstep.errors import DataError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that becomes `path`, in a folder made if need be, when the block ends without an error.

    Raises:
        DataError: the system refuses to write it.
    """
    try:
        durable.make_folder(path.parent)
        with durable.replacing(path) as file:
            yield file
    except OSError as error:
        raise DataError(
            f"{path} cannot be written.",
            given=str(error),
            expected="a folder that may be written, on a disk with room",
            hint="make room, or name another folder",
        ) from error
