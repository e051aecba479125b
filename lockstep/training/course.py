"""How far a loop over a loader has come, and where it ends."""

from __future__ import annotations

from collections.abc import Generator

from lockstep.data.loader import Loader
from lockstep.errors import InputError
from lockstep.exchange.tree import assign_towers
from lockstep.screen import log
from lockstep.towers.towers import Towers, counted_towers
from lockstep.types import Batch, End, Progress
from lockstep.workers.rank import join
from lockstep.workers.signals import enter_body, log_stop


class Course:
    """How far a loop over a loader has come, and where it ends; it begins at `now`.

    Without an end it goes on until it is stopped. `owns_towers` says that each worker has towers of its own.
    """

    def __init__(
        self, loader: Loader, towers: Towers | None, until: End | None, now: Progress, *, owns_towers: bool = True
    ) -> None:
        self.worker = join()
        self._loader, self._until, self.now = loader, until, now
        self._towers = counted_towers(towers, self.worker.num_workers)
        self._towers.check(loader.batch_size, self.worker.num_workers if owns_towers else 1)
        self._num_loads = loader.num_loads

    def batches(self) -> Generator[Batch, None, None]:
        """Yield this worker's part of every batch up to the end."""
        worker, loader = self.worker, self._loader
        if self.is_done():
            return
        mine = assign_towers(self._towers.num_towers, worker.num_workers)[worker.rank]
        worker.pulse.at(self.now.step, "data")
        for batch in loader.batches(mine, self._towers.num_towers, worker.device, stop=self._is_past_the_end):
            worker.pulse.at(self.now.step, "loop body")
            enter_body()
            self._num_loads = loader.num_loads
            yield batch
            worker.pulse.at(self.now.step, "data")

    def is_done(self) -> bool:
        """Whether nothing is left to do, which the chief says in the log.

        Raises:
            InputError: there never was anything to do.
        """
        now = self.now
        if self._until is None or not self.is_at_end(now):
            return False
        if not now.position:
            raise InputError(
                "The run would end before its first step: no full batch fits.",
                given=f"an end after {self._until}, batches of {self._loader.batch_size}, {self._loader.epoch_size} "
                "examples in an epoch",
                expected="an end that one batch reaches",
                hint="raise the end, or lower the batch size"
                if self._loader.epoch_size
                else "give the loader an epoch_size, or an end in steps: its stream has no epochs",
            )
        if self.worker.is_chief:
            end = self._until
            log.info("nothing to do: the run is at step %d (epoch %.2f), its end is %s", now.step, now.epochs, end)
        return True

    def is_at_end(self, now: Progress) -> bool:
        """Whether no further batch fits."""
        return self._until is not None and self._until.reached(now, self._loader.batch_size)

    def is_current(self) -> bool:
        """Whether the stream is where it was at the last batch: no resume or rollback has set it to another place."""
        return self._loader.num_loads == self._num_loads

    def ends_with(self, now: Progress, *, is_stopped: bool) -> bool:
        """Whether the loop is over at this moment, since it has reached its end or was asked to stop."""
        self.now = now
        is_at_end = self.is_at_end(now)
        if is_stopped and not is_at_end:
            log_stop(self.worker.pulse, now.step)
        if is_stopped or is_at_end:
            self.worker.pulse.at(now.step, "script")
            self.worker.pulse.stopped = is_stopped
        return is_stopped or is_at_end

    def may_end_with(self, batch: Batch) -> bool:
        """Whether the update from a batch that is not read yet may be the last one."""
        then = self.now._replace(step=self.now.step + 1, position=batch.position + batch.batch_size)
        return self.is_at_end(then)

    def _is_past_the_end(self, position: int) -> bool:
        # Asked for the next batch, which is not where the last one ended if some in between are skipped.
        return self.is_at_end(self.now._replace(position=position))
