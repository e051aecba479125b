from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_calls import accelerator
from torch import nn

import lockstep as ls
from lockstep.errors import PeerLostError
from lockstep.tensors import Readback


class Event:
    """An event that passes when it has been asked often enough."""

    def __init__(self, num_queries: float) -> None:
        self.num_queries = num_queries

    def query(self) -> bool:
        self.num_queries -= 1
        return self.num_queries < 0


def read(event: Event, poll: Callable[[], None]) -> list[float]:
    readback = Readback(torch.tensor([1.0, 2.0], dtype=torch.float64))
    readback._event = event  # type: ignore[assignment]
    return readback.read(poll)


def test_numbers_are_those_of_the_moment() -> None:
    numbers = torch.tensor([1.0, 2.0], dtype=torch.float64)
    readback = Readback(numbers)
    numbers.zero_()
    assert readback.read() == [1.0, 2.0]


def test_what_is_asked_meanwhile_ends_a_wait_that_would_never_end() -> None:
    num_polls = 0

    def poll() -> None:
        nonlocal num_polls
        num_polls += 1
        if num_polls == 3:
            raise PeerLostError("worker 0 lost worker 1.", given="", expected="", hint="")

    with pytest.raises(PeerLostError):
        read(Event(math.inf), poll)


def test_numbers_that_come_when_a_worker_is_lost_are_not_believed() -> None:
    """An abort of the communicator ends what the device waits for, too."""

    def poll() -> None:
        raise PeerLostError("worker 0 lost worker 1.", given="", expected="", hint="")

    with pytest.raises(PeerLostError):
        read(Event(0), poll)
    assert read(Event(0), lambda: None) == [1.0, 2.0]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_asks_whether_the_others_live(runs_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    polls: list[Any] = []
    read = Readback.read

    def noted(self: Readback, poll: Callable[[], None] | None = None) -> list[float]:
        polls.append(poll)
        return read(self, poll)

    monkeypatch.setattr(Readback, "read", noted)
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.randn(8, 3)}), batch_size=4)

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
        return {"loss": model(batch["x"]).square().mean()}

    with accelerator():
        state = ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.1))
        if runs_ahead:
            list(ls.train_steps(state, losses, loader, until=ls.Steps(3)))
        else:
            for batch in ls.batches(loader, until=ls.Steps(3)):
                ls.train_step(state, losses, batch)
    assert polls == [ls.join().group.check_peers] * 3
