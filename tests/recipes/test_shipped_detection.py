"""The recipes of detectors, and the data and weights that come with the project for them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.cli.train import SHIPPED_RECIPES
from lockstep.errors import InputError, LockstepError
from lockstep.optim import SGD, MovingAverage
from lockstep.optim.schedules import resolve_schedule
from lockstep.recipes.data import DetectionData
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.runs.build import build_state
from lockstep.runs.inputs import check_inputs
from lockstep.runs.run import run
from lockstep.training.warm_start import warm_start
from lockstep.types import Epochs, Interval
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


@pytest.mark.parametrize("name", ["bccd", "raccoon", "raccoon_mosaic"])
def test_runs_of_minutes_are_saved_every_20_seconds(name: str) -> None:
    assert find(name).checkpoints.every == Interval(20, "seconds")


def precision(recipe: Recipe, workdir: Path) -> float:
    result = run(recipe, workdir).evaluation
    assert result is not None
    return result[MAP]


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)  # three whole trainings on one thread
@pytest.mark.usefixtures("in_the_project")
def test_blood_cells_are_found(tmp_path: Path) -> None:
    found = [precision(replace(find("bccd"), seed=seed), tmp_path / str(seed)) for seed in range(3)]
    assert sum(found) / 3 >= 0.88, found
    assert min(found) >= 0.86, found


@pytest.mark.slow
@pytest.mark.usefixtures("in_the_project")
@pytest.mark.parametrize(("name", "least"), [("raccoon", 0.7), ("raccoon_mosaic", 0.8)])
def test_raccoons_are_found(name: str, least: float, tmp_path: Path) -> None:
    assert precision(find(name), tmp_path) >= least


# On COCO, as torchvision trains --------------------------------------------------------------------------------------

STEPS_OF_EPOCH = 1000
"""More than a warm-up has."""


@pytest.mark.parametrize(
    ("name", "batch_size", "epochs", "rates"),
    [
        ("ssd300_coco", 32, 120, {0: 2e-6, 1_000: 0.002, 79_999: 0.002, 80_000: 0.0002, 110_000: 0.00002}),
        ("ssdlite_coco", 192, 660, {0: 1.5e-4, 330_000: 0.075, 660_000: 0.0}),
        ("faster_rcnn_coco", 16, 26, {0: 2e-5, 1_000: 0.02, 15_999: 0.02, 16_000: 0.002, 22_000: 0.0002}),
        ("mask_rcnn_coco", 16, 26, {0: 2e-5, 1_000: 0.02, 15_999: 0.02, 16_000: 0.002, 22_000: 0.0002}),
        ("keypoint_rcnn_coco", 16, 46, {0: 2e-5, 1_000: 0.02, 35_999: 0.02, 36_000: 0.002, 43_000: 0.0002}),
    ],
)
def test_rates_and_batches_on_coco_are_torchvisions(
    name: str, batch_size: int, epochs: int, rates: dict[int, float]
) -> None:
    given = find(name)
    assert (given.batch_size, given.num_towers, given.end) == (batch_size, 8, Epochs(epochs))
    optimizer = given.optimizer
    assert isinstance(optimizer, SGD)
    schedule = resolve_schedule(optimizer.lr, STEPS_OF_EPOCH * batch_size, batch_size)
    assert {step: schedule(step) for step in rates} == pytest.approx(rates)


@pytest.mark.parametrize("name", [each for each in SHIPPED_RECIPES if each.endswith("_coco")])
def test_labels_are_cocos_and_crowds_are_not_trained_on(name: str) -> None:
    given = find(name)
    assert given.model.num_classes == (1 if name == "keypoint_rcnn_coco" else 90)
    assert isinstance(given.data, DetectionData)
    assert not given.data.crowd
    with pytest.raises(InputError, match="has not been told where its train images are"):
        check_inputs(given, None)


def test_ssd300_starts_from_the_features_of_vgg16_whose_first_layers_stay() -> None:
    given = find("ssd300_coco")
    state = build_state(given, join("cpu"))
    features = {name.removeprefix("backbone."): value for name, value in state.model.named_parameters()}
    vgg = {name: value for name, value in features.items() if name.startswith("features.")}
    assert given.warm_start is not None
    report = warm_start(state, vgg, given.warm_start.mapping)
    assert {each.target for each in report.loaded} == {f"backbone.{name}" for name in vgg}
    assert {*state.frozen.parameters} == {
        f"backbone.features.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")
    }


def test_faster_rcnn_starts_from_a_resnet_whose_first_layers_stay() -> None:
    given = find("faster_rcnn_coco")
    state = build_state(given, join("cpu"))
    body = {
        name.removeprefix("backbone.body."): value
        for name, value in [*state.model.named_parameters(), *state.model.named_buffers()]
        if name.startswith("backbone.body.")
    }
    assert given.warm_start is not None
    report = warm_start(state, body, given.warm_start.mapping)
    assert {each.target for each in report.loaded} == {f"backbone.body.{name}" for name in body}
    assert {name.split(".")[2] for name in state.frozen.parameters} >= {"conv1", "layer1"}
    assert any(name.startswith("backbone.body.layer2.") for name in state.parameters)
