"""What checkpoints say that decides which of them are kept: when they were saved, how they score, who pinned them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.checkpoints.manifest import MANIFEST, Manifest
from lockstep.durable import atomic_write
from lockstep.errors import CheckpointError

PINNED = "pinned"
"""A file of this name in a checkpoint's folder keeps it."""


@dataclass(frozen=True)
class Standing:
    """What some checkpoints say, by step."""

    saved_seconds: Mapping[int, float]
    """In seconds since 1970. One that cannot say counts as far from all others: where hours count, it is kept."""
    best_scores: Mapping[int, float]
    """Of those that were among the best when they were written, by the score that counts."""
    pinned: Collection[int]

    @classmethod
    def read(cls, folders: Mapping[int, Path], best: str | None) -> Standing:
        """Ask the checkpoints in these folders, by step.

        Args:
            folders: where they are.
            best: the score that counts; None where none does.
        """
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


def rate(folder: Path, rated: Manifest) -> None:
    """Take over the scores of another manifest into that of a checkpoint, where it has any."""
    before = Manifest.read(folder)
    after = replace(before, scores=rated.scores, best_by=rated.best_by)
    if rated.scores and after != before:
        with atomic_write(folder / MANIFEST) as file:
            file.write(after.encode())
