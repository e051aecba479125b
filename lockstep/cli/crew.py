"""How many workers a command starts, and what each of them does first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.cores import usable_cores
from lockstep.errors import InputError
from lockstep.parallel import launch
from lockstep.reporting.log import configure
from lockstep.workers.devices import num_accelerators
from lockstep.workers.rank import Worker, join
from lockstep.workers.signals import stop_on_signals


def num_workers(wish: int | None, device: str | None, num_towers: int | None) -> int:
    """The workers to start here: as wished; else one an accelerator, or on a CPU as many as towers and cores allow.

    Where neither towers nor accelerators say otherwise, one.

    Raises:
        InputError: the wish is not positive, or there are accelerators, but fewer than wished.
    """
    accelerators = 0 if device == "cpu" else num_accelerators()
    if wish is None:
        most = accelerators or usable_cores()
        return min(most, num_towers or accelerators or 1)
    if wish < 1 or 0 < accelerators < wish:
        raise InputError(
            "That many workers cannot be started here.",
            given=f"{wish} workers",
            expected=f"1 to {accelerators}, the devices that there are" if accelerators else "1 or more",
            hint="leave --workers out to let Lockstep choose, or add --device cpu",
        )
    return wish


@contextmanager
def joined(device: str | None) -> Iterator[Worker]:
    """This process as a worker: its log lines carry its name, and signals end the run after the step."""
    worker = join(device)
    configure(None if worker.is_chief else worker.name)
    if worker.pulse.launched:
        yield worker
    else:
        with stop_on_signals(worker.pulse):
            yield worker


def stopped_code(worker: Worker, *, requeue: bool) -> int:
    """What a worker returns that was asked to stop: 0 to our launcher, which knows; else the exit code that says so."""
    return (
        0
        if worker.pulse.launched
        else launch.exit_code_of_stop(worker.pulse.stop_requested or "SIGTERM", requeue=requeue)
    )
