"""Names in a message: the first few, and how many more there are."""

from __future__ import annotations

from lockstep.listing import shorten


def test_a_few_names_are_all_listed() -> None:
    assert [shorten([]), shorten(["a"]), shorten([*"abcde"])] == ["", "a", "a, b, c, d, e"]


def test_of_many_names_the_first_are_listed_and_the_others_counted() -> None:
    assert shorten([*"abcdef"]) == "a, b, c, d, e and 1 more"
    assert shorten(["a"] * 1236, 2) == "a, a and 1,234 more"
    assert shorten([*"abc"], 2, separator="; ") == "a; b and 1 more"
