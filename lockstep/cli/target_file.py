"""Checks of the file that a command is to write."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lockstep.errors import InputError


def check_target(path: Path, endings: Collection[str], what: str, *, overwrite: bool, flag: str = "--to") -> None:
    """Refuse a file that cannot be written, before any work is done.

    Args:
        path: of the file.
        endings: that its name may have, with their dots.
        what: one sentence, for the message, on what is written into which kind of file.
        overwrite: the file may be there.
        flag: that has named it.

    Raises:
        InputError: the file has another ending, its folder is not there, or it must not be overwritten.
    """
    if path.suffix not in endings:
        raise InputError(
            what,
            given=f"{flag} {path}",
            expected=f"a file whose name ends in {' or '.join(endings)}",
            hint=f"{flag} {path.with_suffix(next(iter(endings)))}" if path.name else "name a file",
        )
    if not path.parent.is_dir():
        raise InputError(
            f"There is no folder {path.parent} to write to.",
            given=f"{flag} {path}",
            expected="a file in a folder that is there",
            hint=f"make it: mkdir -p {path.parent}",
        )
    if path.is_dir() or (path.exists() and not overwrite):
        kind = "folder" if path.is_dir() else "file"
        raise InputError(
            f"There is a {kind} {path} already.",
            given=f"{flag} {path}",
            expected="a name that is free",
            hint="give another name" + ("" if path.is_dir() else ", or --force to overwrite it"),
        )
