from __future__ import annotations

import logging
import re
import sys
import threading
from io import StringIO

import pytest

from lockstep.reporting import console as work
from lockstep.reporting.console import show_elapsed, show_progress


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(work.time, "monotonic", lambda: self.now)


def test_without_a_terminal_there_is_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    with caplog.at_level(logging.INFO, "lockstep"), show_progress("train") as show:
        for done in range(1001, 2000):  # The first thousand were there before.
            show(done, 3000)
            clock.now += 1 / 32
    assert caplog.messages == [
        "train: 1321 of 3000 | 32/s | 52 s left",
        "train: 1641 of 3000 | 32/s | 42 s left",
        "train: 1961 of 3000 | 32/s | 32 s left",
    ]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    clock = Clock(monkeypatch)
    with show_progress("train") as show:
        for done in range(1, 1001):
            show(done, 1000)
            clock.now += 0.01
    shown = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", stream.getvalue())
    assert "train: 501 of 1000" in shown
    assert "50 % 5 s left" in shown
    assert "100/s" in shown
    assert stream.getvalue().count("\x1b[J") == 51
    assert stream.getvalue().endswith("\r\x1b[J"), "the bar is removed"


def test_no_items_at_all_are_all_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with show_progress("scoring test") as show:
        show(0, 0)
    assert "scoring test: 0 of 0" in stream.getvalue()


def test_work_without_a_count_shows_its_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(work, "_SECONDS_BETWEEN_LINES", 0.01)
    with caplog.at_level(logging.INFO, "lockstep"), show_elapsed("exporting to model.pt2"):
        while len(caplog.messages) < 2:
            pass
    assert caplog.messages[0] == "exporting to model.pt2: 0 s"
    said = len(caplog.messages)
    assert not any(thread.name == "elapsed" for thread in threading.enumerate())
    assert len(caplog.messages) == said, "nothing is said any more"
