"""The errors that the readers of files with weights share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import CheckpointError
from lockstep.listing import shorten

# Of both of its formats, as TensorFlow has had them from the start.
_VERSION = 1


class MissingFileError(CheckpointError):
    """One of the files of a checkpoint is not there."""


def check_version(least: int, path: Path) -> None:
    """Refuse a file for readers of a later version of the format.

    Raises:
        CheckpointError: naming the file and the version.
    """
    if least > _VERSION:
        raise CheckpointError(
            f"{path} is of a later version of the format.",
            given=f"a file for readers of version {least} or later",
            expected=f"one that readers of version {_VERSION} may read",
            hint="save the checkpoint with an earlier TensorFlow",
        )


def damaged(path: Path, what: str, *, given: str, expected: str) -> CheckpointError:
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


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file that cannot be opened or read."""
    return CheckpointError(
        f"{path} cannot be read.",
        given=f"{type(error).__name__}: {error.strerror or error}",
        expected="a file of the checkpoint",
        hint="copy all files of the checkpoint, and see that they may be read",
    )


def check_whole(checkpoint: Path, files: Sequence[Path], count: int) -> None:
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
