from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from lockstep.types import Progress, StepReport

MakeReport = Callable[..., StepReport]


@pytest.fixture
def make_report() -> MakeReport:
    """A report of attempt `step`, with 128 examples an attempt and a tenth of a second for each."""

    def make(step: int, *, position: int | None = None, elapsed_seconds: float | None = None, **fields) -> StepReport:
        progress = Progress(
            step=step,
            position=128 * step if position is None else position,
            epoch_size=55_000,
            elapsed_seconds=0.1 * step if elapsed_seconds is None else elapsed_seconds,
        )
        defaults = {
            "losses": {"cross_entropy": 1 / (step + 2)},
            "smoothed": {"cross_entropy": 0.5, "total": 0.5},
            "metrics": {"top1": 0.25},
            "learning_rate": 0.05,
            "gradient_norm": 2.0,
            "num_examples": 128,
            "step_seconds": 0.1,
            "wait_seconds": 0.001,
        }
        return StepReport(progress=progress, **(defaults | fields))

    return make


@pytest.fixture(autouse=True)
def _logger_as_before() -> Iterator[None]:
    logger = logging.getLogger("lockstep")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
