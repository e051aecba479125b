"""Lockstep trains vision models on many devices as if they were one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names
from lockstep.version import __version__ as __version__

if TYPE_CHECKING:
    from lockstep import augmentations as augmentations
    from lockstep import data as data
    from lockstep import detection as detection
    from lockstep import images as images
    from lockstep import loggers as loggers
    from lockstep import losses as losses
    from lockstep import metrics as metrics
    from lockstep import models as models
    from lockstep import optim as optim
    from lockstep import recipes as recipes
    from lockstep import records as records
    from lockstep import weights as weights
    from lockstep.errors import CheckpointError as CheckpointError
    from lockstep.errors import DataError as DataError
    from lockstep.errors import InputError as InputError
    from lockstep.errors import LockstepError as LockstepError
    from lockstep.errors import PeerLostError as PeerLostError
    from lockstep.errors import RecipeError as RecipeError
    from lockstep.errors import WorkdirError as WorkdirError
    from lockstep.errors import WorkerError as WorkerError
    from lockstep.evaluation.evaluate import Evaluation as Evaluation
    from lockstep.evaluation.evaluate import evaluate as evaluate
    from lockstep.evaluation.precise_statistics import PreciseStatistics as PreciseStatistics
    from lockstep.exchange.exchange import AllReduce as AllReduce
    from lockstep.exchange.exchange import Alone as Alone
    from lockstep.launcher.calls import launch as launch
    from lockstep.ragged import Ragged as Ragged
    from lockstep.reporting.trace import Trace as Trace
    from lockstep.runs.predict import FoundObjects as FoundObjects
    from lockstep.runs.predict import Outputs as Outputs
    from lockstep.runs.predict import Predictions as Predictions
    from lockstep.runs.predict import detect as detect
    from lockstep.runs.predict import outputs as outputs
    from lockstep.runs.predict import predict as predict
    from lockstep.runs.run import run as run
    from lockstep.runs.workdir import Result as Result
    from lockstep.served.exchanges import Asynchronous as Asynchronous
    from lockstep.served.exchanges import Backups as Backups
    from lockstep.towers.towers import InTurn as InTurn
    from lockstep.towers.towers import Towers as Towers
    from lockstep.training.attempt import LossAverage as LossAverage
    from lockstep.training.loop import batches as batches
    from lockstep.training.loop import every as every
    from lockstep.training.loop import probe_memory as probe_memory
    from lockstep.training.loop import train as train
    from lockstep.training.loop import train_steps as train_steps
    from lockstep.training.rollback import rollback as rollback
    from lockstep.training.saving import Saver as Saver
    from lockstep.training.saving import resume as resume
    from lockstep.training.saving import save as save
    from lockstep.training.state import TrainState as TrainState
    from lockstep.training.step import train_step as train_step
    from lockstep.training.warm_start import warm_start as warm_start
    from lockstep.types import BadExample as BadExample
    from lockstep.types import Batch as Batch
    from lockstep.types import Epochs as Epochs
    from lockstep.types import Hours as Hours
    from lockstep.types import Interval as Interval
    from lockstep.types import NonFiniteError as NonFiniteError
    from lockstep.types import NonFiniteReport as NonFiniteReport
    from lockstep.types import Progress as Progress
    from lockstep.types import StepReport as StepReport
    from lockstep.types import Steps as Steps
    from lockstep.weights.initializers import initialize as initialize
    from lockstep.workers.rank import Worker as Worker
    from lockstep.workers.rank import join as join
else:
    if sys.platform == "win32":
        # One line for who gives the command; for who imports the library the error that imports raise.
        _IS_COMMAND = sys.argv[0] == "-m" or "lockstep" in sys.argv[0].replace("\\", "/").rpartition("/")[2]
        raise (SystemExit if _IS_COMMAND else ImportError)(
            "Lockstep does not run on Windows: use Linux, for example in WSL 2, or macOS with one worker"
        )
    __getattr__, __dir__, __all__ = lazy_names(__name__)
