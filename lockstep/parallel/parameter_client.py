"""The end of the parameter server that computes: it fetches parameters and leases, and sends gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lockstep.parallel.frames import Frames
from lockstep.parallel.served_connections import lost, reach
from lockstep.parallel.served_memory import Block, MemoryPlan, ServedMemory, agreed_layouts
from lockstep.parallel.tree import PartialSum
from lockstep.tensor_lists import copy_all
from lockstep.workers.group import JSON
from lockstep.workers.rank import Worker

Result = TypeVar("Result")


class Published(NamedTuple):
    """What a worker is told when it asks for work."""

    version: int
    is_new: bool
    """The worker did not have this version; its tensors are copied."""
    message: JSON
    """What was published with the version, where it is new."""
    slice: int | None
    """The first position of the slice to compute; None where the worker is only told of a version, or the end."""
    is_over: bool
    end: JSON
    """What the chief says at the end."""


class Client:
    """A worker that computes for the chief. All workers make it, or the chief's `Server`, together.

    Args:
        worker: this one.
        gradients: tensors like those of a gradient, as on the chief.
        published: tensors like those that are published, as on the chief.

    Raises:
        WorkerError: this worker has other tensors than the chief, or a worker does not reach the chief.
    """

    def __init__(self, worker: Worker, gradients: Sequence[Tensor], published: Sequence[Tensor]) -> None:
        self._worker = worker
        layouts = agreed_layouts(worker, gradients, published)
        worker.group.gather(worker.host)
        place = worker.group.broadcast(None)
        connection, descriptor = reach(worker, place)
        self._frames = Frames(connection, worker.group.check_peers)
        self._is_here = descriptor is not None
        """On the chief's host: tensors pass through its memory, else through memory of this worker alone."""
        if descriptor is None:
            self._memory = ServedMemory(torch.zeros(1), *([Block.alone(layout)] for layout in layouts))
        else:
            self._memory = MemoryPlan(*layouts, *place["blocks"]).map(descriptor)
            os.close(descriptor)
        self._room = 0
        """The block for the gradient of the last lease."""

    def fetch(self, into: Sequence[Tensor]) -> Published:
        """Wait for a lease, and for the newest version, which is copied into these tensors where it is new.

        Raises:
            PeerLostError: the chief is gone, or a worker is known to be.
        """
        with self._worker.pulse.waiting():
            return self._call(lambda: self._fetch(into))

    def send(self, slice_: int, version: int, partial: PartialSum, message: JSON = None) -> None:
        """Send the gradient of a slice that was leased, and a message with it.

        Raises:
            PeerLostError: the chief is gone, or a worker is known to be.
        """
        numbers = partial.numbers if isinstance(partial.numbers, list) else partial.numbers.tolist()
        block = self._memory.gradients[self._room]
        with torch.no_grad():
            copy_all(block.tensors, partial.tensors)
        request = {"gradient": [slice_, version, numbers], "message": message}
        self._call(lambda: self._frames.send(request, None if self._is_here else block.bytes))

    def is_late(self, version: int) -> bool:
        """Whether a gradient on the parameters of a version would be dropped; a round trip from another host.

        Raises:
            PeerLostError: the chief is gone, or a worker is known to be.
        """
        oldest = int(self._memory.oldest) if self._is_here else self._call(self._ask_oldest)
        return version < oldest

    def close(self) -> None:
        """End the connection; a slice that this worker still has goes to others."""
        self._frames.shut_down()
        self._frames.close()

    def _fetch(self, into: Sequence[Tensor]) -> Published:
        self._frames.send({"fetch": True})
        answer = self._frames.receive()
        end = answer["end"]
        is_new = "published" in answer
        if is_new:
            block = self._memory.published[answer["published"] if self._is_here else 0]
            if not self._is_here:
                self._frames.receive_into(block.bytes)
            with torch.no_grad():
                copy_all(list(into), block.tensors)
        if self._is_here:
            self._room = answer.get("gradient", 0)
        last = end[0] if end else None
        return Published(answer["version"], is_new, answer.get("message"), answer["slice"], bool(end), last)

    def _ask_oldest(self) -> int:
        self._frames.send({"oldest": True})
        return int(self._frames.receive()["oldest"])

    def _call(self, function: Callable[[], Result]) -> Result:
        """Raise the end of the connection as what it is, once the cause is known."""
        try:
            return function()
        except ConnectionError as error:
            said = str(error).lower()
        raise lost(self._worker, "the chief", said)
