"""Saving while the run goes on: what a checkpoint holds is copied at once, and a thread writes the copies.

Tensors on the CPU are copied before anything else runs: what a loop body writes through `.data` or numpy right after a
save is counted nowhere, so a copy that is made beside it could not be trusted. Tensors on an accelerator are cloned
there, by a few kernels on the stream that computes. So the clone is what they are between two steps, and nobody waits:
the thread that writes brings it to the host, on a stream of its own.

An error of the thread is raised by whoever asks next: the next save, or a step. A writer has at most one checkpoint in
flight: the next one waits for it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lockstep.checkpoints.encoding import JSON, Tensors, check_saveable
from lockstep.checkpoints.store import BeforeCommit, Store
from lockstep.screen import log
from lockstep.spans import span
from lockstep.tensors import reading_waits
from lockstep.workers.pulse import of_this_process

Place = tuple[str, str]
"""Section and name of a tensor."""
_ALIGNMENT = 64
_PINNED_BYTES = 1 << 26


class Copies:
    """Copies of all tensors of a checkpoint as they are now: on the CPU, or on their accelerator until `on_host`."""

    def __init__(self, tensors: Tensors) -> None:
        places = {(section, name): t.detach() for section, members in tensors.items() for name, t in members.items()}
        devices = {tensor.device for tensor in places.values() if reading_waits(tensor.device)}
        self._names = {section: list(members) for section, members in tensors.items()}
        self._clones: list[Clones] = []
        for device in devices:
            there = {place: tensor for place, tensor in places.items() if tensor.device == device}
            if clones := _cloned(there, device):
                self._clones.append(clones)
                places = {place: tensor for place, tensor in places.items() if place not in there}
        self._copies = {place: tensor.to("cpu", copy=True) for place, tensor in places.items()}

    def on_host(self) -> dict[str, dict[str, Tensor]]:
        """Return all copies by section and name, those of accelerators once they have arrived; called once."""
        while self._clones:
            self._copies |= self._clones.pop().on_host()
        return {section: {n: self._copies[section, n] for n in names} for section, names in self._names.items()}


class Clones:
    """Clones of tensors of one accelerator, side by side in one memory there; the tensors may change afterwards.

    Raises:
        torch.OutOfMemoryError: the device has no room for them.
    """

    def __init__(self, tensors: Mapping[Place, Tensor]) -> None:
        self._layouts: dict[Place, _Layout] = {}
        size = 0
        for place, tensor in tensors.items():
            self._layouts[place] = _Layout.of(tensor, size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        device = next(iter(tensors.values())).device
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        # Kernels for many tensors take one dtype.
        for dtype in {tensor.dtype for tensor in tensors.values()}:
            places = [place for place, tensor in tensors.items() if tensor.dtype == dtype]
            clones = [self._layouts[place].within(self._memory) for place in places]
            torch._foreach_copy_(clones, [tensors[place] for place in places])
        self._module = torch.get_device_module(device)
        self._made = self._module.Event()
        self._made.record(self._module.current_stream(device))

    def on_host(self) -> dict[Place, Tensor]:
        """Return copies of the clones on the CPU, once they have arrived; the thread is then on their device."""
        device = self._memory.device
        self._module.set_device(device)  # a new thread is on the first one, where a context would take half a GB
        stream, come = _copy_stream(device), self._module.Event()
        stream.wait_event(self._made)
        memory = torch.empty(self._memory.shape, dtype=torch.uint8)
        # From pinned memory the copies to the host go on beside kernels; a whole state would take much of it, for good.
        pinned = torch.empty(min(len(memory), _PINNED_BYTES), dtype=torch.uint8, pin_memory=device.type != "cpu")
        with self._module.stream(stream):
            for there, here in zip(*(torch.split(m, _PINNED_BYTES) for m in (self._memory, memory)), strict=True):
                pinned[: len(here)].copy_(there, non_blocking=True)
                come.record(stream)
                come.synchronize()
                here.copy_(pinned[: len(here)])
        return {place: layout.within(memory) for place, layout in self._layouts.items()}


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of a tensor within a memory of bytes."""

    start: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, start: int) -> _Layout:
        """Return the layout of a dense copy of a tensor; the strides are the tensor's own if it is dense itself."""
        return cls(start, tensor.shape, torch.empty_like(tensor, device="meta").stride(), tensor.dtype)

    def within(self, memory: Tensor) -> Tensor:
        end = self.start + math.prod(self.shape) * self.dtype.itemsize
        return memory[self.start : end].view(self.dtype).as_strided(self.shape, self.strides)


