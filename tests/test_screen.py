from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.reporting.bar import Bar
from lockstep.reporting.log import LineFormatter, LineHandler
from lockstep.screen import Lines, one_line, write_json, write_lines

# Lone surrogates among them: so Python has a file name that is not UTF-8.
NAMES = st.text(st.characters())
HOSTILE = "\x1b[2J\nerror: forged\r\x9b31m\u202egpj.\udcff\x7f"
ESCAPED = r"\x1b[2J\nerror: forged\r\x9b31m\u202egpj.\udcff\x7f"

logger = logging.getLogger("lockstep")


def logged(message: str, *arguments: object) -> str:
    stream = io.StringIO()
    handler = LineHandler(stream)
    handler.setFormatter(LineFormatter("worker 1"))
    logger.addHandler(handler)
    logger.propagate = False  # pytest-xdist cannot send what pytest would capture: lone surrogates
    logger.warning(message, *arguments)
    logger.propagate = True
    logger.removeHandler(handler)
    return stream.getvalue()


def test_what_is_not_printable_is_escaped() -> None:
    assert one_line(HOSTILE) == ESCAPED
    assert one_line("Ñandú 写真/七.jpg \\n") == "Ñandú 写真/七.jpg \\n"
    assert one_line(Path("a\tb")) == r"a\tb"


@given(NAMES)
def test_a_line_is_one_and_can_be_escaped_again(name: str) -> None:
    line = one_line(name)
    assert line.isprintable()
    assert one_line(line) == line
    line.encode()


@given(NAMES, NAMES)
def test_an_error_has_four_lines_whatever_the_names(name: str, other: str) -> None:
    error = DataError(f"{name} cannot be read.", given=other, expected=Path(name.replace("\0", "")), hint=other)
    lines = str(error).split("\n")
    assert [line[:10] for line in lines[1:]] == ["  given:  ", "  expected", "  hint:   "]
    assert all(line.isprintable() for line in lines)


@given(NAMES)
def test_a_line_of_the_log_is_one_whatever_the_name(name: str) -> None:
    expected = f"[worker 1] warning: no folder for {one_line(name)} in 3\n"
    assert logged("no folder for %s in %d", name, 3) == expected


@given(NAMES)
def test_no_text_moves_the_cursor_wherever_it_stands_in_a_message(name: str) -> None:
    text = logged(f"{name.replace('%', '')} %s", ValueError(name))
    assert all(line.startswith("[worker 1] ") and line.isprintable() for line in text[:-1].split("\n"))


def test_paths_errors_and_texts_of_several_lines_are_logged_as_they_are_meant() -> None:
    error = DataError(HOSTILE, given="a", expected="b", hint="c")
    assert logged("%s: %s", Path("a\nb"), error).split("\n")[:2] == [
        rf"[worker 1] warning: a\nb: {ESCAPED}",
        "[worker 1]   given:    a",
    ]
    assert logged("%s", Lines("one\ntwo\r")) == "[worker 1] warning: one\n[worker 1] two\\r\n"


@pytest.mark.process
def test_without_any_handler_of_ours_a_name_stays_on_its_line() -> None:
    script = (
        "import logging, lockstep.screen, torch\n"
        f"logging.getLogger('lockstep').warning('Not read: %s', {HOSTILE!r})\n"
        "logging.basicConfig(format='%(message)s')\n"
        f"logging.getLogger('lockstep').warning('Not read: %s', {HOSTILE!r})\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == f"Not read: {ESCAPED}\n" * 2


def test_a_number_and_an_exact_percentage_are_logged() -> None:
    assert logged("%d of %.1f, 5 %%", 3, 4.0) == "[worker 1] warning: 3 of 4.0, 5 %\n"


@given(NAMES)
def test_lines_and_json_on_the_standard_output_are_printable(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream := io.StringIO())
        write_lines([f"  {name}: 3 values", "1 tensor"])
        lines = stream.getvalue().split("\n")
        write_json({name: name})
    assert lines == [one_line(f"  {name}: 3 values"), "1 tensor", ""]
    written = stream.getvalue().removeprefix("\n".join(lines))
    assert written.replace("\n", "").isascii()
    assert written.replace("\n", "").isprintable()
    assert json.loads(written) == {name: name}


@given(NAMES)
def test_the_bar_shows_names_on_its_two_lines(name: str) -> None:
    plain, named = io.StringIO(), io.StringIO()
    for stream, text in ((plain, "x"), (named, f"x{name}")):
        bar = Bar(stream)
        bar.draw(text, 0.5, "3 s left", text)
    assert controls(named.getvalue()) == controls(plain.getvalue())


def controls(text: str) -> list[str]:
    return [sign for sign in text if not sign.isprintable()]


WRITES = """
import sys

from lockstep.screen import outlive_terminal

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
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 7


@pytest.mark.process
def test_what_is_no_terminal_is_left_as_it_is() -> None:
    code = "import sys; from lockstep.screen import outlive_terminal; before = sys.stdout; outlive_terminal(); "
    ended = subprocess.run(
        [sys.executable, "-c", f"{code} print(sys.stdout is before)"], capture_output=True, check=True
    )
    assert ended.stdout == b"True\n"


@pytest.mark.process
def test_closed_streams_are_opened_on_nothing() -> None:
    code = (
        "import os, sys; from lockstep.screen import outlive_terminal; outlive_terminal(); "
        "print('out'); print('error', file=sys.stderr); file = os.open('/dev/null', 0); sys.exit(file)"
    )
    ended = subprocess.run(["sh", "-c", '"$0" -c "$1" 2>&- >&-', sys.executable, code], check=False)
    assert ended.returncode == 3
