from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep as ls
from lockstep.selection import assigned, selected

NAMES = ["stem.weight", "stem.bias", "block.1.weight", "block.1.bias", "block.10.weight", "head.weight"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("bias", ["stem.bias", "block.1.bias"]),
        ("^head", ["head.weight"]),
        (r"block\.1\.", ["block.1.weight", "block.1.bias"]),
        (["head", "stem"], ["stem.weight", "stem.bias", "head.weight"]),
        (("weight$", "stem"), ["stem.weight", "stem.bias", "block.1.weight", "block.10.weight", "head.weight"]),
        (".", NAMES),
        ([], []),
    ],
)
def test_patterns_are_searched_for_and_names_keep_their_order(
    patterns: str | Sequence[str], expected: list[str]
) -> None:
    assert selected("frozen", patterns, NAMES) == expected


def test_an_exact_name_means_that_parameter_alone() -> None:
    names = ["weight", "head.weight", "head.weights", "headXweight"]
    assert selected("frozen", "weight", names) == ["weight"]
    assert selected("frozen", "head.weight", names) == ["head.weight"]
    assert assigned("lr", {"weight": 1, "head": 2}, names) == {
        "weight": 1,
        "head.weight": 2,
        "head.weights": 2,
        "headXweight": 2,
    }


def test_a_name_may_look_like_a_broken_pattern() -> None:
    assert selected("frozen", "a[0", ["a[0", "b"]) == ["a[0"]


def test_values_are_assigned_in_the_order_of_the_names_and_the_rest_is_left_out() -> None:
    found = assigned("weight_decay", {"head": 2.0, r"block.*weight": 1.0}, NAMES)
    assert list(found.items()) == [("block.1.weight", 1.0), ("block.10.weight", 1.0), ("head.weight", 2.0)]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.text("ab.", min_size=1, max_size=4), unique=True, min_size=1), st.sampled_from(["a", "b$", "^a", "ab"])
)
def test_selection_is_what_a_search_finds(names: list[str], pattern: str) -> None:
    expected = [pattern] if pattern in names else [name for name in names if re.search(pattern, name)]
    if expected:
        assert selected("frozen", pattern, names) == expected
        assert assigned("frozen", {pattern: 1}, names) == dict.fromkeys(expected, 1)
    else:
        with pytest.raises(ls.InputError, match="matches no parameter"):
            selected("frozen", pattern, names)


def select(patterns: Any) -> Callable[[], object]:
    return lambda: selected("frozen", patterns, NAMES)


def assign(*patterns: Any) -> Callable[[], object]:
    return lambda: assigned("weight_decay", dict.fromkeys(patterns, 1.0), NAMES)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (select("haed"), r"A pattern of frozen matches no parameter.*\n.*'haed'\n.*'stem.weight', .*\n.*correct"),
        (select(["head", "tail"]), r"matches no parameter.*\n.*'tail'"),
        (assign("tail"), r"A pattern of weight_decay matches no parameter"),
        (select(""), r"A pattern of frozen is empty, and would match everything.*\n.*''\n.*\n.*write '\.'"),
        (assign("head", ""), r"A pattern of weight_decay is empty"),
        (select("head("), r"frozen holds what is no regular expression: missing \).*\n.*'head\('\n.*\n.*escape"),
        (assign("*"), r"weight_decay holds what is no regular expression: nothing to repeat"),
        (select(3), r"frozen is of the wrong type.*\n.*int\n.*or a list of them"),
        (select([3]), r"A pattern of frozen is of the wrong type.*\n.*int\n.*regular expression"),
        (assign(re.compile("head")), r"A pattern of weight_decay is of the wrong type.*\n.*Pattern\n.*\n.*as text"),
        (
            assign("bias", "stem"),
            r"'stem.bias' is matched by two patterns of weight_decay.*\n.*'bias' and 'stem'\n.*one pattern at most",
        ),
        (assign("head.weight", "weight$"), r"'head.weight' is matched by two patterns"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(use: Callable[[], object], message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        use()
