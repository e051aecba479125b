"""`lockstep inspect RECIPE --anchors`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_detector import write_coco

from lockstep.cli.main import main
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import to_toml, with_settings


def test_anchors_are_compared_with_the_objects_and_with_a_proposal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Anchors that are too large for all objects; those that are proposed are settings of the recipe, and fit."""
    annotations = str(write_coco(tmp_path, 6))
    splits = [f"data.{split}={annotations!r}" for split in ("train", "validation", "test")]
    anchors = ["model.layers=[12]", "model.anchor_sizes=[[600.0]]", "model.num_classes=2"]
    path, mended = tmp_path / "mine.toml", tmp_path / "mended.toml"
    path.write_text(to_toml(with_settings(find("bccd"), [*splits, *anchors])))
    assert main(["inspect", str(path), "--anchors", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["unmatched"] == 1
    assert told["proposed_unmatched"] < 0.2
    mended.write_text(to_toml(with_settings(find(str(path)), told["settings"])))
    assert main(["inspect", str(mended), "--anchors"]) == 0
    shown = capsys.readouterr().out
    assert f"its own anchors: {100 * told['proposed_unmatched']:.1f} % of {told['num_objects']} objects" in shown
    assert told["proposal"] in shown


@pytest.mark.parametrize(
    ("word", "hint"), [("mnist", "leave --anchors out"), ("photos", "lockstep train photos --print-recipe > mine.toml")]
)
def test_what_has_no_anchors_is_refused(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", word, "--anchors"]) != 0
    assert hint in capsys.readouterr().err
