"""The training loop: as a generator of batches, of reports, or with hooks.

A step commits its batch to the loader that the batch comes from: the loader moves its position, within the same
uninterrupted block as the update, and keeps the report. `batches` reads that report to know whether a stop was
requested, and commits a batch itself if no step was made from it. So `for batch in ls.batches(loader):` needs no line
of its own for this, and nothing is written to a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from types import NoneType
from typing import TYPE_CHECKING, cast

import torch

from lockstep.checks import check_type
from lockstep.data.loader import Loader
from lockstep.exchange.exchange import AllReduce, Exchange
from lockstep.served.exchanges import ServedExchange, is_served, num_computing
from lockstep.towers.towers import Towers, counted_towers
from lockstep.training.attempt import PendingAttempt, PendingUpdate
from lockstep.training.course import Course
from lockstep.training.memory import describe_batch, lack_of_memory_told, peak_bytes
from lockstep.training.preflight import check_data
from lockstep.training.regrouping import SurvivingLoop
from lockstep.training.served_loop import bind_served, served_reports
from lockstep.training.served_step import ServedStep
from lockstep.training.state import TrainState
from lockstep.training.step import BoundStep, bind
from lockstep.types import Batch, End, Epochs, Hours, Interval, Progress, StepReport, Steps
from lockstep.workers.rank import join
from lockstep.workers.signals import stop_on_interrupt, uninterrupted

if TYPE_CHECKING:
    from lockstep.types import CountFunction, LossFunction


Hook = Callable[[StepReport], None]


def batches(loader: Loader, towers: Towers | None = None, *, until: End | None = None) -> Iterator[Batch]:
    """Yield this worker's part of every batch, from the loader's position on, on its device, for a loop of your own.

    Ends when `until` is reached, or when a step made from the last batch reports that a stop was requested. Steps are
    those of that report; before the first one, the batches of the stream. Ctrl-C requests a stop, as in `train_steps`.

    Raises:
        InputError: the batch cannot be split evenly over the towers, or there are more workers than towers.
    """
    _check(loader, until)
    now = Progress(loader.position // loader.batch_size, loader.position, loader.epoch_size)
    return _batches(Course(loader, towers, until, now), loader)


def train_steps(
    state: TrainState,
    losses: LossFunction,
    loader: Loader,
    towers: Towers | None = None,
    exchange: Exchange | None = None,
    *,
    counts: CountFunction | None = None,
    until: End | None = None,
) -> Generator[StepReport, None, None]:
    """Train from where the state and the loader stand, yielding a report after each attempt.

    Ends when `until` is reached (never, if None; the same on all workers), or after the step at which some worker was
    asked to stop. Where nothing is left to do, it says so and yields nothing. See `train_step` for the arguments and
    what is raised.

    On an accelerator the loss function is called for the next batch before this generator yields the report of the last
    one. What the loop body changes in the model is noticed, and that batch is computed anew; a variable that the loss
    function reads counts one batch later. Where that matters, make the loop of `batches` and `train_step`.

    In the main thread of a script that handles Ctrl-C as Python does, the first Ctrl-C asks to stop after the step, and
    so does what is trained after that; the second raises KeyboardInterrupt. See `train_step` for where it is raised.

    Under `lockstep run --on-failure continue` it goes on from memory without workers that are lost, also where the loop
    body is in `evaluate` then, and takes in those that are started in their place. Each worker's loop body gets each
    report once. A worker that joins has run the script up to here, where it gets the state, with its `stateful`, and
    the place in the stream. Without a count, there are as many towers as workers were started.
    """
    _check(loader, until)
    here, exchange = join(), exchange or AllReduce()
    if here.pulse.generations is None:
        yield from steps_without_survival(state, losses, loader, towers, exchange, counts=counts, until=until)
        return
    towers = counted_towers(towers, num_computing(exchange, here.num_started))

    def steps(elapsed_seconds: float) -> Generator[StepReport, None, None]:
        return steps_without_survival(
            state, losses, loader, towers, exchange, counts=counts, until=until, elapsed_seconds=elapsed_seconds
        )

    yield from SurvivingLoop(steps, state, loader, exchange, until).reports()


def steps_without_survival(
    state: TrainState,
    losses: LossFunction,
    loader: Loader,
    towers: Towers | None,
    exchange: Exchange,
    *,
    counts: CountFunction | None = None,
    until: End | None = None,
    elapsed_seconds: float = 0.0,
) -> Generator[StepReport, None, None]:
    """Do what `train_steps` does, but raise PeerLostError where a worker is lost, and leave newcomers to the caller.

    The clock of the loop, which may have begun before, stands at `elapsed_seconds`.
    """
    step = bind_loop(state, towers, exchange)
    check_data(loader, join())
    join().group.agree("where the training ends (until)", None if until is None else repr(until))
    now = Progress(state.step, loader.position, loader.epoch_size, elapsed_seconds)
    course = Course(loader, step.towers, until, now, owns_towers=isinstance(step, BoundStep))
    if isinstance(step, ServedStep):
        step.serve(loader, elapsed_seconds)
        yield from served_reports(step, losses, counts, loader, course)
    else:
        step.start(elapsed_seconds)
        yield from _reports(step, losses, counts, course)


def bind_loop(
    state: TrainState, towers: Towers | None = None, exchange: Exchange | None = None
) -> BoundStep | ServedStep:
    """Return the step that `train_steps` makes; it is made at the first call, by all workers together."""
    if is_served(exchange) and join().num_workers > 1:
        return bind_served(state, towers, cast(ServedExchange, exchange))
    return bind(state, towers, exchange)


def probe_memory(
    state: TrainState,
    losses: LossFunction,
    batch: Batch,
    towers: Towers | None = None,
    exchange: Exchange | None = None,
    *,
    counts: CountFunction | None = None,
    hint: str = "lower the batch size, split the batch over more towers, or make the images smaller",
) -> int:
    """Compute the losses and gradients of a batch, and forget them: a run that lacks memory ends before its first step.

    Nothing of the state changes, nor do random streams and the position of a loader. All workers call it together.
    The arguments are those of `train_step`; `batch` is this worker's part of the largest batch that there will be,
    whatever is on its images. Where the memory is not enough, it raises an InputError with the hint.

    Returns:
        The most bytes in use: on an accelerator during this call, on a CPU since the process began.
    """
    step, device = bind_loop(state, towers, exchange), join().device
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    with lack_of_memory_told(describe_batch(batch, step.towers), hint):
        step.rehearse(losses, batch, counts)
    return peak_bytes(device)


def train(
    state: TrainState,
    losses: LossFunction,
    loader: Loader,
    towers: Towers | None = None,
    exchange: Exchange | None = None,
    *,
    counts: CountFunction | None = None,
    until: End | None = None,
    hooks: Sequence[Hook] = (),
) -> StepReport | None:
    """Train to the end, calling each hook with each report in order; returns the last report, None without a step."""
    report = None
    for report in train_steps(state, losses, loader, towers, exchange, counts=counts, until=until):
        for hook in hooks:
            hook(report)
    return report


def _batches(course: Course, loader: Loader) -> Generator[Batch, None, None]:
    with stop_on_interrupt(course.worker.pulse):
        for batch in course.batches():
            yield batch
            # A resume or a rollback in the loop body has set the position, which is to stay.
            if course.is_current() and loader.position != batch.position + batch.batch_size:
                loader.commit(batch)
            report = loader.last_report
            if report is None:  # no step was made from it, in which workers could agree to stop
                now = Progress(course.now.step + 1, batch.position + batch.batch_size, batch.epoch_size)
                is_stopped = course.worker.num_workers == 1 and course.worker.pulse.stop_requested is not None
            else:
                now, is_stopped = report.progress, report.stop_requested
            if course.ends_with(now, is_stopped=is_stopped):
                return


def _reports(
    step: BoundStep, losses: LossFunction, counts: CountFunction | None, course: Course
) -> Generator[StepReport, None, None]:
    with stop_on_interrupt(course.worker.pulse):
        if step.runs_ahead:
            yield from _reports_read_late(step, losses, counts, course)
        else:
            for batch in course.batches():
                report = step(losses, batch, counts)
                yield report
                if course.ends_with(report.progress, is_stopped=report.stop_requested):
                    break
        step.compare()


def _reports_read_late(
    step: BoundStep, losses: LossFunction, counts: CountFunction | None, course: Course
) -> Generator[StepReport, None, None]:
    """Yield the report of each attempt while the one after it is computed.

    An accelerator works through what the host enqueues, and stands still while the host waits for a number of it. So
    attempt k is begun, its towers and its exchange, on the assumption that update k - 1 is good; then the host reads
    what has become of k - 1, which is computed by then; and then it enqueues update k, which the device holds back by
    itself where attempt k is not finite. The state in the loop body is the one after the attempt that is reported.

    Where the assumption was wrong nothing is lost but time: attempt k - 1 has changed nothing, and is made again as one
    that is read at once; and attempt k is begun anew, with the same seeds, to the same bits. So it is where the loop
    body has changed what attempt k was computed with.
    """
    ahead: PendingUpdate | None = None
    try:
        for batch in _batches_or_error(course):
            pending = _begin(step, losses, counts, batch, ahead)
            if ahead is not None:
                with uninterrupted():
                    update, ahead = ahead, None
                    report = step.complete(update)
                report = report or step(losses, update.batch, counts)
                yield report
                if course.ends_with(report.progress, is_stopped=report.stop_requested):
                    return
                step.resume()
            if isinstance(batch, Exception):
                raise batch
            if not course.is_current():
                continue
            if isinstance(pending, Exception):
                raise pending
            if step.is_stale(pending):
                del pending  # in whose place the next one comes
                pending = step.begin(losses, batch, counts)
            if step.can_enqueue(pending) and not course.may_end_with(batch):
                with uninterrupted():
                    ahead = step.enqueue(pending)
                del pending  # its gradients make room for the next ones
                continue
            report = step.finish(pending, losses, counts)
            del pending
            yield report
            if course.ends_with(report.progress, is_stopped=report.stop_requested):
                return
            step.resume()
        if ahead is not None:
            with uninterrupted():
                update, ahead = ahead, None
                report = step.complete(update)
            yield report or step(losses, update.batch, counts)
    finally:
        if ahead is not None:  # interrupted while an update is under way
            step.complete(ahead)


def _batches_or_error(course: Course) -> Iterator[Batch | Exception]:
    """Yield the batches, and in place of one the error with which they end."""
    try:
        yield from course.batches()
    except Exception as error:
        yield error


def _begin(
    step: BoundStep,
    losses: LossFunction,
    counts: CountFunction | None,
    batch: Batch | Exception,
    ahead: PendingUpdate | None,
) -> PendingAttempt | Exception:
    """Begin an attempt. Its error, or its batch's, is kept while another one is ahead, whose report comes first."""
    try:
        if isinstance(batch, Exception):
            raise batch
        return step.begin(losses, batch, counts, is_after=ahead is not None)
    except Exception as error:
        if ahead is None:
            raise
        return error


def _check(loader: Loader, until: End | None) -> None:
    check_type("loader", loader, Loader, expected="ls.data.Loader", hint="write ls.data.Loader(reader, batch_size=64)")
    check_type("until", until, (Steps, Epochs, Hours, NoneType), expected="an end, or None", hint="write ls.Steps(500)")


def every(interval: Interval | str | int, hook: Hook, *, start: Progress | None = None) -> Hook:
    """Call a hook only when a whole multiple of an interval has passed since the report before.

    Every worker calls it at the same step, whatever the unit: the clock is the chief's.

    Args:
        interval: an `Interval`, its text ("20 steps", "600 s", "1 epochs"), or a number of steps; 0 is never.
        hook: what to call.
        start: where the run resumed, so that nothing is called twice; its beginning by default.
    """
    if not isinstance(interval, Interval):
        interval = Interval.parse(interval) if isinstance(interval, str) else Interval(interval)
    before = start or Progress(0, 0, 0)

    def call_when_due(report: StepReport) -> None:
        nonlocal before
        due = interval.passed(before, report.progress)
        before = report.progress
        if due:
            hook(report)

    return call_when_due
