"""Loader processes, which prefetch batches and pass them to the trainer in shared memory.

They are forked from the worker when the first batch is asked for. A fork takes milliseconds and shares the reader with
its indices and memory maps; a forkserver or spawn would need a reader that can be pickled, run the user's script again
and import torch again. A worker has threads and perhaps a GPU, so the child does nothing that a fork can break: it
touches no device, computes in one thread, and loads no library. One danger remains: a lock of torch that another thread
holds at the fork stays locked in the child. So no other thread may compute while the first batch is asked for; the
towers' own threads are idle then, and one that copies the batches of another loop to a device does nothing else.

Why not torch's `DataLoader`: it draws from the caller's random numbers, installs a SIGCHLD handler that raises in the
middle of whatever the trainer does, rebuilds a reader's error as another class, and fills /dev/shm, which containers
keep small.

A batch travels as one memfd: nothing is left behind when a process dies, and its memory is freed with its last tensor.
Each process has a pipe of its own and no lock is shared, so killing one is always safe.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import mmap
import multiprocessing.process
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle, islice, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Generic

import torch

from lockstep.data.prefetch import LoaderStatus, StallTimeout
from lockstep.data.shared_memory import ReceivedMemories, SentMemories
from lockstep.errors import LockstepError, WorkerError
from lockstep.listing import shorten
from lockstep.owner import process_fields
from lockstep.screen import Lines, log
from lockstep.spans import NO_ARGUMENTS, Arguments, Lane, Recorder, Span, add_source, record_into, remove_source
from lockstep.tracebacks import short_traceback
from lockstep.tracing import INPUT_STAGES, Job, Result, TimedResult, listen, measure_stages, timed
from lockstep.workers.connections import receive_descriptor, send_descriptor
from lockstep.workers.signals import NOTICES

_PR_SET_PDEATHSIG = 1
_MOST_NAME_BYTES = 1000
_MOST_STAGES = 8192
"""Stages that a process keeps of a trace; of more, the last ones."""
_ANSWER_SECONDS, _NEXT_PIECE_SECONDS = 1.0, 0.1
_PIPE_BYTES = 1 << 16
_NO_STACK = {
    "T": "it is stopped (SIGSTOP)",
    "D": "it waits for the system, perhaps for a disk, and cannot be interrupted",
}


def read_in_processes(
    read: Callable[[Job], Result],
    jobs: Iterator[Job],
    num_processes: int,
    prefetch: int,
    names_of: Callable[[Job], Sequence[str]],
    stall_timeout: StallTimeout,
) -> Generator[TimedResult[Result], None, None]:
    """Yield the result of `read` for each job, in order.

    Job k is done by process k % num_processes; each process is up to `prefetch` jobs ahead. The processes live until
    the generator is closed, and die with the thread that asked for the first batch. `names_of` names the examples of a
    job, for messages.

    Raises:
        LockstepError: raised by `read`, as the same class.
        WorkerError: `read` raised something else, a loader process died, or a job takes longer than `stall_timeout`.
    """
    pool: list[_LoaderProcess[Job, Result]] = []
    try:
        for number in range(num_processes):
            pool.append(_LoaderProcess(number, read, names_of, stall_timeout))
        for process, job in zip(cycle(pool), islice(jobs, num_processes * prefetch), strict=False):
            process.ask(job)
        for process, following in pairwise(cycle(pool)):
            if not process.asked:
                break
            queue_fill = sum(each.num_ready for each in pool) / (num_processes * prefetch)
            answer = process.answer(pool)
            for job in islice(jobs, 1):
                process.ask(job)
            yield answer._replace(queue_fill=queue_fill, next_is_ready=following.has_result)
    finally:
        for process in pool:
            process.end()


class _LoaderProcess(Generic[Job, Result]):
    """The trainer's end of one loader process."""

    def __init__(
        self,
        number: int,
        read: Callable[[Job], Result],
        names_of: Callable[[Job], Sequence[str]],
        stall_timeout: StallTimeout,
    ) -> None:
        self._owner = os.getpid()
        context = get_context("fork")
        self.asked: deque[Job] = deque()
        self._names_of, self._stall_timeout = names_of, stall_timeout
        self._notes = _Notes.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Notes)))
        self._num_taken = 0
        self._memories = ReceivedMemories()
        self._pipe, theirs = context.Pipe()
        self._stacks, their_stacks = context.Pipe(duplex=False)
        # Looked up before the fork: the child must not wait for the dynamic linker's lock.
        prctl = ctypes.CDLL(None).prctl
        self._process = context.Process(
            target=_serve,
            args=(theirs, their_stacks, read, self._notes, os.getpid(), prctl),
            name=f"loader process {number}",
            daemon=True,
        )
        # Terminals and schedulers signal every process of a run, but the trainer still needs its last batches when it
        # stops. The child is born with these signals blocked, and keeps them so.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *NOTICES})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # At exit multiprocessing would send SIGTERM, and wait.
        atexit.register(self.end)
        # These ends are now open in the child alone, so its death closes the pipe.
        theirs.close()
        their_stacks.close()
        add_source(self)

    def ask(self, job: Job) -> None:
        try:
            self._pipe.send((job, self._memories.unused()))
        except ConnectionError as error:
            raise self._lost(*self._unfinished) from error
        self.asked.append(job)

    @property
    def num_ready(self) -> int:
        return self._notes.num_finished - self._num_taken

    @property
    def _unfinished(self) -> list[Job]:
        """The oldest job whose result is not finished, if there is one: the process is at it."""
        return [*islice(self.asked, self.num_ready, self.num_ready + 1)]

    def has_result(self) -> bool:
        """Whether the oldest job asked for is done, and has not failed."""
        return self.num_ready > 0

    def answer(self, pool: Sequence[_LoaderProcess[Job, Result]]) -> TimedResult[Result]:
        """Wait for the result of the oldest job asked for, or for the death of any process of the pool."""
        ends: list[Connection | int] = [self._pipe, *(process._process.sentinel for process in pool)]
        ready = self._stall_timeout.wait(partial(wait, ends), self._status)
        for process in pool:
            if process._process.sentinel in ready:
                raise process._lost(*process._unfinished)
        try:
            answer, seconds = self._pipe.recv()
            if isinstance(answer, _Failure):
                raise answer.raised_in(self._process.name)
            result = self._memories.unpacked(answer, partial(receive_descriptor, self._pipe))
        except (EOFError, OSError) as error:  # It died before or while it was sending.
            raise self._lost(self.asked[0]) from error
        self.asked.popleft()
        self._num_taken += 1
        return TimedResult(result, seconds)

    def end(self) -> None:
        """Kill the process, once: it holds nothing that could be lost."""
        if self._pipe.closed or os.getpid() != self._owner:  # a child that the trainer's own code has forked
            return
        atexit.unregister(self.end)
        remove_source(self)
        self._process.kill()
        self._process.join(self._stall_timeout.end_seconds)
        if self._process.exitcode is None:
            log.warning("%s cannot be killed, and is left behind: it waits for the system, perhaps a disk", self._name)
            # At exit multiprocessing would wait for it, however long.
            multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        else:
            self._process.close()
        self._pipe.close()
        self._stacks.close()

    def record(self, *, on: bool) -> None:
        self._notes.is_recorded = on

    def recorded(self) -> Iterator[Span]:
        lane = (self._name, 0)
        for each in self._notes.stages:
            if each.began < each.ended:  # it has been written, and not just a half of it
                yield Span(lane, INPUT_STAGES[each.stage], each.began, each.ended)

    @property
    def _name(self) -> str:
        return f"{self._process.name} (pid {self._process.pid})"

    def _status(self) -> LoaderStatus:
        job = self.asked[0]
        example = self._notes.reading or f"one of {shorten(self._names_of(job))}"
        return LoaderStatus(self._name, str(job), example, self._stack())

    def _stack(self) -> str:
        """Ask the process by a signal for its stack; else say why it cannot answer."""
        pid = self._process.pid or 0
        os.kill(pid, signal.SIGUSR2)
        said, seconds = b"", _ANSWER_SECONDS
        while self._stacks.poll(seconds) and (piece := os.read(self._stacks.fileno(), _PIPE_BYTES)):
            said, seconds = said + piece, _NEXT_PIECE_SECONDS
        if said:
            return said.decode(errors="replace").rstrip()
        state = process_fields(pid)[:1]
        return _NO_STACK.get("".join(state), "it does not answer, so its stack is not known")

    def _lost(self, *job: Job) -> WorkerError:
        self._process.join()
        code = self._process.exitcode or 0
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return WorkerError(
            f"{self._name.capitalize()} {end}.",
            given=" ".join(["it was reading", *map(str, job)]) if job else "it was waiting for work",
            expected="loader processes that live as long as the run",
            hint="when the system's log shows the out-of-memory killer: fewer loader processes, or a smaller batch",
        )


