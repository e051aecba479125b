"""Lockstep trains vision models on many devices as if they were one.

The public names are listed here and loaded on first use, so that importing the package loads no torch.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from lockstep.screen import escape_arguments as _escape_arguments
from lockstep.version import __version__ as __version__

if TYPE_CHECKING:
    from lockstep import data, images, losses, metrics, models, optim, recipes, records, weights
    from lockstep.errors import (
        CheckpointError,
        DataError,
        InputError,
        LockstepError,
        NonFiniteError,
        PeerLostError,
        RecipeError,
        WorkdirError,
        WorkerError,
    )
    from lockstep.evaluation.evaluate import Evaluation, evaluate
    from lockstep.evaluation.precise_statistics import PreciseStatistics
    from lockstep.parallel.exchange import AllReduce, Alone
    from lockstep.parallel.towers import InTurn, Towers
    from lockstep.progress import Epochs, Hours, Interval, Progress, Steps
    from lockstep.runs.result import Result
    from lockstep.runs.run import run
    from lockstep.training.attempt import LossAverage
    from lockstep.training.loop import batches, every, train, train_steps
    from lockstep.training.resume import resume
    from lockstep.training.rollback import rollback
    from lockstep.training.saving import Saver, save
    from lockstep.training.state import TrainState
    from lockstep.training.step import train_step
    from lockstep.training.warm_start import warm_start
    from lockstep.types import BadExample, Batch, NonFiniteReport, StepReport
    from lockstep.weights.initializers import initialize
    from lockstep.workers.rank import Worker, join

_HOMES = {
    "lockstep": ["data", "images", "losses", "metrics", "models", "optim", "recipes", "records", "weights"],
    "lockstep.errors": [
        "CheckpointError",
        "DataError",
        "InputError",
        "LockstepError",
        "NonFiniteError",
        "PeerLostError",
        "RecipeError",
        "WorkdirError",
        "WorkerError",
    ],
    "lockstep.evaluation.evaluate": ["Evaluation", "evaluate"],
    "lockstep.evaluation.precise_statistics": ["PreciseStatistics"],
    "lockstep.parallel.exchange": ["Alone", "AllReduce"],
    "lockstep.parallel.towers": ["InTurn", "Towers"],
    "lockstep.progress": ["Epochs", "Hours", "Interval", "Progress", "Steps"],
    "lockstep.runs.result": ["Result"],
    "lockstep.runs.run": ["run"],
    "lockstep.training.loop": ["batches", "every", "train", "train_steps"],
    "lockstep.training.resume": ["resume"],
    "lockstep.training.rollback": ["rollback"],
    "lockstep.training.saving": ["Saver", "save"],
    "lockstep.training.attempt": ["LossAverage"],
    "lockstep.training.state": ["TrainState"],
    "lockstep.training.step": ["train_step"],
    "lockstep.training.warm_start": ["warm_start"],
    "lockstep.types": ["BadExample", "Batch", "NonFiniteReport", "StepReport"],
    "lockstep.weights.initializers": ["initialize"],
    "lockstep.workers.rank": ["Worker", "join"],
}
# Names from files that are logged hold no line breaks, whatever handler shows them.
logging.getLogger("lockstep").addFilter(_escape_arguments)

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AllReduce",
    "Alone",
    "BadExample",
    "Batch",
    "CheckpointError",
    "DataError",
    "Epochs",
    "Evaluation",
    "Hours",
    "InTurn",
    "InputError",
    "Interval",
    "LockstepError",
    "LossAverage",
    "NonFiniteError",
    "NonFiniteReport",
    "PeerLostError",
    "PreciseStatistics",
    "Progress",
    "RecipeError",
    "Result",
    "Saver",
    "StepReport",
    "Steps",
    "Towers",
    "TrainState",
    "WorkdirError",
    "Worker",
    "WorkerError",
    "batches",
    "data",
    "evaluate",
    "every",
    "images",
    "initialize",
    "join",
    "losses",
    "metrics",
    "models",
    "optim",
    "recipes",
    "records",
    "resume",
    "rollback",
    "run",
    "save",
    "train",
    "train_step",
    "train_steps",
    "warm_start",
    "weights",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return import_module(f"lockstep.{name}") if home == "lockstep" else getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
