from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import termios
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_processes import HANG_SECONDS

from lockstep.terminal import in_columns, num_columns, width_of, wrapped

WORDS = st.lists(st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=30), max_size=30)
GAPS = st.sampled_from([" ", " ", " ", "  ", "    "])


@st.composite
def lines(draw: st.DrawFn) -> str:
    line = draw(st.sampled_from(["", "  ", "        "]))
    for word in draw(WORDS):
        line += word + draw(GAPS)
    return line.rstrip(" ")


@given(lines(), st.sampled_from([40, 80]) | st.integers(10, 200))
def test_lines_fit_and_no_word_is_cut(line: str, width: int) -> None:
    parts = wrapped(line, width)
    assert [word for part in parts for word in part.split(" ") if word] == [word for word in line.split(" ") if word]
    for part in parts:
        assert num_columns(part) <= width or len(part.split()) == 1
    if num_columns(line) <= width:
        assert parts == [line]
    assert wrapped(line, None) == [line]


@given(lines(), st.integers(10, 200))
def test_a_line_is_broken_only_where_the_next_word_does_not_fit(line: str, width: int) -> None:
    parts = wrapped(line, width)
    for part, following in pairwise(parts):
        assert num_columns(f"{part}    {following.split()[0]}") > width, "four spaces are the widest gap"


def test_what_follows_stands_below_its_own_column() -> None:
    line = "  given:    --set optimizer.lr.initial=fast and other words"
    assert wrapped(line, 40) == [
        "  given:    --set",
        "            optimizer.lr.initial=fast",
        "            and other words",
    ]
    assert wrapped(line, 30) == [
        "  given:    --set",
        "      optimizer.lr.initial=fast",
        "      and other words",
    ], "no room for a column"
    assert wrapped("  expected: lenet, flowers or a file of TOML", 36) == [
        "  expected: lenet, flowers or a file",
        "            of TOML",
    ]
    assert wrapped("warning: three words here", 20) == ["warning: three words", "    here"]


def test_a_sign_may_take_two_columns_or_none() -> None:
    assert num_columns("写真 e\u0301") == 6
    assert wrapped("写真 写真 写真", 9) == ["写真 写真", "    写真"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_cells_stand_below_each_other_however_many_columns_a_sign_takes() -> None:
    rows = [["run", "step"], ["\u732b", "12"]]
    assert in_columns(rows) == ["run  step", "\u732b   12"]
    assert in_columns(rows, to_the_right=True) == ["run  step", " \u732b    12"]


def test_a_width_is_that_of_the_terminal_or_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 61))
    with os.fdopen(theirs, "w") as stream:
        assert width_of(stream) == 61
        monkeypatch.setenv("COLUMNS", "33")
        assert width_of(stream) == 33
    os.close(ours)
    monkeypatch.setenv("COLUMNS", "no number")
    assert width_of(Terminal()) == 80
    assert width_of(io.StringIO()) is None
    monkeypatch.setenv("TERM", "dumb")
    assert width_of(Terminal()) is None


WRITES = """
import sys

from lockstep.terminal import outlive_terminal

outlive_terminal()
print("there", sys.stdout.isatty(), sys.stdout.encoding)
sys.stdin.readline()
print("nobody reads this" * 10_000)
sys.stderr.write("nor this")
sys.exit(7)
"""


@pytest.mark.process
def test_what_is_written_after_the_terminal_is_closed_is_no_error() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", WRITES], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert os.read(ours, 100) == b"there True utf-8\r\n"
    os.close(ours)
    process.communicate(b"\n", timeout=HANG_SECONDS)
    assert process.returncode == 7


@pytest.mark.process
def test_what_is_no_terminal_is_left_as_it_is() -> None:
    code = "import sys; from lockstep.terminal import outlive_terminal; before = sys.stdout; outlive_terminal(); "
    ended = subprocess.run(
        [sys.executable, "-c", f"{code} print(sys.stdout is before)"], capture_output=True, check=True
    )
    assert ended.stdout == b"True\n"


@pytest.mark.process
def test_closed_streams_are_opened_on_nothing() -> None:
    code = (
        "import os, sys; from lockstep.terminal import outlive_terminal; outlive_terminal(); "
        "print('out'); print('error', file=sys.stderr); file = os.open('/dev/null', 0); sys.exit(file)"
    )
    ended = subprocess.run(["sh", "-c", '"$0" -c "$1" 2>&- >&-', sys.executable, code], check=False)
    assert ended.returncode == 3
