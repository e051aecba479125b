"""Folders that are needed as long as a process lives; those of killed processes go when the next one is made."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.owner import Owner, this_process

_OWNER = "owner.json"
_MOST_BYTES = 1 << 12


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder among the temporary files, with a name that begins so, and delete it at the end.

    First those with such names are deleted that this user's processes have left, if they can be seen to be dead.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError, ValueError):
            if _is_left_over(path):
                shutil.rmtree(path)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        (folder / _OWNER).write_bytes(this_process().encode())
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_left_over(path: Path) -> bool:
    """Whether a folder is of this user, and of a process that is dead.

    Raises:
        OSError, ValueError: it does not say of which.
    """
    # Anybody may write beside it: no link is followed, and nothing of another user is opened.
    if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
        return False
    with (path / _OWNER).open("rb") as file:
        return Owner.decode(file.read(_MOST_BYTES)).state() == "dead"
