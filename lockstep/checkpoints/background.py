"""Saving while the run goes on.

The tensors are copied at once, and a thread writes the copies. An error of the thread is raised by whoever asks next:
the next save, or a step. A writer has at most one checkpoint in flight: the next one waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy

from lockstep.checkpoints.copies import Copies
from lockstep.checkpoints.encoding import JSON, Tensors, check_saveable
from lockstep.checkpoints.store import Store
from lockstep.screen import log
from lockstep.workers.pulse import of_this_process

_in_flight: list[BackgroundWriter] = []
"""The writers of this process that have begun a checkpoint and have not been waited for: a read or another write of
any of them waits, whoever holds the writer."""


class BackgroundWriter:
    """Writes the checkpoints of one store in a thread."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._before_change: list[Callable[[], None]] | None = None

    def begin(
        self,
        step: int,
        tensors: Tensors,
        values: Mapping[str, JSON],
        scores: Mapping[str, float] | None = None,
        *,
        before_change: list[Callable[[], None]] | None = None,
    ) -> None:
        """Have a checkpoint written of the tensors as they are now; they may change once this has returned.

        Args:
            step: whose checkpoint it is.
            tensors: by section and name, as `Store.write` takes them.
            values: the rest, which is taken as it is now.
            scores: of the weights, by name, where they are known.
            before_change: functions that are called before a step changes anything; until the checkpoint has been
                waited for, `check` is among them.

        Raises:
            CheckpointError: a tensor cannot be saved, or the checkpoint before this one could not be written.
        """
        self.wait()
        check_saveable(tensors)
        copies = Copies(tensors)
        thread = threading.Thread(
            target=self._write,
            args=(step, copies, deepcopy(values), dict(scores or {})),
            name=f"checkpoint of step {step}",
        )
        thread.start()
        self._thread = thread
        _in_flight.append(self)
        self._before_change = before_change
        if before_change is not None:
            before_change.append(self.check)

    def check(self) -> None:
        """Raise the error of the checkpoint in flight, if it could not be written."""
        if self._error is not None:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint in flight is on the disk."""
        if self._thread is None:
            return
        with _saving():
            self._thread.join()
            self._thread = None
            _in_flight.remove(self)
            if self._before_change is not None:
                self._before_change.remove(self.check)
            error, self._error = self._error, None
            if error is not None:
                raise error

    def _write(
        self,
        step: int,
        copies: Copies,
        values: Mapping[str, JSON],
        scores: Mapping[str, float],
    ) -> None:
        try:
            self.store.write(step, copies.on_host(), values, scores)
        except BaseException as error:
            self._error = error
            # It is raised by whoever asks next; nobody may.
            log.error("the checkpoint of step %d is not written: %s", step, getattr(error, "what", error))


def wait_for_writers() -> None:
    """Wait until the checkpoints of all writers of this process are on the disk."""
    for writer in _in_flight.copy():
        writer.wait()


def _saving() -> AbstractContextManager[None]:
    pulse = of_this_process()
    return pulse.during(pulse.step, "save")
