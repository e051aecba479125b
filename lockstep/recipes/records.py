"""What a run writes about itself beside its checkpoints: metrics.jsonl and the summaries; the chief alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lockstep.data.loader import Loader
from lockstep.progress import Progress
from lockstep.recipes.recipe import Watch
from lockstep.reporting.jsonl import MetricsFile
from lockstep.reporting.summaries import Summaries
from lockstep.training.hooks import every
from lockstep.training.loop import Hook


class Records:
    """The records of one start; those of an earlier one are cut where this one takes up the run."""

    def __init__(self, folder: Path, watch: Watch, start: Progress) -> None:
        self._watch = watch
        self._metrics = MetricsFile(folder / "metrics.jsonl", from_position=start.position)
        self._summaries = Summaries(folder / "summaries", from_step=start.step, interval=watch.summaries)

    def hooks(self, start: Progress) -> list[Hook]:
        """What is to see each report."""
        return [every(self._watch.metrics, self._metrics.write, start=start), self._summaries]

    def describe(self, recipe_toml: str, model: str, step: int) -> None:
        """Write down what runs."""
        if self._watch.summaries.amount:
            self._summaries.write_text("recipe", recipe_toml, step)
            self._summaries.write_text("model", model, step)

    def show_images(self, loader: Loader, count: int, step: int) -> None:
        """Write the images of the next batch as the model will see them."""
        with_images = loader.batches(range(1), 1)
        images = next(with_images)["image"][:count]
        with_images.close()
        self._summaries.write_images("input", np.asarray(images), step)

    def mark(self, event: str, step: int) -> None:
        """Write a start, a resume, a stop or the end among the summaries."""
        if self._watch.summaries.amount:
            self._summaries.write_text("events", f"{event} at step {step}", step)

    def write_evaluation(self, step: int, name: str, scores: Mapping[str, float]) -> None:
        """Write the scores of an evaluation."""
        self._metrics.write_evaluation(step, name, scores)
        if self._watch.summaries.amount:
            self._summaries.write_evaluation(step, name, scores)

    def flush(self) -> None:
        """Have everything on the disk: a checkpoint is about to stand for it."""
        self._metrics.flush()
        self._summaries.flush()

    def close(self) -> None:
        """Close the files."""
        self._summaries.close()
        self._metrics.close()
