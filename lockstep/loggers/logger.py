"""What a live logger is: four methods, called one after another on a thread that the logger has for itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from lockstep.checks import Checked, check_together, wrong_type
from lockstep.errors import InputError
from lockstep.inline_toml import inline_toml

_METHODS = ("begin", "log", "log_artifact", "end")


class LoggedRun(NamedTuple):
    """The run that a logger is told of."""

    name: str
    """The recipe's name; in a script that of the workdir."""
    id: str
    """16 digits and letters, the same in every start of the run: a logger goes on where it has seen them before."""
    workdir: Path | None
    step: int
    """The step after which the run is logged; 0 at its beginning."""
    config: Mapping[str, Any]
    """The recipe as tables within tables; in a script what it gives."""
    environment: Mapping[str, Any]
    """Versions, host, device and number of workers of this start."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The config, and the environment as a further table in it."""
        return {**self.config, "environment": dict(self.environment)}


class Logger(Protocol):
    """Takes what a run says of itself, while it goes on.

    One with an attribute `can_rewind = True` takes steps back: it is begun again where the run goes back to an earlier
    step, forgets what it has of later steps than `run.step`, and gets them again. All others get no step twice.
    An error of a method is told once, and the run goes on.
    """

    def begin(self, run: LoggedRun) -> None:
        """Begin, or go on with what an earlier start of the run has begun."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Take numbers by name, at their place: the step; there may be several calls for a step, of other names."""

    def log_artifact(self, path: Path) -> None:
        """Keep a file, or a folder, as it is now."""

    def end(self, reason: str) -> None:
        """End: "end", "patience" or "stopped" as in `Result.reason`, or "failed"."""


class LoggerKind(Checked):
    """Base of the loggers of recipes: a value, which opens a logger where a run begins."""

    library: ClassVar[str | None] = None
    """The module that it needs, which is also the name of the extra that installs it; None: it needs none."""

    def check_installed(self) -> None:
        """Refuse the logger where its library is not installed; it is not imported for it."""
        if self.library is not None and find_spec(self.library) is None:
            raise InputError(
                f"This logger needs {self.library}, which is not installed.",
                given=f"loggers = [{inline_toml(self)}]",
                expected=f"{self.library}, or a run without this logger",
                hint=f"pip install 'lockstep-train[{self.library}]'",
            )

    @abstractmethod
    def open(self) -> Logger:
        """Make the logger, which has done nothing yet."""


def check_loggers(name: str, loggers: object) -> None:
    """Refuse what is no logger, and one whose library is not installed."""
    if not isinstance(loggers, list | tuple):
        raise wrong_type(name, loggers, expected="a list", hint=f"write {name}=[ls.loggers.Csv()]")
    check_together(partial(_check_logger, f"{name}[{index}]", each) for index, each in enumerate(loggers))


def _check_logger(name: str, given: object) -> None:
    if isinstance(given, LoggerKind):
        given.check_installed()
    elif isinstance(given, type) or not all(callable(getattr(given, method, None)) for method in _METHODS):
        raise wrong_type(
            name,
            given,
            expected="a logger: ls.loggers.Wandb(), or an object with the methods " + ", ".join(_METHODS),
            hint="see ls.loggers.Logger for what each of them takes",
        )
