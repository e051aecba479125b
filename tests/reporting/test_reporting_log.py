from __future__ import annotations

import io
import logging
import subprocess
import sys

import pytest

from lockstep.errors import WorkdirError
from lockstep.reporting.log import LineHandler, configure

logger = logging.getLogger("lockstep")


def test_chief_speaks_plain_sentences() -> None:
    stream = io.StringIO()
    configure(None, stream)
    logger.info("Two workers on the CPU.")
    logger.warning("The newest checkpoint is damaged.")
    logger.error("It is over.")
    assert stream.getvalue() == (
        "Two workers on the CPU.\nwarning: The newest checkpoint is damaged.\nerror: It is over.\n"
    )


def test_every_line_of_another_worker_carries_its_name() -> None:
    stream = io.StringIO()
    configure("worker 1", stream)
    logger.warning("%s", WorkdirError("No.", given="a", expected="b", hint="c"))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[worker 1] warning: No."
    assert [line.split()[2] for line in lines[1:]] == ["given:", "expected:", "hint:"]
    assert all(line.startswith("[worker 1] ") for line in lines)


def test_traceback_follows_its_message() -> None:
    stream = io.StringIO()
    configure("worker 2", stream)
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
    configure("worker 1", first)
    configure(None, second)
    logger.info("Once.")
    assert (first.getvalue(), second.getvalue()) == ("", "Once.\n")
    assert mine in logger.handlers
    assert sum(isinstance(handler, LineHandler) for handler in logger.handlers) == 1
    assert logging.getLogger().handlers == root_handlers


def test_level_hides_what_is_below() -> None:
    stream = io.StringIO()
    configure(None, stream, logging.WARNING)
    logger.info("hidden")
    logger.warning("shown")
    configure(None, stream, logging.DEBUG)
    logger.debug("shown too")
    assert stream.getvalue() == "warning: shown\ndebug: shown too\n"


def test_stream_is_the_standard_error_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    configure()
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
    configure("worker 1", Writes())
    logger.info("one\ntwo")
    assert pieces == ["[worker 1] one\n[worker 1] two\n"]


def test_a_closed_stream_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    stream = io.StringIO()
    stream.close()
    configure(None, stream)
    logger.info("nobody reads this")


@pytest.mark.process
def test_importing_sets_no_handler_and_loads_nothing_heavy() -> None:
    check = (
        "import sys, logging\n"
        "from lockstep.reporting import console, jsonl, log, summaries\n"
        "assert not logging.getLogger('lockstep').handlers and not logging.getLogger().handlers\n"
        "heavy = {'torch', 'tensorboard', 'rich', 'numpy', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", check], check=True, timeout=60)
