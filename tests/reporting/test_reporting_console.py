from __future__ import annotations

import io
import logging
import math
import os
import re
import select
import sys
from types import SimpleNamespace
from typing import TextIO

import pytest

from lockstep.reporting.console import (
    Console,
    format_duration,
    format_losses,
    format_number,
    format_rate,
    format_step,
    step_measures,
)
from lockstep.reporting.throughput import Throughput
from lockstep.screen import show_log
from lockstep.types import Epochs, Interval, Steps


def lines_of(console: Console, reports) -> list[str]:
    stream = io.StringIO()
    show_log(None, stream)
    for report in reports:
        console(report)
    console.close()
    return stream.getvalue().splitlines()


def plain(interval: str, end=None) -> Console:
    return Console(Interval.parse(interval), batch_size=128, end=end, stream=io.StringIO())


def test_a_line_every_ten_steps(make_report) -> None:
    reports = [
        make_report(step, losses={"loss": 0.3124}, smoothed={"total": 0.3551}, learning_rate=0.0498)
        for step in range(1, 21)
    ]
    assert lines_of(plain("10 steps", Epochs(4)), reports) == [
        f"step {step} of 1718 | loss 0.3124 (smoothed 0.3551) | lr 0.0498 | 1280 examples/s | data wait 1 % | {left}"
        for step, left in [(10, "2 min 51 s left"), (20, "2 min 50 s left")]
    ]


def test_of_several_optimizers_the_least_and_the_most_rate_are_shown(make_report) -> None:
    apart = make_report(1, learning_rate=0.1, learning_rates={"head": 0.1, "bias$": 0.025, "body": 0.05})
    alike = make_report(2, learning_rate=0.1, learning_rates={"head": 0.1, "body": 0.1})
    first, second = lines_of(plain("1 steps"), [apart, alike])
    assert "| lr 0.025 to 0.1 |" in first
    assert "| lr 0.1 |" in second


def test_rates_are_those_of_the_interval(make_report) -> None:
    slow = [make_report(step, step_seconds=1.0) for step in (1, 2)]
    mixed = [make_report(3, step_seconds=0.3), make_report(4, step_seconds=0.1)]
    first, second = lines_of(plain("2 steps"), slow + mixed)
    assert "| 128 examples/s |" in first
    assert "| 640 examples/s |" in second


def test_the_first_step_and_a_resumed_one_count(make_report) -> None:
    assert len(lines_of(plain("1 steps"), [make_report(1)])) == 1
    assert [line.split(" | ")[0] for line in lines_of(plain("10 steps"), map(make_report, range(10, 19)))] == [
        "step 10",
        "step 18",
    ]


def test_the_last_step_is_said_once(make_report) -> None:
    lines = lines_of(plain("10 steps", Steps(12)), map(make_report, range(1, 13)))
    assert [line.split(" | ")[0] for line in lines] == ["step 10 of 12", "step 12 of 12"]
    assert lines[-1].endswith("| took 1 s")
    assert len(lines_of(plain("10 steps"), map(make_report, range(1, 11)))) == 1


def test_seconds_pass_on_the_chiefs_clock(make_report) -> None:
    reports = [make_report(step, elapsed_seconds=0.6 * step) for step in range(1, 6)]
    assert [line.split(" | ")[0] for line in lines_of(plain("1 s"), reports)] == ["step 2", "step 4", "step 5"]


def test_refused_attempts_are_said(make_report) -> None:
    reports = [
        make_report(1),
        make_report(1, position=256, losses={"loss": float("nan")}, smoothed={"total": 0.5}, skipped=True),
        make_report(2, position=384),
        make_report(3, position=512),
        make_report(4, position=640),
    ]
    second, fourth = lines_of(plain("2 steps"), reports)
    assert second.endswith("| 1 attempt refused")
    assert "refused" not in fourth


def test_a_refused_attempt_at_the_end_is_shown_as_it_was(make_report) -> None:
    (line,) = lines_of(plain("10 steps"), [make_report(1, losses={"loss": float("nan")}, smoothed={}, skipped=True)])
    assert line.startswith("step 1 | loss nan | lr 0.05")
    assert line.endswith("1 attempt refused")


def test_without_an_end_there_is_no_time_left(make_report) -> None:
    (line,) = lines_of(plain("5 steps"), map(make_report, range(1, 6)))
    assert line.startswith("step 5 | ")
    assert "left" not in line


def test_an_interval_of_zero_is_silent(make_report) -> None:
    assert lines_of(plain("0"), map(make_report, range(1, 50))) == []


