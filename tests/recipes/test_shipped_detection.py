"""The recipes of detectors, and the data and weights that come with the project for them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.optim import MovingAverage
from lockstep.progress import Epochs
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.runs.build import build_state
from lockstep.runs.inputs import check_inputs
from lockstep.runs.run import run
from lockstep.training.warm_start import warm_start
from lockstep.workers.rank import join

ROOT = Path(__file__).parents[2]
MAP = "PascalBoxes_Precision/mAP@0.5IOU"


@pytest.fixture
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder is that of the project, as for its demos."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", ["bccd", "raccoon"])
def test_data_are_the_files_that_were_published(name: str) -> None:
    folder = ROOT / "data" / name
    listed = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {*listed} == there - {"SHA256SUMS", "SOURCE.md"}
    for path, checksum in listed.items():
        assert hashlib.sha256((folder / path).read_bytes()).hexdigest() == checksum, path


@pytest.mark.usefixtures("in_the_project")
@pytest.mark.parametrize("name", ["bccd", "raccoon"])
def test_data_and_weights_are_found_from_the_project(name: str) -> None:
    check_inputs(find(name), None)


@pytest.mark.parametrize("name", ["bccd", "raccoon"])
def test_elsewhere_what_is_missing_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LockstepError, match=f"data/{name}"):
        check_inputs(find(name), None)


@pytest.mark.usefixtures("in_the_project")
def test_all_of_squeezenet_is_loaded_and_its_first_layers_stay() -> None:
    given = find("bccd")
    state = build_state(given, join("cpu"))
    assert given.warm_start is not None
    report = warm_start(state, given.warm_start.path or "", given.warm_start.mapping)
    assert {each.target for each in report.loaded} == {
        name for name, _ in state.model.named_parameters() if name.startswith("backbone.features.")
    }
    assert not report.missing
    assert not report.unexpected
    assert all(name.startswith(("backbone.features.0.", "backbone.features.3.")) for name in state.frozen.parameters)


def test_bccd_trains_on_two_lists_and_is_scored_on_the_third() -> None:
    given = find("bccd")
    assert (given.data.train_split, given.data.validation, given.data.test_split) == ("trainval", None, None)
    assert (given.num_towers, given.batch_size, given.end) == (2, 8, Epochs(15))
    assert (given.average, given.evaluate.weights) == (MovingAverage(0.98), "average")


def precision(recipe: Recipe, workdir: Path) -> float:
    result = run(recipe, workdir).evaluation
    assert result is not None
    return result[MAP]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("in_the_project")
def test_blood_cells_are_found(tmp_path: Path) -> None:
    found = [precision(replace(find("bccd"), seed=seed), tmp_path / str(seed)) for seed in range(3)]
    assert sum(found) / 3 >= 0.88, found
    assert min(found) >= 0.86, found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("in_the_project")
def test_raccoons_are_found(tmp_path: Path) -> None:
    assert precision(find("raccoon"), tmp_path) >= 0.7
