"""What a supervisor knows of one worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lockstep.launcher.hosts import Host
from lockstep.workers.watchdog import WorkerStatus


@dataclass
class WorkerRecord:
    """One worker: where it was when last heard of, and how far its process has come."""

    rank: int
    """The number with which it was started: its rank, until others are lost."""
    host: Host
    environment: Mapping[str, str]
    """What its host was told to set in its environment."""
    pid: int = 0
    step: int = 0
    phase: str = "start"
    state: Literal["running", "failed", "returned", "done", "dead"] = "running"
    """`running` until it has `failed` (why is known, or it was killed from here) or `returned` 0 from all that it had
    to do; once its process is gone, `done` or `dead`."""
    run_ended: bool = False
    """Its part of the run has reached the end, and is saved; it may still score."""
    saves_at_stop: bool = False
    """Its run writes a checkpoint when it is stopped."""
    has_left: bool = False
    """It will not take part any more, though its process may live on."""
    phase_at_stop: str | None = None
    """Its phase when it was asked to stop."""
    is_awaited: bool = False
    """It was asked to stop, and has not said since where it is."""

    @property
    def has_process(self) -> bool:
        """Whether its process is still there."""
        return self.state in ("running", "failed", "returned")

    @property
    def has_returned(self) -> bool:
        """Whether its main function has returned 0."""
        return self.state in ("returned", "done")

    @property
    def status(self) -> WorkerStatus:
        """The worker in messages."""
        return WorkerStatus(self.rank, self.pid, self.step, self.phase, self.host.name)

    @property
    def interrupted_phase(self) -> str:
        """The phase that a stop interrupts: a worker that was scoring, and has ended since, left its scoring off."""
        return "evaluate" if (self.phase_at_stop, self.phase) == ("evaluate", "end") else self.phase
