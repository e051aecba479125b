"""Convert items to records in shards, written by several processes: what all converters share.

The processes are forked, so nothing need be pickled to reach them. Each has a pipe of its own and shares no lock, so
killing one is always safe. When the process that started them dies, their next send fails and they end too.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from lockstep.checks import Checked, NonNegativeInt, PositiveInt, check_type, check_value
from lockstep.convert.conversion_state import (
    ConversionState,
    Shard,
    SkippedItem,
    conversion_fingerprint,
    lock_shards,
    start_or_resume,
)
from lockstep.cores import usable_cores
from lockstep.durable import atomic_write
from lockstep.errors import DataError, InputError, LockstepError, WorkerError
from lockstep.records.shards import check_local
from lockstep.records.tfrecord import frame
from lockstep.screen import Lines, log
from lockstep.types import ProgressFunction

Item = TypeVar("Item")


@dataclass(frozen=True)
class Summary:
    """The result of a conversion; shards kept from an earlier start count too, but not in the seconds."""

    num_shards: int
    num_kept: int
    num_records: int
    num_bytes: int
    skipped: tuple[SkippedItem, ...]
    seconds: float

    def __add__(self, other: Summary) -> Summary:
        return Summary(*(getattr(self, name) + getattr(other, name) for name in Summary.__dataclass_fields__))


@dataclass(frozen=True)
class Settings(Checked):
    """Settings of a conversion that do not change the bytes of the shards."""

    num_processes: PositiveInt | None = None
    """Processes that convert; None: one for each usable core."""
    max_skipped: NonNegativeInt | None = None
    """Items that may be skipped; None: any number."""
    overwrite: bool = False
    """Overwrite the shards of another conversion."""
    progress: ProgressFunction | None = None
    """Called after each item with the numbers of items done and of all items."""


DEFAULT = Settings()


def convert(
    items: Sequence[Item],
    serialize: Callable[[Item], bytes | SkippedItem],
    output: Path,
    base: str,
    num_shards: int,
    *,
    options: Mapping[str, object] | None = None,
    settings: Settings = DEFAULT,
) -> Summary:
    """Write the records of all items to the files BASE-00000-of-00002, BASE-00001-of-00002 ... in the folder `output`.

    Shard i starts with item floor(i * items / shards), as in the TensorFlow reference's builders. The bytes do not
    depend on the number of processes, nor on how often they were stopped: the same call again keeps finished shards. A
    conversion is the same if the number of shards, the options and the `repr` of every item are. The hidden file
    .BASE.conversion.json holds their hash, and lists the skipped items.

    Args:
        items: handed to the processes by fork.
        serialize: makes the record of an item, or says why it is skipped. What it raises comes through.
        output: the folder, made if need be.
        base: the name before the number of a shard.
        num_shards: 1 up to the number of items.
        options: what else decides the bytes of the records, as values of JSON.
        settings: how the conversion runs.

    Raises:
        DataError: there are shards of another conversion; or more items were skipped than allowed, or all.
        WorkerError: a process died, or `serialize` raised something that is no error of Lockstep.
    """
    _check(len(items), output, base, num_shards)
    started = time.monotonic()
    with lock_shards(output, base):
        names = [shard_name(base, number, num_shards) for number in range(num_shards)]
        fingerprint = conversion_fingerprint(items, options or {}, num_shards)
        state = start_or_resume(output, base, names, fingerprint, overwrite=settings.overwrite)
        num_kept = len(state.finished)
        _write_missing(_Conversion(items, serialize, output, base, num_shards), state, settings)
    shards = [state.finished[number] for number in range(num_shards)]
    skipped = tuple(each for shard in shards for each in shard.skipped)
    num_records = sum(shard.num_records for shard in shards)
    if not num_records:
        raise _too_many(skipped, f"all {len(items)} items skipped", "one record or more")
    num_bytes = sum(shard.num_bytes for shard in shards)
    return Summary(num_shards, num_kept, num_records, num_bytes, skipped, time.monotonic() - started)


def shard_name(base: str, number: int, num_shards: int) -> str:
    """Format the name of a shard: "train-00003-of-00128"."""
    return f"{base}-{number:05d}-of-{num_shards:05d}"


class _Finished(NamedTuple):
    """The event that a shard is whole and in its place."""

    number: int
    shard: Shard


@dataclass(frozen=True)
class _Conversion:
    """The plan of a conversion: the items of each shard."""

    items: Sequence[object]
    serialize: Callable[..., bytes | SkippedItem]
    output: Path
    base: str
    num_shards: int

    def range_of(self, number: int) -> range:
        bounds = np.linspace(0, len(self.items), self.num_shards + 1).astype(int)
        return range(*bounds[number : number + 2].tolist())

    def write(self, number: int) -> Generator[SkippedItem | _Finished | None, None, None]:
        """Write a shard. Yields None or `SkippedItem` after each item, then `_Finished`."""
        path = self.output / shard_name(self.base, number, self.num_shards)
        num_records, skipped = 0, []
        with atomic_write(path, parents=True, failure=DataError) as file:
            for index in self.range_of(number):
                made = self.serialize(self.items[index])
                if isinstance(made, SkippedItem):
                    skipped.append(made)
                    yield made
                else:
                    file.write(frame(made))
                    num_records += 1
                    yield None
            num_bytes = file.tell()
        yield _Finished(number, Shard(num_records, num_bytes, tuple(skipped)))


def _write_missing(conversion: _Conversion, state: ConversionState, settings: Settings) -> None:
    num_items = len(conversion.items)
    skipped = [each for shard in state.finished.values() for each in shard.skipped]
    done = sum(len(conversion.range_of(number)) for number in state.finished)
    missing = [number for number in range(conversion.num_shards) if number not in state.finished]
    _check_skipped(skipped, settings.max_skipped)
    with closing(run_tasks(missing, conversion.write, settings.num_processes or usable_cores())) as events:
        for event in events:
            if isinstance(event, _Finished):
                state.add(*event)
                continue
            done += 1
            if event is not None:
                log.warning("Skipped %s: %s", event.name, event.reason)
                skipped.append(event)
                _check_skipped(skipped, settings.max_skipped)
            if settings.progress:
                settings.progress(done, num_items)


def _check(num_items: int, output: Path, base: str, num_shards: int) -> None:
    check_local(output)
    check_type("num_shards", num_shards, int, expected="a whole number", hint="give the number of files to write")
    check_value("num_shards", num_shards, PositiveInt)
    if num_items < num_shards:
        raise InputError(
            f"There are too few items for {num_shards} shards of {base}.",
            given=f"{num_items} items",
            expected="one item or more for each shard",
            hint="ask for fewer shards" if num_items else "check where the items come from",
        )


def _check_skipped(skipped: Sequence[SkippedItem], most: int | None) -> None:
    if most is not None and len(skipped) > most:
        raise _too_many(skipped, f"{len(skipped)} skipped", f"at most {most} skipped")


def _too_many(skipped: Sequence[SkippedItem], given: str, expected: str) -> DataError:
    last = skipped[-1]
    return DataError(
        f"Too many items cannot be converted, at last {last.name}.",
        given=f"{given}; {last.name}: {last.reason}",
        expected=expected,
        hint="repair them, leave them out, or allow more to be skipped: finished shards are kept",
    )


Task = TypeVar("Task")
Event = TypeVar("Event")
Work = Callable[[Task], Generator[Event, None, None]]

_SECONDS_TO_EXIT = 10.0
_SECONDS_BETWEEN_SIGNALS = 0.5


def run_tasks(tasks: Sequence[Task], work: Work[Task, Event], num_processes: int) -> Generator[Event, None, None]:
    """Run `work` on all tasks and yield its events, those of one task in order.

    Process k runs every `num_processes`th task from k on; with one process the caller runs them all. Closing the
    generator ends the processes and closes the generators that `work` has made in them.

    Raises:
        LockstepError: raised by `work`, as the same class.
        WorkerError: `work` raised something else, or a process died.
    """
    if min(num_processes, len(tasks)) <= 1:
        for task in tasks:
            yield from work(task)
        return
    pool: list[_Process[Task, Event]] = []
    try:
        for number in range(min(num_processes, len(tasks))):
            pool.append(_Process(tasks[number::num_processes], work, [each.pipe for each in pool]))
        while running := [process for process in pool if not process.finished]:
            ready = wait([process.pipe for process in running])
            for process in running:
                if process.pipe in ready:
                    yield from process.receive()
    finally:
        for process in pool:
            process.terminate()
        for process in pool:
            process.join()


class _Process(Generic[Task, Event]):
    """One process of the pool, seen from its parent."""

    def __init__(self, tasks: Sequence[Task], work: Work[Task, Event], inherited: Sequence[Connection]) -> None:
        context = get_context("fork")
        self.finished = False
        self.pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_serve, args=(theirs, [*inherited, self.pipe], tasks, work), name="converting process", daemon=True
        )
        # Until the child has handlers of its own, a signal must not run those of its parent.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # From now on the child alone has the sending end, so its death ends the pipe.
        theirs.close()

    def receive(self) -> Iterator[Event]:
        """Wait for the next message; yields its event, or nothing if the process says that all is done."""
        try:
            message: Event | _Failure | _Done = self.pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._died() from error
        if isinstance(message, _Failure):
            raise message.raised()
        if isinstance(message, _Done):
            self.finished = True
        else:
            yield message

    def terminate(self) -> None:
        """Ask the process to unwind, which deletes the file that it is writing."""
        self._process.terminate()

    def join(self) -> None:
        """Wait until the process has ended, and kill it if it takes too long.

        It is asked again meanwhile: a signal that comes just before a read that waits is not heard until the next one.
        """
        end = time.monotonic() + _SECONDS_TO_EXIT
        while self._process.is_alive() and time.monotonic() < end:
            self._process.terminate()
            self._process.join(_SECONDS_BETWEEN_SIGNALS)
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()

    def _died(self) -> WorkerError:
        self._process.join()
        code = self._process.exitcode or 0
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return WorkerError(
            f"A converting process (pid {self._process.pid}) {end}.",
            given="a process that ended before its shards were written",
            expected="processes that live until their work is done",
            hint="run the same command again, it goes on; with fewer processes if the system's log shows the "
            "out-of-memory killer",
        )


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception in a process, as it is sent to the parent."""

    error: LockstepError | None
    """None for any other exception: it need not survive pickling."""
    trace: str

    def raised(self) -> LockstepError:
        error = self.error or WorkerError(
            "A converting process failed.",
            given=self.trace.splitlines()[-1],
            expected="items that can be converted, or are skipped",
            hint="the traceback below shows where",
        )
        error.add_note(Lines(f"In a converting process:\n{self.trace}"))
        return error


class _Done:
    """The last message of a process that has run its tasks."""


def _serve(pipe: Connection, inherited: Sequence[Connection], tasks: Sequence[Task], work: Work[Task, Event]) -> None:
    for connection in inherited:
        connection.close()
    # A terminal sends Ctrl-C to every process; the parent decides, and asks the others by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    torch.set_num_threads(1)
    try:
        for task in tasks:
            with closing(work(task)) as events:
                for event in events:
                    pipe.send(event)
        pipe.send(_Done())
    except BrokenPipeError:
        return
    except Exception as error:
        pipe.send(_Failure(error if isinstance(error, LockstepError) else None, traceback.format_exc()))


def _exit(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # The next one must not break into the unwinding.
    raise SystemExit(128 + number)
