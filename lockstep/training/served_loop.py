"""The training loop of an exchange that the chief serves: backup workers, and asynchronous updates.

The chief waits for the gradients of an update, makes it, publishes the new parameters with the report, and yields the
report. Each other worker fetches the newest parameters, yields the report that came with them, computes the gradient of
a slice, and sends it. A slow worker does not get every report; but no update is made while the chief's loop body runs.
Where that makes a call that all workers make together, such as an evaluation, each of them gets this very report, with
these very parameters, and makes the same call.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from lockstep import errors
from lockstep.data.loader import Loader, Slices
from lockstep.data.rows import saved_ranges
from lockstep.errors import InputError, LockstepError, PeerLostError, WorkerError
from lockstep.exchange.exchange import plain_counts
from lockstep.screen import log
from lockstep.served.exchanges import Asynchronous, ServedExchange, num_computing
from lockstep.served.leases import Futile, Leases
from lockstep.served.parameter_server import Client, Server
from lockstep.towers.towers import Towers, counted_towers
from lockstep.training.course import Course
from lockstep.training.preflight import check_state_and_towers, compare_first_step
from lockstep.training.served_step import ServedStep
from lockstep.training.state import TrainState
from lockstep.types import Arrivals, NonFiniteError, NonFiniteReport, StepReport
from lockstep.workers.group import JSON
from lockstep.workers.rank import Worker, join
from lockstep.workers.signals import interruptible, stop_on_interrupt, uninterrupted

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.exchange.exchange import Counts
    from lockstep.types import Batch, CountFunction, LossFunction


def bind_served(state: TrainState, towers: Towers | None, exchange: ServedExchange) -> ServedStep:
    """Return the step of this state with these towers and this exchange; it is made at the first call.

    Raises:
        InputError: the exchange cannot serve the state.
    """
    check_state_and_towers(state, towers)
    worker = join()
    key = (counted_towers(towers, num_computing(exchange, worker.num_workers)), exchange)
    if state.resumed:
        compare_first_step(state, *key, worker)
    step: ServedStep | None = state.steps.get((ServedStep, *key))
    if step is None or step.group is not worker.group:  # which another group has taken the place of
        step = state.steps[ServedStep, *key] = ServedStep(state, *key, worker, step)
    return step


def served_reports(
    step: ServedStep, losses: LossFunction, counts: CountFunction | None, loader: Loader, course: Course
) -> Generator[StepReport, None, None]:
    """Train up to the end of the course, and yield reports; all workers call it together."""
    if course.is_done():
        return
    with stop_on_interrupt(step.worker.pulse):
        if step.worker.is_chief:
            yield from _Chief(step, loader, course).reports()
        else:
            yield from _Computing(step, losses, counts, loader, course).reports()


class _Chief:
    """The chief's loop: it makes the updates."""

    def __init__(self, step: ServedStep, loader: Loader, course: Course) -> None:
        self._step, self._loader, self._course = step, loader, course
        exchange, self._num_computing = step.exchange, num_computing(step.exchange, step.worker.num_workers)
        self._slices = _slices(step, loader)
        self._leases = Leases(
            self._slices.starts(),
            slice_size=self._slices.size,
            epoch_size=loader.epoch_size,
            num_workers=self._num_computing,
            required=step.num_needed,
            staleness=exchange.staleness if isinstance(exchange, Asynchronous) else 0,
        )
        self._delay = exchange.startup_delay_steps if isinstance(exchange, Asynchronous) else 0
        if step.state.step < self._delay:
            self._leases.workers = {1}
        self._futile = Futile()
        self._server = Server(step.worker, step.like_gradient(), step.state.published(), self._leases)

    def reports(self) -> Generator[StepReport, None, None]:
        """Make updates up to the end, and yield the report of each."""
        server, course, pulse = self._server, self._course, self._step.worker.pulse
        with ExitStack() as stack:
            stack.callback(server.close)
            self._publish(None)
            while True:
                pulse.at(course.now.step, "exchange")
                try:
                    with uninterrupted():
                        report = self._update()
                        self._publish(report)
                except PeerLostError:
                    raise
                except LockstepError as error:
                    server.end(_error_message(error))
                    server.wait_for_end()
                    raise
                pulse.at(report.step, "loop body")
                if is_over := report.stop_requested or self._is_past_the_end(report):
                    server.end(None)
                server.pause()
                try:
                    yield report
                except GeneratorExit:  # the loop bodies of all workers leave their loops after this report
                    stack.pop_all()
                    _see_off(server, self._step.worker)
                    raise
                server.resume()
                self._step.resume()
                course.ends_with(report.progress, is_stopped=report.stop_requested)
                if is_over:
                    server.wait_for_end()
                    return

    def _is_past_the_end(self, report: StepReport) -> bool:
        """Whether nothing is left to do; what is skipped before the end is not."""
        loader, now = self._loader, report.progress
        while not loader.returned and now.position in loader.skipped:
            now = now._replace(position=now.position + loader.batch_size)
        return self._course.is_at_end(now)

    def _update(self) -> StepReport:
        with interruptible():
            gradients = self._server.next_update()
        with self._server.lock:
            leases = self._leases
            arrivals = Arrivals(dict(leases.used), dict(leases.dropped), dict(leases.behind))
            end, unfinished = leases.unfinished()
        exchange = self._step.exchange
        if isinstance(exchange, Asynchronous) and exchange.staleness is not None:
            for rank, num_dropped in self._futile.find(arrivals.used, arrivals.dropped):
                log.warning(
                    "%s is of no use: its last %d gradients came more than %d updates late, and were dropped; raise the"
                    " staleness, or train without it",
                    self._step.worker.group.names[rank],
                    num_dropped,
                    exchange.staleness,
                )
        assert end is not None, "there is an update"
        position, _ = self._slices.left(end, unfinished)
        report = self._step.update(gradients, self._loader, position, arrivals)
        self._slices.commit(end, unfinished, report)
        self._step.state.end_attempt()
        return report

    def _publish(self, report: StepReport | None) -> None:
        state, loader = self._step.state, self._loader
        if 0 < self._delay <= state.step:
            with self._server.lock:
                for rank in range(2, self._num_computing + 1):
                    self._leases.join(rank)
            self._delay = 0
        self._server.publish(
            self._step.state.published(),
            {
                "step": state.step,
                "loss_scale": self._step.loss_scale,
                "stream": [loader.position, saved_ranges(loader.returned)],
                "report": None if report is None else report.as_json(),
            },
        )


