"""Streams of a device that are late: what is launched on one happens only when somebody waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("meta")
"""Where `FakeDevice` takes tensors to; they stay on the CPU."""
FIRST_DEVICE = torch.device("meta", 0)
"""Which a new thread is on until it sets another one."""
_lock = threading.RLock()


class FakeStream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.work: deque[Callable[[], object]] = deque()

    def launch(self, work: Callable[[], object]) -> None:
        self.work.append(work)

    def wait_event(self, event: FakeEvent) -> None:
        self.launch(event.synchronize)

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class FakeEvent:
    def __init__(self) -> None:
        self.has_happened = False

    def record(self, stream: FakeStream) -> None:
        self.stream, self.has_happened = stream, False
        stream.launch(lambda: setattr(self, "has_happened", True))

    def synchronize(self) -> None:
        with _lock:
            while not self.has_happened:
                self.stream.work.popleft()()


class FakeDevice:
    """A device with such streams in place of torch's: copies that do not block, and those of lists, are late."""

    Stream, Event = FakeStream, FakeEvent

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compute = FakeStream()
        """The stream that is current in each thread but for blocks of `stream`."""
        self.pinned_by: list[str] = []
        """The names of the threads that have pinned a tensor."""
        self.contexts: set[torch.device] = set()
        """The devices that threads have gone back to at the end of a block of `stream`: each would take memory."""
        self.recorded: list[tuple[int, FakeStream]] = []
        """Addresses of tensors, and the streams that the allocator was told of."""
        self._thread = threading.local()
        self._copy = Tensor.copy_
        patched: dict[str, Any] = {"pin_memory": self._pinned, "to": self._to(Tensor.to), "copy_": self._late_copy}
        patched["record_stream"] = lambda tensor, stream: self.recorded.append((tensor.data_ptr(), stream))
        for name, function in patched.items():
            # A function of Python's own is bound to the tensor; a bound method is not.
            monkeypatch.setattr(Tensor, name, lambda *args, _function=function, **named: _function(*args, **named))
        monkeypatch.setattr(torch, "get_device_module", lambda device: self)
        foreach = torch._foreach_copy_
        monkeypatch.setattr(
            torch, "_foreach_copy_", lambda *lists: self.current_stream().launch(lambda: foreach(*lists))
        )

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        current: FakeStream = getattr(self._thread, "current", self.compute)
        return current

    def set_device(self, device: torch.device) -> None:
        self._thread.device = device

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """As torch's, this goes back at its end to the stream, and so to the device, of before."""
        before, self._thread.current = self.current_stream(), stream
        yield
        self._thread.current = before
        self.contexts.add(getattr(self._thread, "device", FIRST_DEVICE))

    def _pinned(self, tensor: Tensor) -> Tensor:
        self.pinned_by.append(threading.current_thread().name)
        return tensor.clone()

    def _to(self, to: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def moved(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
            if args[:1] != (DEVICE,):
                return to(tensor, *args, **named)
            assert named == {"non_blocking": True}
            return self._late_copy(torch.full_like(tensor, 77), tensor, non_blocking=True)

        return moved

    def _late_copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            self.current_stream().launch(lambda: self._copy(target, source))
            return target
        return self._copy(target, source)
