"""Names in a message: the first few, and how many more there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.listing import hint_for_path, shorten


def test_a_few_names_are_all_listed() -> None:
    assert [shorten([]), shorten(["a"]), shorten([*"abcde"])] == ["", "a", "a, b, c, d, e"]


def test_of_many_names_the_first_are_listed_and_the_others_counted() -> None:
    assert shorten([*"abcdef"]) == "a, b, c, d, e and 1 more"
    assert shorten(["a"] * 1236, 2) == "a, a and 1,234 more"
    assert shorten([*"abc"], 2, separator="; ") == "a; b and 1 more"


def test_a_path_that_leads_nowhere_may_mean_the_closest_name_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs/mnist").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hint_for_path("runs/mnist2") == "did you mean runs/mnist?"
    assert hint_for_path("no/mnist") == f"check the path; it is read from {tmp_path}"
    assert hint_for_path(tmp_path / "photos") == "check the path"


def test_a_name_alone_may_mean_the_run_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs/mnist").mkdir(parents=True)
    (tmp_path / "mnist2").touch()
    monkeypatch.chdir(tmp_path)
    assert hint_for_path("mnist") == "did you mean runs/mnist?"
