"""Retention: which checkpoints are kept: the newest few, one every few hours, the best few, and pinned ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from lockstep.checkpoints.manifest import MANIFEST, Manifest
from lockstep.checks import Checked, Hint, NonNegativeFloat, PositiveInt, Range
from lockstep.durable import atomic_write
from lockstep.errors import CheckpointError

_NO_SCORES: Mapping[int, float] = {}
_HOURS = "give the hours between two of them, or None to keep the newest alone"


@dataclass(frozen=True)
class Retention(Checked):
    """Keep the `newest` checkpoints; of the older ones those at least `every_hours` apart, and the best.

    Of those apart in time the oldest one counts as the first. Step 0 is a checkpoint like any other.

    Which are the best is settled when each is written: it has to be better than the last of the best there are, by more
    than `min_improvement`, and then takes its place. A score that goes up and down a little thus moves nothing, and of
    equal ones the older stays.
    """

    newest: Annotated[PositiveInt, Hint("keep at least one: a run without checkpoints cannot be resumed")] = 5
    """How many of the newest are kept."""
    every_hours: Annotated[float | None, Range(gt=0, finite=False), Hint(_HOURS)] = None
    """None keeps no older ones."""
    best: str | None = None
    """The score by which checkpoints are the best ("validation/top1"); None: by none."""
    better: Literal["higher", "lower"] = "higher"
    """Whether higher or lower values of `best` are better."""
    keep_best: PositiveInt = 1
    """How many of the best are kept."""
    min_improvement: NonNegativeFloat = 0.0
    """The least by which a score has to be better to count as better."""

    def ranked(self, scores: Mapping[int, float]) -> list[int]:
        """Steps by their scores, the best first; of equal ones the older first."""
        return sorted(scores, key=lambda step: (-self._worth(scores[step]), step))

    def is_among_best(self, score: float, scores: Mapping[int, float]) -> bool:
        """Whether a new checkpoint is one of the best; one whose score is not finite never is.

        The scores, by step, are those of the checkpoints there are that were among the best when they were written.
        """
        best = self.ranked(scores)[: self.keep_best]
        if len(best) < self.keep_best or not math.isfinite(score):
            return math.isfinite(score)
        return self._worth(score) - self._worth(scores[best[-1]]) > self.min_improvement

    def surplus(
        self, saved_seconds: Mapping[int, float], scores: Mapping[int, float] = _NO_SCORES, pinned: Collection[int] = ()
    ) -> list[int]:
        """The steps whose checkpoints are to be deleted, oldest first.

        Deleting them and asking again gives none.

        Args:
            saved_seconds: when the checkpoint of each step was saved, in seconds since 1970.
            scores: of those that were among the best when they were written.
            pinned: those that somebody wants to keep.
        """
        older = sorted(saved_seconds)[: -self.newest]
        kept = {*self._apart_in_time(older, saved_seconds), *self.ranked(scores)[: self.keep_best], *pinned}
        return [step for step in older if step not in kept]

    def _apart_in_time(self, steps: list[int], saved_seconds: Mapping[int, float]) -> list[int]:
        if self.every_hours is None:
            return []
        apart: list[int] = []
        for step in steps:
            # A clock that was set back makes a distance too: it must not have everything deleted until it catches up.
            if not apart or abs(saved_seconds[step] - saved_seconds[apart[-1]]) >= 3600 * self.every_hours:
                apart.append(step)
        return apart

    def _worth(self, score: float) -> float:
        return score if self.better == "higher" else -score


PINNED = "pinned"
"""A file of this name in a checkpoint's folder keeps it."""


@dataclass(frozen=True)
class CheckpointRatings:
    """When checkpoints were saved, their scores and pins, by step."""

    saved_seconds: Mapping[int, float]
    """Times of saving, in seconds since 1970; 0 if unreadable, so that `every_hours` keeps the checkpoint."""
    best_scores: Mapping[int, float]
    """Scores, by what counts, of checkpoints that were among the best when written."""
    pinned: Collection[int]

    @classmethod
    def read(cls, folders: Mapping[int, Path], best: str | None) -> CheckpointRatings:
        """Read the checkpoints in these folders, by step; `best` is the score that counts."""
        manifests: dict[int, Manifest] = {}
        for step, folder in folders.items():
            with contextlib.suppress(CheckpointError):
                manifests[step] = Manifest.read(folder)
        return cls(
            {step: manifests[step].saved_unix_seconds if step in manifests else 0.0 for step in folders},
            {
                step: manifest.scores[best]
                for step, manifest in manifests.items()
                if best is not None and manifest.best_by == best
            },
            [step for step, folder in folders.items() if (folder / PINNED).exists()],
        )


def set_scores(folder: Path, rated: Manifest) -> None:
    """Take over the scores of another manifest into that of a checkpoint, where it has any."""
    before = Manifest.read(folder)
    after = replace(before, scores=rated.scores, best_by=rated.best_by)
    if rated.scores and after != before:
        with atomic_write(folder / MANIFEST) as file:
            file.write(after.encode())
