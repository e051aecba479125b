"""Every error that Lockstep raises on purpose.

LockstepError
├── InputError            an argument, a field or a file that cannot be used as given
│   ├── RecipeError       a recipe, or a --set of one
│   ├── WorkdirError      a workdir that holds something else, or another run
│   │   └── WorkdirLostError  a workdir that a run can write to no longer: trouble of the machine
│   ├── DataError         a data file, a record, an example
│   ├── NotFoundError     a checkpoint, weights or a tensor that are not there (a CheckpointError, too)
│   ├── MissingFieldError a field that a batch does not have (a KeyError, too)
│   └── InputErrors       several of these at once
├── CheckpointError       a checkpoint that cannot be written or read
├── StoreError            an object store that has not answered, however often it was asked
│   └── StoreRefusedError one that may not be read with these credentials (an InputError, too)
├── VerificationError     a run whose files or updates are not what it has written down
├── NonFiniteError        a loss or a gradient that is not a number (in types.py, with its report)
└── WorkerError           a worker that failed, died or disagrees with the others
    ├── FaultError        one that does not compute what the others do (in types.py, with its verdict)
    └── PeerLostError     seen from a worker: another one is gone (the launcher knows why)
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.screen import one_line


class LockstepError(Exception):
    """What is wrong, in three parts: what was given, what was expected, how to fix it.

    Its text has a line for each: what in them is not printable, such as a line break in a file name, is escaped.
    """

    exit_code = 1
    """Exit code of a command that it ends: 2 for wrong input, which no second try mends; 1 where a scheduler may try
    again."""

    def __init__(self, what: str, *, given: object, expected: object, hint: str) -> None:
        super().__init__(what, given, expected, hint)
        self.what, self.given, self.expected, self.hint = what, given, expected, hint

    def __str__(self) -> str:
        what, given, expected, hint = map(one_line, (self.what, self.given, self.expected, self.hint))
        return f"{what}\n  given:    {given}\n  expected: {expected}\n  hint:     {hint}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.given, self.expected, self.hint)


def _rebuild(kind: type[LockstepError], what: str, given: object, expected: object, hint: str) -> LockstepError:
    return kind(what, given=given, expected=expected, hint=hint)


class InputError(LockstepError):
    """An argument, a field or a file that cannot be used as given."""

    exit_code = 2


class RecipeError(InputError):
    """A recipe that cannot be read, or asks for what does not exist."""


class WorkdirError(InputError):
    """A workdir that holds something else, or a run of another recipe."""


class WorkdirLostError(WorkdirError):
    """A workdir that a run has written to and can write to no longer: deleted, full, read-only.

    Nothing was wrong with what was given, and the trouble may be over when the run is started again.
    """

    exit_code = 1


class DataError(InputError):
    """A data file, a record or an example that cannot be used."""


class InputErrors(InputError):  # noqa: N818 (they are several)
    """Several errors of input, found together; its text has all of them, numbered."""

    def __init__(self, errors: Sequence[InputError]) -> None:
        super().__init__(
            f"{len(errors)} things cannot be used as given.",
            given="; ".join(str(error.given) for error in errors),
            expected="; ".join(str(error.expected) for error in errors),
            hint="; ".join(error.hint for error in errors),
        )
        self.errors = tuple(errors)

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"{number}. {error}" for number, error in enumerate(self.errors, start=1))])

    def __reduce__(self) -> tuple[object, ...]:
        return InputErrors, (self.errors,)


class MissingFieldError(InputError, KeyError):
    """A field that a batch does not have."""


class CheckpointError(LockstepError):
    """A checkpoint that cannot be written or read."""


class NotFoundError(CheckpointError, InputError):
    """A checkpoint, weights or a tensor that are not where they were asked for: wrong input, and nothing damaged."""


class StoreError(LockstepError):
    """An object store that has not answered, however often it was asked: no example is to blame for it."""


class StoreRefusedError(StoreError, InputError):
    """An object store that does not let these credentials read."""


class VerificationError(LockstepError):
    """A run whose files, or whose updates where they are made again, are not what its chain says."""


class WorkerError(LockstepError):
    """A worker that failed, died or disagrees with the others."""


class DisagreementError(WorkerError, InputError):
    """Workers that were started with unlike code, arguments, files or versions."""


class PeerLostError(WorkerError):
    """Seen from a worker: another worker is gone. Its launcher knows the cause."""
