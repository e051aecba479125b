from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import DataError
from lockstep.records.shards import expand_braces


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("{08..10}.tar", ["08.tar", "09.tar", "10.tar"]),
        ("{8..10}", ["8", "9", "10"]),
        ("{0..1}", ["0", "1"]),
        ("x{7..7}y", ["x7y"]),
        ("{1..002}", ["001", "002"]),
        ("{0..1}/{00..01}.tar", ["0/00.tar", "0/01.tar", "1/00.tar", "1/01.tar"]),
        ("{a,b}-{x..y}-{1..}", ["{a,b}-{x..y}-{1..}"]),
        (Path("in") / "{1..2}", ["in/1", "in/2"]),
    ],
    ids=str,
)
def test_a_range_stands_for_its_numbers(path: str | Path, expected: list[str]) -> None:
    assert expand_braces(path) == expected


def test_a_file_of_that_name_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "{0..1}.tar"
    path.touch()
    assert expand_braces(path) == [str(path)]


@pytest.mark.parametrize(
    ("path", "given_"),
    [
        ("{5..4}.tar", "a range that falls"),
        ("{0..1000000}.tar", "1000001 paths"),
        ("{0..1000}/{0..999}.tar", "1001000 paths"),
        ("{0..999999999999999999}.tar", "1000000000000000000 paths"),
    ],
)
def test_ranges_that_fall_or_are_too_long_are_refused(path: str, given_: str) -> None:
    with pytest.raises(DataError) as caught:
        expand_braces(path)
    assert caught.value.what == f"{path} cannot be expanded."
    assert caught.value.given == given_
    assert caught.value.expected == "ranges that rise, for at most 1000000 paths"
    assert "{000000..000999}" in caught.value.hint
