from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lockstep.doctor.check_result import CheckResult, as_json, can_train, results_of, summary
from lockstep.terminal import wrapped

GOOD = CheckResult("cores", "2 usable of 2", numbers={"usable": 2})
WARNED = CheckResult("open files", "256 at a time", "warn", "ulimit -n 65536")
BAD = CheckResult("workdir", "/data cannot be written: read-only", "fails", "name another --workdir")


def test_the_verdict_is_a_word_and_the_mend_stands_below() -> None:
    assert GOOD.lines() == ["OK     cores: 2 usable of 2"]
    assert WARNED.lines() == ["warn   open files: 256 at a time", "       mend: ulimit -n 65536"]
    assert replace(WARNED, verdict="OK").lines()[1] == "       advice: ulimit -n 65536"


def test_on_a_narrow_terminal_nothing_is_cut_and_the_verdict_keeps_its_column() -> None:
    assert [part for line in BAD.lines() for part in wrapped(line, 30)] == [
        "fails  workdir: /data cannot",
        "       be written: read-only",
        "       mend: name another",
        "           --workdir",
    ]


def test_warnings_allow_to_train_and_what_fails_is_named() -> None:
    assert can_train([GOOD, WARNED])
    assert summary([GOOD, WARNED]) == "It can train: 2 things were checked, with 1 warning."
    assert not can_train([GOOD, BAD])
    assert summary([GOOD, BAD]) == "It cannot train: 1 of 2 checks fail (workdir), with 0 warnings."


def test_a_check_that_the_system_does_not_allow_is_a_warning_and_the_others_go_on() -> None:
    def refused() -> Iterator[CheckResult]:
        yield GOOD
        raise PermissionError(13, "Permission denied", "/proc/loadavg")

    found = list(results_of({"load": refused, "files": lambda: iter([WARNED])}))
    assert found[::2] == [GOOD, WARNED]
    assert (found[1].checked, found[1].verdict) == ("load", "warn")
    assert "Permission denied: '/proc/loadavg'" in found[1].found


def test_json_has_every_number_and_mend() -> None:
    facts = as_json([GOOD, BAD])
    assert facts["can_train"] is False
    assert facts["findings"] == [
        {"checked": "cores", "found": "2 usable of 2", "verdict": "OK", "mend": "", "numbers": {"usable": 2}},
        {
            "checked": "workdir",
            "found": "/data cannot be written: read-only",
            "verdict": "fails",
            "mend": "name another --workdir",
            "numbers": {},
        },
    ]