class Screen:
    """A terminal that stands for the standard error, and what was written to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> None:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(columns))
        self._master, slave = os.openpty()
        self.stream: TextIO = os.fdopen(slave, "w")

    def text(self) -> str:
        """What is new since the last look; the kernel hands it over a little later, and in pieces."""
        self.stream.flush()
        pieces = []
        while select.select([self._master], [], [], 0.1)[0]:
            pieces.append(os.read(self._master, 1 << 16))
        return b"".join(pieces).decode().replace("\r\n", "\n")

    def __enter__(self) -> Screen:
        self._before, sys.stderr = sys.stderr, self.stream
        return self

    def __exit__(self, *error: object) -> None:
        sys.stderr = self._before
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("lockstep.reporting.console.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_terminal_has_a_bar_that_is_drawn_now_and_then(make_report, monkeypatch, clock) -> None:
    with Screen(monkeypatch) as screen:
        console = Console(Interval(10), batch_size=128, end=Steps(40))
        console(make_report(1))
        drawn = screen.text()
        console(make_report(2))
        assert screen.text() == ""
        clock.now += 0.25
        console(make_report(10))
        assert "25 % 3 s left" in screen.text()
        console.close()
    assert "step 1 of 40" in drawn
    assert "2 %" in drawn
    assert "lr 0.05 | 1280 examples/s | data wait 1 %" in drawn


def test_closing_shows_the_last_step_and_gives_the_terminal_back(make_report, monkeypatch, clock) -> None:
    with Screen(monkeypatch) as screen:
        console = Console(Interval(10), batch_size=128, end=Steps(40))
        console(make_report(1))
        console(make_report(40))
        screen.text()
        console.close()
        last = screen.text()
        console.close()
        assert screen.text() == ""
    assert "step 40 of 40" in last
    assert "100 % took 4 s" in last
    assert last.endswith("\n")


def test_the_cursor_is_never_hidden(make_report, monkeypatch, clock) -> None:
    with Screen(monkeypatch) as screen:
        console = Console(Interval(10), batch_size=128)
        console(make_report(1))
        console.close()
        text = screen.text()
    assert "step 1\n" in text
    assert "\x1b[?25l" not in text


def test_what_any_process_writes_stands_above_the_bar(make_report, monkeypatch, clock) -> None:
    with Screen(monkeypatch) as screen:
        show_log()
        console = Console(Interval(10), batch_size=128, end=Steps(40))
        console(make_report(1))
        screen.stream.write("a line of another process\n")
        logging.getLogger("lockstep").warning("Saved [bold]nothing[/bold].")
        clock.now += 0.25
        console(make_report(2))
        console.close()
        text = screen.text()
    bar, others = "\n".join([r"step {} of 40.*", r"loss .*\r\x1b\[2A"]), "a line of another process\n"
    wiped = r"\x1b\[Jwarning: Saved \[bold\]nothing\[/bold\].\n"
    last = r"\r\x1b\[Jstep 2 of 40.*\nloss .*\n"
    drawn = [rf"\r\x1b\[J\n{bar.format(step)}" for step in (1, 2, 2)]
    assert re.fullmatch(f"{drawn[0]}{others}{wiped}{drawn[1]}{drawn[2]}{last}", text)


def test_a_dumb_terminal_gets_plain_lines(make_report, monkeypatch) -> None:
    with Screen(monkeypatch) as screen:
        monkeypatch.setenv("TERM", "dumb")
        show_log()
        console = Console(Interval(1), batch_size=128)
        console(make_report(1))
        assert screen.text().startswith("step 1 | loss ")
        console.close()
        assert screen.text() == ""


def test_a_narrow_terminal_keeps_all_numbers(make_report, monkeypatch, clock) -> None:
    with Screen(monkeypatch, columns=40) as screen:
        console = Console(Interval(10), batch_size=128, end=Steps(1718))
        console(make_report(1))
        console(make_report(10))
        console.close()
        last = screen.text().split("\x1b[J")[-1]
    assert last.split("\n") == [
        "step 10 of 1718 | 1 % | 2 min 51 s left",
        "loss 0.08333 (smoothed 0.5) | lr 0.05",
        "1280 examples/s | data wait 1 %",
        "",
    ]


def test_zero_shows_no_bar_either(make_report, monkeypatch) -> None:
    with Screen(monkeypatch) as screen:
        console = Console(Interval(0), batch_size=128)
        console(make_report(1))
        console.close()
        assert screen.text() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (-3, "0 s"),
        (52.4, "52 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 0 min"),
        (7800, "2 h 10 min"),
        (86_400 * 4 + 3 * 3600 + 59, "4 d 3 h"),
        (math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.31239, "0.3124"),
        (2.302585, "2.303"),
        (0.0, "0"),
        (1.2e-05, "1.2e-05"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(3412.4, "3412"), (41.66, "41.7"), (0.25, "0.25"), (1234567.0, "1234567"), (math.nan, "nan")]
)
def test_rate(value: float, text: str) -> None:
    assert format_rate(value) == text


def test_place() -> None:
    assert format_step(120, 1718) == "step 120 of 1718"
    assert format_step(120, None) == "step 120"


def test_one_loss_needs_no_name(make_report) -> None:
    report = make_report(1, losses={"cross_entropy": 0.3124}, smoothed={"cross_entropy": 0.3551, "total": 0.3551})
    assert format_losses(report) == "loss 0.3124 (smoothed 0.3551)"


def test_several_losses_are_named_and_summed(make_report) -> None:
    report = make_report(1, losses={"cross_entropy": 0.31, "l2": 0.02}, smoothed={"total": 0.34})
    assert format_losses(report) == "cross_entropy 0.31, l2 0.02, total 0.33 (smoothed 0.34)"


def test_losses_before_there_is_an_average(make_report) -> None:
    assert format_losses(make_report(1, losses={"loss": math.nan}, smoothed={})) == "loss nan"


def test_measures(make_report) -> None:
    report = make_report(1, losses={"loss": 0.5}, smoothed={"total": 0.25}, learning_rate=0.0498)
    pace = Throughput(num_steps=10, num_examples=1280, seconds=0.5, wait_seconds=0.005)
    parts = ["loss 0.5 (smoothed 0.25)", "lr 0.0498", "2560 examples/s", "data wait 1 %"]
    assert step_measures(report, pace) == parts
    pace.num_skipped = 1
    assert step_measures(report, pace) == [*parts, "1 attempt refused"]
    pace.num_skipped = 2
    assert step_measures(report, pace) == [*parts, "2 attempts refused"]