def _see_off(server: Server, worker: Worker) -> None:
    """Let the other workers learn the end while the chief goes on, as they may wait for it elsewhere."""

    def wait_and_close() -> None:
        with closing(server), suppress(LockstepError):  # of a worker that is lost the main thread hears by itself
            server.wait_for_end()

    server.end(None)
    thread = threading.Thread(target=wait_and_close, name="lockstep-see-off", daemon=True)
    thread.start()
    worker.group.at_end(lambda error: thread.join() if error is None else None)


class _Computing:
    """The loop of a worker that computes."""

    def __init__(
        self, step: ServedStep, losses: LossFunction, counts: CountFunction | None, loader: Loader, course: Course
    ) -> None:
        self._step, self._losses, self._counts, self._loader, self._course = step, losses, counts, loader, course
        worker = step.worker
        num_here = worker.num_local_workers - (worker.rank == worker.local_rank)  # but for the chief, if it is here
        self._slices = _slices(step, loader)
        self._reader = self._slices.reader(
            worker.rank - 1, num_computing(step.exchange, worker.num_workers), worker.device, num_here
        )
        self._client = Client(step.worker, step.like_gradient(), step.state.published())
        self._counted_in: dict[int, Batch] = {}
        """Slices that were read to count in them; one of them may be leased to this worker next."""

    def reports(self) -> Generator[StepReport, None, None]:
        """Compute up to the end, and yield the report of each version that this worker gets."""
        client, course, step = self._client, self._course, self._step
        pulse, state = step.worker.pulse, step.state
        loss_scale, report = None, None
        with closing(client), closing(self._reader):
            while True:
                pulse.at(state.step, "exchange")
                published = client.fetch()
                if published.tensors is not None:
                    report, loss_scale = self._adopt(published.tensors, cast(Any, published.message))
                if published.tensors is not None and report is not None:
                    pulse.at(state.step, "loop body")
                    yield report
                    course.ends_with(report.progress, is_stopped=report.stop_requested)
                if published.is_over:
                    _raise_error(published.end)
                    return
                if published.slice is not None:
                    self._compute(published.slice, published.version, loss_scale)

    def _compute(self, start: int, version: int, loss_scale: float | None) -> None:
        """Compute the gradient of the slice that this worker has a lease of, and send it; not if it is too late."""
        step, pulse = self._step, self._step.worker.pulse
        pulse.at(step.state.step, "data")
        batch = self._read(start)
        if self._client.is_late(version):
            return
        pulse.at(step.state.step, "compute" if step.has_run else "first step")
        with uninterrupted():
            computed = step.compute(self._losses, batch, self._counts, loss_scale, partial(self._of_batch, start))
        message = {
            **computed.message,
            "position": self._slices.batch_in_stream(start),
            "stops": pulse.stop_requested is not None,
        }
        self._client.send(start, version, computed.partial, message)

    def _read(self, start: int) -> Batch:
        batch = self._counted_in.pop(start, None)
        return self._reader.read(start) if batch is None else batch

    def _of_batch(self, start: int, own: Counts) -> list[Counts]:
        """What is counted in each slice of the batch that a slice is a part of: `own` is that of the slice.

        The others' come from those who compute them. What they have not counted in good time is counted here.
        """
        assert self._counts is not None, "it has counted"
        slices, told = self._slices.of_batch(start), {start: plain_counts(own)}
        self._counted_in = {each: batch for each, batch in self._counted_in.items() if each in slices}
        with interruptible():
            while True:
                known, missing = self._client.share_counts(told, slices)
                if not missing:
                    return [own if each == start else known[each] for each in slices]
                self._counted_in |= {each: self._read(each) for each in missing}
                told = {each: self._step.count(self._counts, self._counted_in[each]) for each in missing}

    def _adopt(self, tensors: Sequence[Tensor], message: Mapping[str, Any]) -> tuple[StepReport | None, float | None]:
        """Take over a version that the chief has published; returns the report and the loss scale that came with it."""
        state, loader = self._step.state, self._loader
        state.adopt(zip(state.published(), tensors, strict=True), step=message["step"])
        report = None if message["report"] is None else StepReport.from_json(message["report"])
        position, returned = message["stream"]
        loader.return_to(position, [range(*each) for each in returned], report)
        return report, message["loss_scale"]


def _slices(step: ServedStep, loader: Loader) -> Slices:
    return loader.slices(loader.batch_size // step.num_needed, step.towers.num_towers)


def _error_message(error: LockstepError) -> JSON:
    """What ends the chief, for the others to raise it, too."""
    nonfinite = error.nonfinite if isinstance(error, NonFiniteError) else None
    return {
        "kind": type(error).__name__,
        "said": [str(each) for each in (error.what, error.given, error.expected, error.hint)],
        "nonfinite": nonfinite and [nonfinite.position, nonfinite.reasons, nonfinite.culprits],
    }


def _raise_error(message: Any) -> None:
    """Raise what has ended the chief, if it was an error."""
    if message is None:
        return
    kinds = {kind.__name__: kind for kind in (InputError, errors.DataError, NonFiniteError)}
    what, given, expected, hint = message["said"]
    error = kinds.get(message["kind"], WorkerError)(what, given=given, expected=expected, hint=hint)
    if isinstance(error, NonFiniteError) and message["nonfinite"]:
        position, reasons, culprits = message["nonfinite"]
        error = error.about(NonFiniteReport(position, tuple(reasons), tuple(culprits)))
    raise error