class _Stage(ctypes.Structure):
    """A stage of a job, as a trace shows it."""

    stage: int
    began: float
    ended: float
    _fields_ = (("stage", ctypes.c_uint8), ("began", ctypes.c_double), ("ended", ctypes.c_double))


class _Notes(ctypes.Structure):
    """Notes of a loader process in shared memory: its trainer can read them even if the process hangs."""

    num_finished: int
    """Jobs that are done; the trainer ends with the first that fails, and none from there on is counted."""
    name: bytes
    is_recorded: bool
    stages: ctypes.Array[_Stage]
    """What it has done while traces were on: each takes the place of the oldest."""
    _fields_ = (
        ("num_finished", ctypes.c_int64),
        ("name", ctypes.c_char * _MOST_NAME_BYTES),
        ("is_recorded", ctypes.c_bool),
        ("stages", _Stage * _MOST_STAGES),
    )

    @property
    def reading(self) -> str:
        """The example that it reads, if the reader has named it."""
        return self.name.decode(errors="replace")

    @reading.setter
    def reading(self, name: str) -> None:
        self.name = name.encode(errors="backslashreplace")[-_MOST_NAME_BYTES:]


class _NotedRecorder(Recorder):
    """Writes the stages of a loader process into its notes."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self._stages, self._places = notes.stages, cycle(range(_MOST_STAGES))

    def add(self, lane: Lane, name: str, began: float, ended: float, arguments: Arguments = NO_ARGUMENTS) -> None:
        if name in INPUT_STAGES:
            stage = self._stages[next(self._places)]
            stage.ended = 0.0  # it is half written, should it be read now
            stage.stage, stage.began, stage.ended = INPUT_STAGES.index(name), began, ended


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error in a loader process."""

    error: LockstepError | None
    """None for an error of another library."""
    trace: str

    def raised_in(self, name: str) -> LockstepError:
        error = self.error or WorkerError(
            f"{name.capitalize()} failed.",
            given=self.trace.splitlines()[-1],
            expected="a reader and augmentations that raise nothing but errors of Lockstep",
            hint="the traceback below shows where; num_processes=0 runs the same in the trainer, under a debugger",
        )
        error.add_note(Lines(f"In {name}:\n{self.trace}"))
        return error


