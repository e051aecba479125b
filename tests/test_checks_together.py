"""Checks whose errors are told together."""

from __future__ import annotations

import pickle

import pytest

from lockstep.checks import check_together
from lockstep.errors import DataError, InputError, InputErrors, WorkdirError


def failing(error: Exception) -> None:
    raise error


DATA = DataError("There is no data.", given="photos", expected="a folder", hint="check the path")
WORKDIR = WorkdirError("It is busy.", given="held by 7", expected="one start", hint="wait")


def test_nothing_is_raised_where_all_is_well() -> None:
    check_together([lambda: 1, lambda: None])


def test_one_error_stands_alone() -> None:
    with pytest.raises(DataError) as caught:
        check_together([lambda: None, lambda: failing(DATA), lambda: failing(DATA)])
    assert caught.value is DATA


def test_several_are_numbered_and_each_is_told_once() -> None:
    both = InputErrors([DATA, WORKDIR])
    with pytest.raises(InputErrors) as caught:
        check_together([lambda: failing(both), lambda: failing(DATA)])
    assert str(caught.value) == (f"2 things cannot be used as given.\n1. {DATA}\n2. {WORKDIR}")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert isinstance(caught.value, InputError)


def test_an_error_that_is_none_of_input_ends_the_checks() -> None:
    with pytest.raises(ZeroDivisionError):
        check_together([lambda: failing(DATA), lambda: failing(ZeroDivisionError())])
