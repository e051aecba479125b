"""Names are chosen by patterns and renamed in order; what cannot work is refused, and what does nothing is told."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.weights.layouts import CONVOLUTION, DENSE
from lockstep.weights.names import Destination, Rename, apply_renames, find_prefixes, swap_prefix


def ends(name: str, *renames: Rename) -> list[str]:
    places, _ = apply_renames({name: [Destination(name)]}, renames)
    return [place.name for place in places[name]]


def test_renames_replace_what_they_find_wherever_it_is() -> None:
    assert ends("a/b/weights", Rename("/", "."), Rename(r"\.weights$", ".weight")) == ["a.b.weight"]
    assert ends("conv12/x", Rename(r"^conv(\d)(\d)/", r"layer\2.\1.")) == ["layer2.1.x"]
    assert ends("module.conv", Rename(r"^module\.", "")) == ["conv"]


def test_the_order_of_renames_matters() -> None:
    first, second = Rename("^a$", "b"), Rename("^b$", "c")
    assert ends("a", first, second) == ["c"]
    assert ends("a", second, first) == ["b"]


def test_names_that_nothing_matches_cost_one_look_a_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise AssertionError("a name that a look has ruled out is matched again")

    monkeypatch.setattr(Rename, "matches", refuse)
    places = {f"layers.{index}": [Destination(f"layers.{index}")] for index in range(100)}
    renames = [Rename("^conv", "layer"), Rename("/weights$", ".weight")]
    assert apply_renames(places, renames) == (places, renames)


def test_one_tensor_may_go_to_several_places_and_on_from_there() -> None:
    shared = Rename(r"^shared/(\w+)$", (r"left.\1", r"right.\1"))
    assert ends("shared/weight", shared, Rename("^right", "wrong")) == ["left.weight", "wrong.weight"]
    places, unmatched = apply_renames({"v0": [Destination("v0")]}, [Rename("v0", ("my_var0", "my_var1"), DENSE)])
    assert places == {"v0": [Destination("my_var0", DENSE), Destination("my_var1", DENSE)]}
    assert unmatched == []


def test_the_last_layout_that_is_said_counts() -> None:
    renames = [Rename("a", "b", CONVOLUTION), Rename("b", "c"), Rename("c", "d", DENSE), Rename("d", "e")]
    places, _ = apply_renames({"a": [Destination("a")]}, renames)
    assert places == {"a": [Destination("e", DENSE)]}


def test_renames_that_match_nothing_are_told() -> None:
    unmatched = Rename("^z", "y")
    places, found = apply_renames({"a": [Destination("a")]}, [Rename("a", "b"), unmatched, Rename("^a", "c")])
    assert places == {"a": [Destination("b")]}
    assert found == [unmatched, Rename("^a", "c")]


@pytest.mark.parametrize(
    ("pattern", "to", "why"),
    [
        ("(", "x", "missing ), unterminated subpattern at position 0"),
        ("", "x", "it has no pattern, or nothing to become"),
        ("a", (), "it has no pattern, or nothing to become"),
    ],
)
def test_renames_that_cannot_be_used_are_refused(pattern: str, to: str | tuple[str, ...], why: str) -> None:
    with pytest.raises(InputError) as refusal:
        Rename(pattern, to)
    assert str(refusal.value) == (
        f"This renaming cannot be used: {why}.\n"
        f"  given:    Rename({pattern!r}, {to!r})\n"
        "  expected: a regular expression, and one name or more for what it matches\n"
        '  hint:     write Rename(r"^(.*)/weights$", r"\\1.weight")'
    )


def test_a_rename_to_what_the_pattern_has_not_matched_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be used: invalid group reference 2"):
        ends("a", Rename("(a)", r"\2"))


@pytest.mark.parametrize("fields", [{"pattern": 3, "to": "x"}, {"pattern": "x", "to": 3}, {"pattern": "x", "to": (3,)}])
def test_renames_are_text(fields: dict[str, object]) -> None:
    with pytest.raises(InputError, match="of the wrong type"):
        Rename(**fields)  # type: ignore[arg-type]


def test_the_layout_of_a_rename_is_a_layout() -> None:
    with pytest.raises(InputError, match="layout is of the wrong type"):
        Rename("a", "b", "i o -> o i")  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text("abc/", min_size=1, max_size=5), unique=True, max_size=8),
    st.lists(st.tuples(st.sampled_from("abc/"), st.text("abc.", max_size=2)), max_size=4),
)
def test_renaming_is_substitution_in_order_and_loses_no_tensor(names: list[str], steps: list[tuple[str, str]]) -> None:
    places, _ = apply_renames({name: [Destination(name)] for name in names}, [Rename(old, new) for old, new in steps])
    assert list(places) == names
    for name, (place,) in places.items():
        expected = name
        for old, new in steps:
            expected = re.sub(old, new, expected)
        assert place == Destination(expected)


@pytest.mark.parametrize(
    ("names", "wanted", "expected"),
    [
        (["a.x", "a.y"], ["x", "y"], ("a.", "")),
        (["x", "y"], ["a.x", "a.y"], ("", "a.")),
        (["a.b.x", "a.b.y"], ["c.x", "c.y"], ("a.b.", "c.")),
        (["a.x", "a.y", "b.z"], ["x", "y"], ("a.", "")),
        (["x", "a.y"], ["x", "y"], ("", "")),
        (["a/x", "a/y"], ["x", "y"], ("a/", "")),
        (["x"], ["y"], ("", "")),
        ([], ["y"], ("", "")),
        (["ab.x", "a.x"], ["x"], ("a.", "")),
    ],
)
def test_names_are_aligned_by_their_prefixes(names: list[str], wanted: list[str], expected: tuple[str, str]) -> None:
    assert find_prefixes(names, wanted) == expected
    assert swap_prefix("a.x", *find_prefixes(["a.x"], ["x"])) == "x"
