from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_processes import HANG_SECONDS

from lockstep.errors import DataError, WorkdirError
from lockstep.screen import LineHandler, Lines, log, log_new_name, one_line, show_log, write_json, write_lines

# Lone surrogates among them: so Python has a file name that is not UTF-8.
NAMES = st.text(st.characters())
HOSTILE = "\x1b[2J\nerror: forged\r\x9b31m\u202egpj.\udcff\x7f"
ESCAPED = r"\x1b[2J\nerror: forged\r\x9b31m\u202egpj.\udcff\x7f"

logger = logging.getLogger("lockstep")


def logged(message: str, *arguments: object) -> str:
    stream = io.StringIO()
    handler = LineHandler(stream, "worker 1")
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
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS, check=True
    )
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


def test_chief_speaks_plain_sentences() -> None:
    stream = io.StringIO()
    show_log(None, stream)
    logger.info("Two workers on the CPU.")
    logger.warning("The newest checkpoint is damaged.")
    logger.error("It is over.")
    assert stream.getvalue() == (
        "Two workers on the CPU.\nwarning: The newest checkpoint is damaged.\nerror: It is over.\n"
    )


def test_a_quiet_command_tells_warnings_and_errors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_QUIET", "1")
    stream = io.StringIO()
    show_log(None, stream)
    logger.info("Two workers on the CPU.")
    logger.warning("The newest checkpoint is damaged.")
    assert stream.getvalue() == "warning: The newest checkpoint is damaged.\n"


def test_every_line_of_another_worker_carries_its_name() -> None:
    stream = io.StringIO()
    show_log("worker 1", stream)
    logger.warning("%s", WorkdirError("No.", given="a", expected="b", hint="c"))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[worker 1] warning: No."
    assert [line.split()[2] for line in lines[1:]] == ["given:", "expected:", "hint:"]
    assert all(line.startswith("[worker 1] ") for line in lines)


def test_traceback_follows_its_message() -> None:
    stream = io.StringIO()
    show_log("worker 2", stream)
    try:
        raise ValueError("torn")
    except ValueError:
        logger.exception("A worker failed.")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[worker 2] error: A worker failed."
    assert lines[1] == "[worker 2] Traceback (most recent call last):"
    assert lines[-1] == "[worker 2] ValueError: torn"


def test_configuring_again_replaces_and_leaves_other_handlers_alone() -> None:
    mine = logging.NullHandler()
    logger.addHandler(mine)
    root_handlers = list(logging.getLogger().handlers)
    first, second = io.StringIO(), io.StringIO()
    show_log("worker 1", first)
    show_log(None, second)
    logger.info("Once.")
    assert (first.getvalue(), second.getvalue()) == ("", "Once.\n")
    assert mine in logger.handlers
    assert sum(isinstance(handler, LineHandler) for handler in logger.handlers) == 1
    assert logging.getLogger().handlers == root_handlers


def test_level_hides_what_is_below() -> None:
    stream = io.StringIO()
    show_log(None, stream, logging.WARNING)
    logger.info("hidden")
    logger.warning("shown")
    show_log(None, stream, logging.DEBUG)
    logger.debug("shown too")
    assert stream.getvalue() == "warning: shown\ndebug: shown too\n"


def test_stream_is_the_standard_error_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    show_log()
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    logger.info("Here.")
    assert later.getvalue() == "Here.\n"


def test_a_record_is_one_write() -> None:
    class Writes(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    pieces: list[str] = []
    show_log("worker 1", Writes())
    logger.info("one\ntwo")
    assert pieces == ["[worker 1] one\n[worker 1] two\n"]


def test_a_closed_stream_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    stream = io.StringIO()
    stream.close()
    show_log(None, stream)
    logger.info("nobody reads this")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("columns", "worker_name"), [(80, None), (40, None), (80, "worker 12"), (40, "worker 12")])
