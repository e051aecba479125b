from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lockstep.errors import DataError, InputError, PeerLostError
from lockstep.launcher import entry
from lockstep.launcher.entry import reference
from lockstep.workers.channel import Channel, Message

LOST = PeerLostError("worker lost a peer.", given="a", expected="b", hint="c")
WRONG = InputError("No such recipe.", given="mnits", expected="a recipe", hint="say mnist")
GLOO = RuntimeError("[../gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:2213")


def caught(error: BaseException, *, during: BaseException | None = None, of: BaseException | None = None) -> Exception:
    """The error as it is caught after it was raised while another was handled, or from another."""
    try:
        try:
            if during is not None:
                raise during
        finally:
            raise error from of
    except Exception as found:
        return found


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad"), "error"),
        (WRONG, "input"),
        (DataError("Record 7 is damaged.", given="a", expected="b", hint="c"), "input"),
        (LOST, "peer"),
        (GLOO, "peer"),
        (RuntimeError("shapes differ"), "error"),
        (ValueError("Connection closed by peer"), "error"),
        (caught(RuntimeError("while cleaning up"), during=GLOO), "peer"),
        (caught(RuntimeError("while cleaning up"), of=LOST), "peer"),
        (caught(LOST, during=ValueError("bad")), "peer"),
    ],
)
def test_what_a_failure_says_of_its_cause(error: BaseException, kind: str) -> None:
    assert entry._kind(error) == kind


def test_an_error_raised_on_purpose_is_shown_without_its_traceback() -> None:
    assert entry._text(WRONG) == str(WRONG)
    text = entry._text(caught(ValueError("bad")))
    assert text.startswith("Traceback (most recent call last):")
    assert text.endswith("ValueError: bad\n")


@pytest.mark.parametrize(("argument", "code", "said"), [(None, 0, ""), (64, 64, ""), ("leaving", 1, "leaving\n")])
def test_sys_exit_is_taken_as_the_interpreter_takes_it(
    argument: Any, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry._exit_code(SystemExit(argument)) == code
    assert capsys.readouterr().err == said


def plan(argv: list[str]) -> dict[str, Any]:
    if argv[0] == "refuse":
        raise WRONG
    if argv[0] == "bug":
        raise ZeroDivisionError("in the plan")
    if argv[0] == "usage":
        sys.exit(64)
    return {"workers": len(argv)}


@contextmanager
def channels() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = map(Channel, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def planned(*argv: str) -> tuple[int, list[Message]]:
    """The exit code of the process that plans, and what it says."""
    with channels() as (ours, theirs):
        code = entry._plan({"function": reference(plan), "argv": list(argv)}, theirs)
        return code, ours.receive()


def test_a_plan_is_sent_to_the_launcher() -> None:
    assert planned("a", "b") == (0, [{"plan": {"workers": 2}}])


def test_a_plan_that_refuses_says_why() -> None:
    assert planned("refuse") == (2, [{"failed": str(WRONG)}])


def test_a_plan_with_a_bug_shows_its_traceback() -> None:
    code, (message,) = planned("bug")
    assert code == 1
    assert message["failed"].endswith("ZeroDivisionError: in the plan\n")


def test_a_plan_may_leave_with_a_code_of_its_own() -> None:
    assert planned("usage") == (64, [])


def test_functions_that_a_worker_could_not_find_are_refused() -> None:
    assert reference(os.path.join) == "posixpath:join"
    with pytest.raises(ValueError, match=r"test_entry\.test_.*<lambda> is not at the top level of a module"):
        reference(lambda: None)
