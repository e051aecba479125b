"""Live loggers: Weights & Biases, MLflow, trackio, a table of CSV, or one of your own, for recipes and for scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.loggers.kinds import Csv as Csv
    from lockstep.loggers.kinds import Mlflow as Mlflow
    from lockstep.loggers.kinds import Trackio as Trackio
    from lockstep.loggers.kinds import Wandb as Wandb
    from lockstep.loggers.logger import LoggedRun as LoggedRun
    from lockstep.loggers.logger import Logger as Logger
    from lockstep.loggers.loggers import Loggers as Loggers
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