def test_on_a_terminal_lines_break_at_words(
    monkeypatch: pytest.MonkeyPatch, columns: int, worker_name: str | None
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    error = DataError(
        "The learning rate ends at step 1718, and the run at step 12, which is long before it.",
        given="epochs=4, and --steps 12, of 55000 examples in batches of 128",
        expected="a schedule that ends with the run",
        hint="set optimizer.lr.steps=12, or leave --steps out to train for all four epochs",
    )
    show_log(worker_name, stream := Terminal())
    logger.error("%s", error)
    lines = stream.getvalue().removeprefix("\x1b[J").splitlines()
    assert max(map(len, lines)) <= columns
    prefix = f"[{worker_name}] " if worker_name else ""
    assert all(line.startswith(prefix) for line in lines)
    assert " ".join(line.removeprefix(prefix) for line in lines).split() == f"error: {error}".split()


def test_elsewhere_a_record_is_one_line() -> None:
    show_log(None, stream := io.StringIO())
    logger.info("word " * 100)
    assert stream.getvalue() == "word " * 100 + "\n"


def test_tables_break_at_words_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    lines = ["Conv2d_1a.weight  (32, 3, 3, 3)  float32  of slim", "short"]
    for stream, shown in [
        (io.StringIO(), lines),
        (Terminal(), ["Conv2d_1a.weight  (32, 3, 3, 3)  float32", "                  of slim", "short"]),
    ]:
        monkeypatch.setattr(sys, "stdout", stream)
        write_lines(lines)
        assert stream.getvalue().splitlines() == shown


# A script that has configured no logging --------------------------------------------------------------------------


def said(script: str, **environment: str) -> str:
    """What a script of its own writes to its standard error."""
    code = f"import logging\nfrom lockstep.screen import log\nlogger = logging.getLogger('lockstep')\n{script}"
    there = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=there | environment, check=True
    )
    return ended.stderr


LINES = "log.info('resumed at step %d', 5); log.warning('slow'); log.debug('why')"


@pytest.mark.process
@pytest.mark.parametrize(
    ("configuration", "shown"),
    [
        ("", "resumed at step 5\nwarning: slow\n"),
        ("logger.setLevel('WARNING')", "warning: slow\n"),
        ("logger.setLevel('DEBUG')", "resumed at step 5\nwarning: slow\ndebug: why\n"),
        ("logging.getLogger().setLevel('ERROR')", ""),
        ("logging.disable('INFO')", "warning: slow\n"),
        ("logger.disabled = True", ""),
        ("logger.addHandler(logging.NullHandler())", ""),
        ("logging.basicConfig(format='%(name)s %(message)s')", "lockstep slow\n"),
        (
            "logging.basicConfig(format='%(funcName)s %(message)s', level=20)",
            "<module> resumed at step 5\n<module> slow\n",
        ),
        (
            "log.info('before'); logging.basicConfig(format='%(message)s', level=20)",
            "before\nresumed at step 5\nslow\n",
        ),
        ("log.info('before'); logger.setLevel('ERROR')", "before\n"),
    ],
)
def test_a_script_sees_the_lines_once_in_the_way_it_has_chosen(configuration: str, shown: str) -> None:
    assert said(f"{configuration}\n{LINES}") == shown


@pytest.mark.process
def test_of_other_workers_a_script_sees_warnings_alone() -> None:
    assert said(LINES, RANK="0", WORLD_SIZE="2") == "resumed at step 5\nwarning: slow\n"
    assert said(LINES, RANK="1", WORLD_SIZE="2") == "[worker 1] warning: slow\n"


def test_what_all_workers_would_say_alike_the_chief_alone_says(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    show_log(stream=stream)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        log.warning("2 of %d objects have no area", 9, chief_only=True)
        log.warning("said by %s", rank)
    assert stream.getvalue() == "warning: 2 of 9 objects have no area\nwarning: said by 0\nwarning: said by 1\n"


@pytest.mark.process
def test_names_that_a_script_sees_stay_on_their_line() -> None:
    assert said(f"log.info('Not read: %s', {HOSTILE!r})") == f"Not read: {ESCAPED}\n"
    assert said("log.info('A handler was added'); assert not logger.handlers and not logging.root.handlers")


@pytest.mark.process
def test_a_worker_that_has_become_the_chief_speaks_as_the_chief() -> None:
    lines = "from lockstep.screen import log; log.info('one'); log.speak_as(None); log.info('two')"
    assert said(f"{lines}; log.speak_as('worker 2'); log.info('three'); log.warning('four')", RANK="1") == (
        "two\n[worker 2] warning: four\n"
    )


def test_an_old_name_is_logged_once_also_by_the_processes_that_follow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCKSTEP_OLD_NAMES", "")
    log_new_name("--old", "--new")
    log_new_name("--old", "--new")
    log_new_name("--older", "--new")
    assert caplog.messages == [
        "--old is called --new now",
        "--older is called --new now",
    ]
    assert os.environ["LOCKSTEP_OLD_NAMES"] == "\n--old\n--older", "which child processes see"
