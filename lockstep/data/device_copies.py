"""Batches on their way to a device: copied beside what it computes, on a stream of their own.

What loader processes or threads have ready is taken one batch ahead: a thread copies it to pinned memory, and from
there to the device, while the batch before it is computed on. Only what is ready is taken, so nothing waits for a batch
that is not due, and an error comes with its batch. What the trainer's own process reads is read and copied when due.

A batch is whole when it is used, since the stream that computes waits for the copies. Its memory on the device is not
used again before that stream is done with it: the allocator is told (`record_stream`), as another stream has allocated
it. Pinned memory is kept by torch until the copies from it are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.data.batch_reader import Fields, ReadRows
from lockstep.data.shared_memory import map_leaves
from lockstep.ragged import Ragged
from lockstep.spans import span
from lockstep.tracing import TimedResult, measure_stages, sum_seconds, timed

Finish = Callable[[Fields, Fields], Fields]
"""Does what is left to do to the fields of a batch on their device, given these and the same as they were before."""


def copied_ahead(
    source: Generator[TimedResult[ReadRows], None, None],
    device: torch.device,
    finish: Finish = lambda fields, here: fields,
) -> Generator[TimedResult[ReadRows], None, None]:
    """Yield what a source yields, with its tensors on a device, for the stream that is current there at that time.

    The device holds one batch more than is used, and computes what is left to `finish` beside what it computes of the
    batch before. Closing the generator closes the source and ends the thread.
    """
    with closing(source), ExitStack() as stack:
        thread: ThreadPoolExecutor | None = None
        ahead: Future[_Copy] | None = None
        while True:
            if ahead is not None:
                copy = ahead.result()
            else:
                read = next(source, None)
                if read is None:
                    return
                copy = _start_copy(read, device, finish)
            ahead = None
            if copy.rows.next_is_ready():
                thread = thread or stack.enter_context(_copying_thread(device))
                ahead = thread.submit(_start_copy, next(source), device, finish)
            yield copy.arrived(device)


def finished_here(
    source: Generator[TimedResult[ReadRows], None, None], finish: Finish
) -> Generator[TimedResult[ReadRows], None, None]:
    """Yield what a source yields, finished where it is; closes the source at the end."""
    with closing(source):
        for rows in source:
            fields = rows.result.fields
            with measure_stages() as seconds, timed("augment"):
                fields = finish(fields, fields)
            result = rows.result._replace(fields=fields)
            yield rows._replace(result=result, seconds=sum_seconds(rows.seconds, seconds))


class _Copy(NamedTuple):
    """Rows whose copies to a device are under way."""

    rows: TimedResult[ReadRows]
    tensors: list[Tensor | Ragged]
    event: torch.Event
    """Event that is recorded when they are on the device."""

    def arrived(self, device: torch.device) -> TimedResult[ReadRows]:
        """Return the rows, to be used on the current stream of this thread: it waits for them, the host does not."""
        stream = torch.get_device_module(device).current_stream(device)
        stream.wait_event(self.event)
        for tensor in self.tensors:
            tensor.record_stream(stream)
        return self.rows


def _start_copy(rows: TimedResult[ReadRows], device: torch.device, finish: Finish) -> _Copy:
    """Start copying the fields to the device, and finishing them; counts the seconds that this takes the host."""
    started = time.perf_counter()
    stream = _copy_stream(device)
    tensors: list[Tensor | Ragged] = []

    def copied(value: Tensor | Ragged) -> Tensor | Ragged:
        return value.pin_memory().to(device, non_blocking=True)

    # Not `with stream:`, which keeps in the stream what to go back to: it is entered by several threads.
    with span("copy to the device"), torch.get_device_module(device).stream(stream):
        fields = finish(map_leaves(rows.result.fields, (Tensor, Ragged), copied), rows.result.fields)
    map_leaves(fields, (Tensor, Ragged), tensors.append)
    event = stream.record_event()
    seconds = {**rows.seconds, "copy": time.perf_counter() - started}
    return _Copy(rows._replace(result=ReadRows(fields, rows.result.bad), seconds=seconds), tensors, event)


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    """Return the stream of all copies to a device: the allocator reuses memory within a stream alone."""
    stream: torch.Stream = torch.get_device_module(device).Stream(device)
    return stream


@contextmanager
def _copying_thread(device: torch.device) -> Iterator[ThreadPoolExecutor]:
    """Run a thread on the device whose copies of the host take one core, so that the others are left to the loader."""

    def begin() -> None:
        # A new thread is on the first device: what it did there would take half a GB of it, for each worker.
        torch.get_device_module(device).set_device(device)
        torch.set_num_threads(1)

    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(1, "lockstep-copy", initializer=begin) as thread:
        thread.submit(int).result()
        # torch applies the number that a thread sets for itself to threads that begin later, too.
        torch.set_num_threads(num_threads)
        yield thread
