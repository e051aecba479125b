"""The training loop of an exchange that the chief serves: backup workers, and asynchronous updates.

The chief waits for the gradients of an update, makes it, publishes the new parameters with the report, and yields the
report. The other workers fetch the newest parameters, yield the report that came with them, compute the gradient of a
slice, and send it. So every worker's loop body sees the state of each report that it gets, and a slow worker does not
get them all; but the chief's next update waits for its own loop body. Where that makes a call that all workers make
together, such as an evaluation, each of them gets this very report, and comes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from lockstep.data.loader import Loader
from lockstep.errors import LockstepError, NonFiniteError, WorkerError
from lockstep.parallel.leases import Leases
from lockstep.parallel.parameter_client import Client
from lockstep.parallel.parameter_server import Server
from lockstep.parallel.served import Asynchronous, ServedExchange, num_computing
from lockstep.parallel.towers import Towers
from lockstep.training.course import Course
from lockstep.training.report_messages import from_message, to_message
from lockstep.training.served_step import ServedStep, check_counts
from lockstep.training.state import TrainState
from lockstep.training.trained_with import compare_first_step
from lockstep.types import Arrivals, StepReport
from lockstep.workers.rank import join
from lockstep.workers.signals import interruptible, stop_on_interrupt, uninterrupted

if TYPE_CHECKING:
    from lockstep.types import CountFunction, LossFunction


_steps: WeakKeyDictionary[TrainState, dict[tuple[Towers, ServedExchange], ServedStep]] = WeakKeyDictionary()
"""The steps of each state, by towers and exchange."""


def bind_served(state: TrainState, towers: Towers | None, exchange: ServedExchange) -> ServedStep:
    """Return the step of this state with these towers and this exchange; it is made at the first call."""
    worker = join()
    key = (towers or Towers(num_computing(exchange, worker.num_workers)), exchange)
    if state.resumed:
        compare_first_step(state, *key, worker)
    steps = _steps.setdefault(state, {})
    if key not in steps:
        steps[key] = ServedStep(state, *key, worker)
    return steps[key]


def served_reports(
    step: ServedStep, losses: LossFunction, counts: CountFunction | None, loader: Loader, course: Course
) -> Generator[StepReport, None, None]:
    """Train up to the end of the course; all workers call it together. See the head of the module."""
    if counts is not None:
        check_counts(step.exchange, step.towers.count)
    if course.is_done():
        return
    with stop_on_interrupt(step.worker.pulse):
        if step.worker.is_chief:
            yield from _Chief(step, loader, course).reports()
        else:
            yield from _computed(step, losses, counts, loader, course)


class _Chief:
    """The chief's loop."""

    def __init__(self, step: ServedStep, loader: Loader, course: Course) -> None:
        self._step, self._loader, self._course = step, loader, course
        worker, exchange = step.worker, step.exchange
        self._leases = Leases(
            loader.slices(step.num_needed),
            slice_size=loader.batch_size // step.num_needed,
            epoch_size=loader.epoch_size,
            num_workers=num_computing(exchange, worker.num_workers),
            required=step.num_needed,
            staleness=exchange.staleness if isinstance(exchange, Asynchronous) else 0,
        )
        self._server = Server(worker, step.like_gradient(), step.published(), self._leases)

    def reports(self) -> Generator[StepReport, None, None]:
        """Make updates up to the end, and yield the report of each."""
        server, worker, course = self._server, self._step.worker, self._course
        error: LockstepError | None = None
        try:
            self._publish(None)
            is_over = False
            while not is_over:
                with uninterrupted():
                    report = self._update()
                    is_over = report.stop_requested or course.is_at_end(report.progress)
                    self._publish(report)
                worker.pulse.at(report.step, "loop body")
                server.pause()
                yield report
                self._step.resume()
                server.resume()
                is_over = course.ends_with(report.progress, is_stopped=report.stop_requested)
            server.end(None)
        except GeneratorExit:  # the loop body has left the loop, as that of the others will
            server.end(None)
            raise
        except (PeerLostError, ...):
            ...
        finally:
            server.close()
