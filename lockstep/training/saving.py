"""Saving while the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from lockstep.checkpoints.background import BackgroundWriter
from lockstep.checkpoints.store import Store
from lockstep.data.loader import Loader
from lockstep.errors import CheckpointError
from lockstep.training.extra_state import SECTION
from lockstep.training.resume import States, contents, store_of
from lockstep.workers.rank import join


class Saver:
    """Writes the checkpoints of a run while it goes on; only the chief does, and on the others nothing happens.

    `save` returns at once. The next step waits, before it changes anything, for what is not copied yet; where a
    checkpoint cannot be written, a later step or `save` raises the error. At most one is in flight: the next `save`
    waits for it. After `wait`, or at the end of a `with` statement, the last one is on the disk.

    Args:
        workdir: the run's folder (checkpoints go to its `checkpoints/`), or a store with other rules of retention.
    """

    def __init__(self, workdir: str | Path | Store) -> None:
        self._writer = BackgroundWriter(store_of(workdir))

    def save(self, states: States, loader: Loader, *, scores: Mapping[str, float] | None = None) -> None:
        """Begin to write a checkpoint of the run as it stands: one state, or several by name.

        Args:
            states: one state, or several by name.
            loader: its position is saved, not what it has read ahead.
            scores: of the weights as they stand, by name ("validation/top1"), for a retention that keeps the best.

        Raises:
            CheckpointError: the one before could not be written, or a tensor cannot be saved. That the state is not
                finite, a later call says.
        """
        if not join().is_chief:
            return
        step, tensors, values = contents(states, loader)
        # Towers change the buffers while they run, and put them back; extra state changes as its module likes.
        changing = [section for section in tensors if section.rpartition(".")[2] in ("buffers", SECTION)]
        self._writer.begin(step, tensors, values, scores, at_once=changing)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            CheckpointError: it could not be written; older checkpoints are as they were.
        """
        self._writer.wait()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except CheckpointError as unwritten:
            if error is None:
                raise
            error.add_note(f"Besides: {unwritten}")
