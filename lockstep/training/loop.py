"""The training loop: as a generator of batches, of reports, or with hooks.

A step commits its batch to the loader that the batch comes from: the loader moves its position, within the same
uninterrupted block as the update, and keeps the report. `batches` reads that report to know whether a stop was
requested, and commits a batch itself if no step was made from it. So `for batch in ls.batches(loader):` needs no line
of its own for this, and nothing is written to a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from types import NoneType
from typing import TYPE_CHECKING

from lockstep.checks import check_type
from lockstep.data.loader import Loader
from lockstep.errors import InputError
from lockstep.parallel.exchange import Exchange
from lockstep.parallel.towers import Towers
from lockstep.parallel.tree import assign_towers
from lockstep.progress import End, Epochs, Hours, Interval, Progress, Steps
from lockstep.screen import log
from lockstep.training.preflight import check_data
from lockstep.training.state import TrainState
from lockstep.training.step import bind
from lockstep.types import Batch, StepReport
from lockstep.workers.rank import join
from lockstep.workers.signals import enter_body, log_stop, stop_on_interrupt

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
    return _batches(loader, towers, until, now)


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

    Ends when `until` is reached (never, if None), or after the step at which some worker was asked to stop. Where
    nothing is left to do, it says so and yields nothing. See `train_step` for the arguments and what is raised.

    In the main thread of a script that handles Ctrl-C as Python does, the first Ctrl-C asks to stop after the step, and
    so does what is trained after that; the second raises KeyboardInterrupt. See `train_step` for where it is raised.
    """
    _check(loader, until)
    step = bind(state, towers, exchange)
    step.start()
    check_data(loader, join())
    start = Progress(state.step, loader.position, loader.epoch_size)
    for batch in _batches(loader, step.towers, until, start):
        yield step(losses, batch, counts)


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


def _batches(loader: Loader, towers: Towers | None, until: End | None, now: Progress) -> Iterator[Batch]:
    worker = join()
    towers = towers or Towers(worker.num_workers)
    towers.check(loader.batch_size, worker.num_workers)
    if until and until.reached(now, loader.batch_size):
        if not now.position:
            raise _no_batch_fits(until, loader)
        if worker.is_chief:
            log.info("nothing to do: the run is at step %d (epoch %.2f), its end is %s", now.step, now.epochs, until)
        return
    mine = assign_towers(towers.count, worker.num_workers)[worker.rank]
    worker.pulse.at(now.step, "data")

    def is_past_the_end(position: int) -> bool:
        # Asked for the next batch, which is not where the last one ended if some in between are skipped.
        return until is not None and until.reached(now._replace(position=position), loader.batch_size)

    with stop_on_interrupt(worker.pulse):
        for batch in loader.batches(mine, towers.count, worker.device, stop=is_past_the_end):
            worker.pulse.at(now.step, "loop body")
            enter_body()
            num_loads = loader.num_loads
            yield batch
            # A resume or a rollback in the loop body has set the position, which is to stay.
            if loader.num_loads == num_loads and loader.position != batch.position + batch.batch_size:
                loader.commit(batch)
            report = loader.last_report
            if report is None:  # no step was made from it, in which workers could agree to stop
                now = Progress(now.step + 1, batch.position + batch.batch_size, batch.epoch_size)
                is_stopped = worker.num_workers == 1 and worker.pulse.stop_requested is not None
            else:
                now, is_stopped = report.progress, report.stop_requested
            if until and until.reached(now, loader.batch_size):
                break
            if is_stopped:
                log_stop(worker.pulse, now.step)
                break
            worker.pulse.at(now.step, "data")
    worker.pulse.at(now.step, "script")


def _no_batch_fits(until: End, loader: Loader) -> InputError:
    return InputError(
        "The run would end before its first step: no full batch fits.",
        given=f"an end after {until}, batches of {loader.batch_size}, {loader.epoch_size} examples in an epoch",
        expected="an end that one batch reaches",
        hint="raise the end, or lower the batch size"
        if loader.epoch_size
        else "give the loader an epoch_size, or an end in steps: its stream has no epochs",
    )


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
