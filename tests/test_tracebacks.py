from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from lockstep.checks import PositiveInt, check_value
from lockstep.errors import LockstepError
from lockstep.tracebacks import package_of, place_in_script, short_traceback

HERE = str(Path(__file__))


def raised(function: object) -> Exception:
    try:
        function()  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError


def users_mistake() -> None:
    torch.nn.Linear(2, 3)(torch.ones(1, 5))


def mistake_of_an_argument() -> None:
    check_value("steps", -1, PositiveInt)


def test_the_users_frames_are_shown_and_the_others_folded() -> None:
    lines = short_traceback(raised(users_mistake)).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line.strip().partition(", line")[0] for line in lines if line.startswith("  File")] == [
        f'File "{HERE}"'
    ] * 2
    (folded,) = [line for line in lines if line.startswith("  ...")]
    assert re.fullmatch(r"  \.\.\. \d+ frames of torch", folded)
    assert lines.index(folded) > lines.index("    torch.nn.Linear(2, 3)(torch.ones(1, 5))")
    assert lines[-1].startswith("RuntimeError: mat1 and mat2")


def test_a_cause_is_shown_in_the_same_way() -> None:
    def wrong() -> None:
        try:
            json.loads("{")
        except ValueError as error:
            raise LookupError("no settings") from error

    text = short_traceback(raised(wrong))
    assert "  ... 3 frames of Python\njson.decoder.JSONDecodeError" in text
    assert "direct cause" in text
    assert text.endswith("LookupError: no settings\n")
    assert 'json/decoder.py"' not in text


def test_what_no_code_of_the_user_has_met_is_shown_whole() -> None:
    error = raised(mistake_of_an_argument)
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]
    assert "checks.py" in short_traceback(error)
    assert place_in_script(error) == ""


def test_the_place_is_the_last_line_of_the_user() -> None:
    error = raised(mistake_of_an_argument)
    assert isinstance(error, LockstepError)
    assert re.fullmatch(
        rf'{re.escape(HERE)}, line \d+: check_value\("steps", -1, PositiveInt\)', place_in_script(error)
    )


@pytest.mark.parametrize(
    ("filename", "package"),
    [
        (torch.__file__, "torch"),
        (json.__file__, "Python"),
        ("<frozen runpy>", "Python"),
        ("/home/me/project/site.py", None),
        ("/venv/lib/python3.12/site-packages/six.py", "six"),
        (HERE, None),
    ],
)
def test_packages(filename: str, package: str | None) -> None:
    assert package_of(filename) == package
