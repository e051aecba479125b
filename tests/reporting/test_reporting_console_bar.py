from __future__ import annotations

import io
import re
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.reporting.console import Bar, flowed, show_progress
from lockstep.terminal import num_columns

NAMES = st.text(st.characters())
MEASURES = st.lists(
    st.sampled_from(
        [
            "loss 2.301 (smoothed 2.301)",
            "cross_entropy 0.31, auxiliary 0.12, l2 0.02, total 0.45 (smoothed 0.46)",
            "lr 1.2e-05",
            "344 examples/s",
            "data wait 2 %",
            "12 attempts refused",
        ]
    ),
    max_size=6,
)
WIDTHS = st.integers(20, 130)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _a_terminal_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")


def lines_of(columns: int, *moment: object) -> list[str]:
    """The lines on a terminal of so many columns after a moment was drawn, and the bar closed."""
    stream = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        bar = Bar(stream)
        bar.draw(*moment)
        bar.close()
    last = stream.getvalue().rpartition("\x1b[J")[2].removesuffix("\n")
    return re.sub(r"\x1b\[[0-9;]*m", "", last).split("\n")


def test_a_wide_terminal_has_a_bar_and_a_line_of_measures() -> None:
    head, measures = lines_of(80, "step 60 of 120", 0.5, "52 s left", ["loss 2.3", "lr 0.05", "data wait 2 %"])
    assert re.fullmatch(r"step 60 of 120 ━{25} {25} 50 % 52 s left", head)
    assert len(head) == 80
    assert measures == "loss 2.3 | lr 0.05 | data wait 2 %"


def test_where_there_is_no_room_the_bar_is_left_out_and_no_number() -> None:
    assert lines_of(30, "step 60 of 120", 0.5, "52 s left", ["loss 2.3", "344 examples/s"]) == [
        "step 60 of 120 | 50 %",
        "52 s left",
        "loss 2.3 | 344 examples/s",
    ]


def test_work_without_an_end_has_no_bar() -> None:
    assert lines_of(80, "step 60", None, "", ["loss 2.3"]) == ["step 60", "loss 2.3"]


@given(MEASURES, WIDTHS, st.none() | st.floats(0, 1))
def test_every_line_fits_and_every_number_is_whole(measures: list[str], columns: int, fraction: float | None) -> None:
    moment = "step 1200 of 171800", fraction, "12 min 20 s left"
    lines = lines_of(columns, *moment, measures)
    assert all(num_columns(line) <= columns for line in lines)
    shown = " ".join(lines).replace("|", " ").split()
    for text in (moment[0], moment[2], *measures):
        for word in text.split():
            assert word in shown
            shown.remove(word)


@given(MEASURES, WIDTHS)
def test_parts_stay_in_their_order_and_take_as_few_lines_as_they_can(measures: list[str], width: int) -> None:
    lines = flowed(measures, width)
    assert " ".join(lines).replace("| ", "").split() == " ".join(measures).split()
    for first, second in pairwise(lines):
        part = next((each for each in measures if second.startswith(each)), None)
        if part is not None:
            assert len(first) + len(" | ") + len(part) > width


@given(NAMES)
def test_names_stay_on_their_lines(name: str) -> None:
    lines = lines_of(60, f"x{name}", 0.5, "3 s left", [f"x{name}"])
    assert all(line.isprintable() and num_columns(line) <= 60 for line in lines)
    assert lines[0].startswith("x")


def test_colours_are_left_out_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}
    for no_color in ("1", ""):
        monkeypatch.setenv("NO_COLOR", no_color)
        Bar(stream := Terminal()).draw("step 60", 0.5, "", [])
        drawn[no_color] = re.findall(r"\x1b\[[0-9;]*m", stream.getvalue())
    assert not drawn["1"]
    assert drawn[""]


def test_a_quiet_command_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    for quiet, is_shown in (("", True), ("1", False)):
        monkeypatch.setenv("LOCKSTEP_QUIET", quiet)
        monkeypatch.setattr(sys, "stderr", stream := Terminal())
        with show_progress("reading") as show:
            show(1, 2)
        assert bool(stream.getvalue()) == is_shown


def test_the_cursor_is_put_back_above_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    Bar(stream).draw("step 1", None, "", ["a" * 30, "b" * 30])
    assert stream.getvalue() == f"\r\x1b[J\nstep 1\n{'a' * 30}\n{'b' * 30}\r\x1b[3A"


def test_a_bar_that_is_removed_leaves_nothing() -> None:
    stream = Terminal()
    bar = Bar(stream)
    bar.draw("step 1", None, "", [])
    bar.remove()
    assert stream.getvalue().endswith("\r\x1b[J")