def _serve(
    pipe: Connection,
    stacks: Connection,
    read: Callable[[Any], Any],
    notes: _Notes,
    trainer_pid: int,
    prctl: Callable[[int, int], int],
) -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer_pid:  # The trainer died before the death signal was set.
        return
    faulthandler.register(signal.SIGUSR2, file=stacks.fileno(), all_threads=False)
    listen(partial(setattr, notes, "reading"))
    torch.set_num_threads(1)
    memories, recorder = SentMemories(), _NotedRecorder(notes)
    has_failed = False
    for number in count(1):
        job, unused = pipe.recv()
        memories.use_again(unused)
        notes.reading = ""
        record_into(recorder if notes.is_recorded else None)
        try:
            with measure_stages() as seconds:
                result = read(job)
                with timed("collate"):
                    parcel, descriptor = memories.packed(result)
            # Counted before the trainer can take the result: else `num_ready` could be negative.
            if not has_failed:
                notes.num_finished = number
            try:
                _send(pipe, (parcel, seconds))
                if descriptor is not None:
                    send_descriptor(pipe, descriptor)
            finally:
                if descriptor is not None:
                    os.close(descriptor)
        except Exception as error:
            has_failed = True
            # What a LockstepError says of itself is told anyway: its traceback is that of the cause.
            cause = error.__cause__ if isinstance(error, LockstepError) else None
            _send(pipe, (_Failure(_portable(error), short_traceback(cause or error)), {}))


def _send(pipe: Connection, message: object) -> None:
    # Connection.send would have torch pass tensors within objects through files, which a kill leaves behind.
    pipe.send_bytes(pickle.dumps(message))


def _portable(error: Exception) -> LockstepError | None:
    """Return a LockstepError that the trainer can raise again; None for others, whose traceback says all."""
    if not isinstance(error, LockstepError):
        return None
    try:
        copy(error)
    except Exception:  # A user's subclass with other arguments: raised as the class of ours that it is.
        ours = next(each for each in type(error).__mro__ if each.__module__ == LockstepError.__module__)
        plain: LockstepError = ours(error.what, given=error.given, expected=error.expected, hint=error.hint)
        return plain
    return error
