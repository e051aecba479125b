from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from worker_processes import HANG_SECONDS

from lockstep.workers import pulse as pulses
from lockstep.workers.channel import Channel
from lockstep.workers.pulse import Pulse


def test_nobody_need_be_listening() -> None:
    pulse = pulses.of_this_process()
    assert (pulse.step, pulse.phase, pulse.stop_requested, pulse.launched) == (0, "start", None, False)
    pulse.at(57, "compute")
    assert (pulse.step, pulse.phase) == (57, "compute")


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Channel, Pulse, list[int]]]:
    """The launcher's end of a beating pulse, and the exit codes of the process: here only its thread ends."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise SystemExit

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(pulses, "_launched", None)
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    pulse = Pulse(launched=True)
    pulses.start_beating(Channel(theirs), pulse)
    yield channel, pulse, codes
    channel.close()
    for thread in threading.enumerate():
        if thread.name == "lockstep-pulse":
            thread.join(HANG_SECONDS)
    assert codes == [1]
    theirs.close()


def beats_until(channel: Channel, **expected: Any) -> None:
    while not any(expected.items() <= beat.items() for beat in channel.receive(10.0)):
        assert not channel.ended


def test_the_launcher_hears_where_the_worker_is(launcher: tuple[Channel, Pulse, list[int]]) -> None:
    channel, pulse, _ = launcher
    assert pulse.launched
    assert pulses.of_this_process() is pulse
    beats_until(channel, step=0, phase="start", stop=None)
    pulse.at(57, "exchange")
    beats_until(channel, step=57, phase="exchange")


def test_the_launcher_requests_a_stop(launcher: tuple[Channel, Pulse, list[int]]) -> None:
    channel, pulse, _ = launcher
    channel.send({"stop": "SIGTERM"})
    beats_until(channel, stop="SIGTERM")
    assert pulse.stop_requested == "SIGTERM"


def test_without_its_launcher_the_process_ends(launcher: tuple[Channel, Pulse, list[int]]) -> None:
    channel, _, codes = launcher
    beats_until(channel, step=0)
    assert codes == []  # the fixture closes the launcher's end, and then looks again
