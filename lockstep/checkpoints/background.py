"""Saving while the run goes on.

A thread copies the tensors and writes the copy. The run computes meanwhile, and waits only before it changes what is
not copied yet: `let_change` is called at the moment of each update. Forward and backward passes take longer than the
copy, so most often nobody waits.

At most one checkpoint is in flight: the next one waits for it. What goes wrong in the thread, the next call raises.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from copy import deepcopy

import torch
from torch import Tensor

from lockstep.checkpoints.store import Store
from lockstep.checkpoints.tensors import Tensors, check
from lockstep.checkpoints.values import JSON
from lockstep.errors import CheckpointError


class BackgroundWriter:
    """Writes the checkpoints of one store in a thread.

    Args:
        store: where they go.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._thread: threading.Thread | None = None
        self._may_change = threading.Event()
        self._may_change.set()
        self._error: BaseException | None = None

    def begin(self, step: int, tensors: Tensors, values: Mapping[str, JSON], *, at_once: Collection[str] = ()) -> None:
        """Have a checkpoint written; the tensors must stay as they are until `let_change` has returned.

        Args:
            step: whose checkpoint it is.
            tensors: by section and name, as `Store.write` takes them.
            values: the rest, which is taken as it is now.
            at_once: sections that are copied before this returns, since they may change at any time.

        Raises:
            CheckpointError: a tensor cannot be saved, or the checkpoint before this one could not be written.
        """
        self.wait()
        check(tensors)
        taken = {section: _copied(tensors[section]) for section in tensors if section in at_once}
        later = {section: members for section, members in tensors.items() if section not in taken}
        self._may_change.clear()
        order = list(tensors)
        self._thread = threading.Thread(
            target=self._write, args=(step, order, taken, later, deepcopy(values)), name=f"checkpoint of step {step}"
        )
        self._thread.start()

    def let_change(self) -> None:
        """Wait until everything is copied; from then on it may change.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        self._may_change.wait()
        self._raise()

    def wait(self) -> None:
        """Wait until the checkpoint in flight is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(
        self,
        step: int,
        order: list[str],
        taken: dict[str, dict[str, Tensor]],
        later: Tensors,
        values: Mapping[str, JSON],
    ) -> None:
        torch.set_num_threads(1)  # of this thread alone
        try:
            with torch.no_grad():
                before = _versions(later)
                taken |= {section: _copied(members) for section, members in later.items()}
            if _versions(later) != before:
                raise _changed(step)
            self._may_change.set()
            self.store.write(step, {section: taken[section] for section in order}, values)
        except BaseException as error:
            self._error = error
        finally:
            self._may_change.set()


def _copied(members: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in members.items()}


def _versions(tensors: Tensors) -> list[int]:
    """Counts of the changes in place to each tensor."""
    return [tensor._version for members in tensors.values() for tensor in members.values()]


def _changed(step: int) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint of step {step} was not written: what it holds changed while it was copied.",
        given="parameters, slots or averages that were changed between a save and the next step",
        expected="that only steps change them",
        mend="call wait() on the saver before you change them yourself",
    )