def _room(device: torch.device) -> float:
    """Bytes that no step so far has needed, the clones of earlier saves among them; a tenth may be in fragments."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):  # torch's module for a CPU, which knows only streams
        return math.inf
    (free, _), reserved = module.mem_get_info(device), module.memory_reserved(device)
    room: float = 0.9 * (free + reserved) - module.max_memory_allocated(device)
    return room


def _cloned(tensors: Mapping[Place, Tensor], device: torch.device) -> Clones | None:
    """Clone tensors, unless that took memory that the next step may need."""
    with suppress(torch.OutOfMemoryError):
        if sum(tensor.nbytes for tensor in tensors.values()) <= _room(device):
            return Clones(tensors)
    _tell_no_room(device)
    return None


@cache
def _tell_no_room(device: torch.device) -> None:
    log.warning("%s has no room for a copy of the state: each save waits until all of it is copied to the host", device)


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    """Return the stream of the copies to the host, which are not to wait for those of batches to the device."""
    stream: torch.Stream = torch.get_device_module(device).Stream(device)
    return stream


_in_flight: list[BackgroundWriter] = []
"""The writers of this process that have begun a checkpoint and have not been waited for: a read or another write of
any of them waits, whoever holds the writer."""


class BackgroundWriter:
    """Writes the checkpoints of one store in a thread.

    As long as a checkpoint is in flight, `check` is among `before_change`, functions that are called before a step
    changes anything.
    """

    def __init__(self, store: Store, before_change: list[Callable[[], None]] | None = None) -> None:
        self.store = store
        self._before_change = [] if before_change is None else before_change
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(
        self,
        step: int,
        tensors: Tensors,
        values: Mapping[str, JSON],
        scores: Mapping[str, float] | None = None,
        *,
        before_commit: BeforeCommit | None = None,
    ) -> None:
        """Have `Store.write` called with these arguments as they are now; they may change once this has returned.

        The thread calls `before_commit`.

        Raises:
            CheckpointError: a tensor cannot be saved, or the checkpoint before this one could not be written.
        """
        self.wait()
        check_saveable(tensors)
        with span("copy the state"):
            copies = Copies(tensors)
        thread = threading.Thread(
            target=self._write,
            args=(step, copies, deepcopy(values), dict(scores or {}), before_commit),
            name=f"checkpoint of step {step}",
        )
        thread.start()
        self._thread = thread
        _in_flight.append(self)
        self._before_change.append(self.check)

    def check(self) -> None:
        """Raise the error of the checkpoint in flight, if it could not be written."""
        if self._error is not None:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint in flight is on the disk."""
        if self._thread is None:
            return
        pulse = of_this_process()
        with pulse.during(pulse.step, "save"):
            self._thread.join()
            self._thread = None
            _in_flight.remove(self)
            self._before_change.remove(self.check)
            error, self._error = self._error, None
            if error is not None:
                raise error

    def _write(
        self,
        step: int,
        copies: Copies,
        values: Mapping[str, JSON],
        scores: Mapping[str, float],
        before_commit: BeforeCommit | None,
    ) -> None:
        try:
            with span("write checkpoint", lane=("checkpoint", 0)):
                self.store.write(step, copies.on_host(), values, scores, before_commit=before_commit)
        except BaseException as error:
            self._error = error
            # It is raised by whoever asks next; nobody may.
            log.error("the checkpoint of step %d is not written: %s", step, getattr(error, "what", error))


def wait_for_writers() -> None:
    """Wait until the checkpoints of all writers of this process are on the disk."""
    for writer in _in_flight.copy():
        writer.wait()
