"""What the readers of weight files share: their errors, and how zip archives begin and break."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import CheckpointError
from lockstep.listing import shorten


class MissingFileError(CheckpointError):
    """One of the files of a checkpoint is not there."""


def damaged_file(path: Path, what: str, *, given: str, expected: str) -> CheckpointError:
    """The error for a file of which `what` is true: "is cut short"."""
    return CheckpointError(f"{path} {what}.", given=given, expected=expected, hint="copy the checkpoint again")


def damaged_tensor(name: str, path: Path, *, given: str, expected: str) -> CheckpointError:
    """The error for a tensor that is not what was written."""
    return CheckpointError(
        f"The tensor {name!r} of {path} is damaged.",
        given=given,
        expected=expected,
        hint="copy the checkpoint again, or leave this tensor out",
    )


def unreadable_file(path: Path, error: OSError) -> CheckpointError:
    """The error for a file that cannot be opened or read."""
    return CheckpointError(
        f"{path} cannot be read.",
        given=f"{type(error).__name__}: {error.strerror or error}",
        expected="a file of the checkpoint",
        hint="copy all files of the checkpoint, and see that they may be read",
    )


def check_present(checkpoint: Path, files: Sequence[Path], count: int) -> None:
    """Refuse a checkpoint of `count` files of which some of these are not there.

    Raises:
        MissingFileError: naming them.
    """
    if missing := [file.name for file in files if not file.exists()]:
        raise MissingFileError(
            f"The checkpoint {checkpoint} is not whole.",
            given=f"no file {shorten(missing)}",
            expected=f"all of its {count} files of values" if count > 1 else "its file of values",
            hint="copy what is missing from where the checkpoint was written",
        )


def no_tensor(name: str, path: Path, count: int) -> CheckpointError:
    """The error for a name that a checkpoint has not."""
    return CheckpointError(
        f"{path} has no tensor {name!r}.",
        given=repr(name),
        expected=f"the name of one of its {count} tensors",
        hint="list its tensors, and name one of these",
    )


def not_numbers(name: str, path: Path, kind: str) -> CheckpointError:
    """The error for a tensor of a kind that is none of torch's."""
    return CheckpointError(
        f"The tensor {name!r} of {path} holds what torch has no kind for.",
        given=f"values of type {kind}",
        expected="floating-point numbers, integers, complex numbers or booleans",
        hint="leave this tensor out",
    )


ZIP_MAGIC, EMPTY_ZIP = b"PK\x03\x04", b"PK\x05\x06"

ZIP_FAULTS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError)
"""Beside OSError. The library has an error of its own, and raises these too."""

# The record at the end of an archive (APPNOTE.TXT, 4.3.16), which a comment may follow.
_END, _MOST_COMMENT_BYTES = struct.Struct("<4s4H2LH"), (1 << 16) - 1
_UNCOUNTED = 0xFFFF
"""What the record says of so many files or more."""


def check_zip_count(archive: zipfile.ZipFile, path: Path) -> None:
    """Compare the number of files that are listed with the number that the end of the archive has.

    The library does not: an entry of the list whose length is damaged hides those that follow it.

    Raises:
        BadZipFile: the numbers differ.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _END.size - _MOST_COMMENT_BYTES))
        tail = file.read()
    count, found = _END.unpack_from(tail, tail.rindex(EMPTY_ZIP))[4], len(archive.infolist())
    if count not in (found, _UNCOUNTED):
        raise zipfile.BadZipFile(f"its end says that it has {count} files, and {found} are found")
