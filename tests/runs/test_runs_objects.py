"""What the objects of the data say before a detector is trained: anchors that match none of them, classes unseen."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_detector import CATEGORIES, Objects, TinyDetector, tiny_recipe, write_coco
from torch import Tensor

import lockstep as ls
from lockstep.checkpoints.retention import Retention
from lockstep.detection.detector import Detections
from lockstep.detection.values import FasterRcnnFpn, Fcos, SqueezeSsd
from lockstep.recipes.parts import Checkpoints, DetectionEvaluation
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.runs.objects import proposed_anchors
from lockstep.runs.run import Run
from lockstep.workers.rank import leave

Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a run; `change` gets its recipe."""
    path = write_coco(tmp_path, 6)

    def begin(change: Callable[[Recipe], Recipe] = lambda recipe: recipe, reader: Any = None) -> Run:
        leave()
        return Run(change(tiny_recipe(path)).with_parts(reader=reader), tmp_path / "run", ls.join("cpu"))

    return begin


def rewritten(tmp_path: Path, change: Callable[[dict[str, Any]], object], name: str = "annotations.json") -> str:
    document = json.loads((tmp_path / "annotations.json").read_text())
    change(document)
    (tmp_path / name).write_text(json.dumps(document))
    return str(tmp_path / name)


def test_the_share_of_objects_that_anchors_match_is_told(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    start()
    assert "overlap no anchor by an IoU of 0.5, 0.0 % none by 0.05" in caplog.text


def test_anchors_that_match_nothing_are_refused(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny(self: Any, shape: tuple[int, int], device: torch.device) -> Tensor:
        corners = torch.tensor([[0.0, 0, 1, 1], [9, 9, 10, 10]])
        assert shape == (32, 48)
        return corners

    monkeypatch.setattr(TinyDetector, "anchors", tiny)
    with pytest.raises(ls.DataError) as caught:
        start()
    error = caught.value
    assert error.what == "The anchors of the detector match next to none of the objects of the data."
    assert str(error.given).endswith("objects overlap no anchor by 0.05 (IoU)")
    assert error.expected == "at most 50 % of them"
    assert "pixels on the network's input: choose anchors of such sizes, or another data.resizer" in error.hint
    assert "anchors that the objects fit: " in error.hint
    assert not (tmp_path / "run").exists()


def test_anchors_that_are_proposed_are_settings_of_the_model() -> None:
    sides = torch.tensor([[20.0, 20], [40, 20], [60, 30], [50, 100], [40, 80], [120, 120]])
    for model in (SqueezeSsd(3), FasterRcnnFpn(3)):
        given = replace(find("bccd"), model=model)
        words = shlex.split(proposed_anchors(model, sides)[0].removeprefix("anchors that the objects fit: "))
        made: Any = with_settings(given, words[1::2]).model
        assert made.anchor_ratios == (0.5, 1.0, 2.0)
        sizes = sum(made.anchor_sizes, ()) if isinstance(made, SqueezeSsd) else made.anchor_sizes
        assert len(sizes) == (8 if isinstance(made, SqueezeSsd) else 5)
        assert min(sizes) < 25 < 110 < max(sizes)
    assert "pixels, of 0.5, 1, 2 (height over width)" in proposed_anchors(Fcos(3), sides)[0]
    of_lines, _ = proposed_anchors(SqueezeSsd(3), torch.tensor([[1.0, 300], [1, 500]]))
    assert "model.anchor_ratios=[0.01, 1.0]" in of_lines, "none is 0, which no recipe takes"


@pytest.mark.parametrize(("name", "value"), [("anchors", lambda *_: None), ("anchors_fit_objects", False)])
def test_a_detector_without_anchors_or_with_points_is_not_asked(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    monkeypatch.setattr(TinyDetector, name, value)
    start()
    assert "anchor" not in caplog.text


def test_a_class_that_is_never_seen_is_named(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def without_green(document: dict[str, Any]) -> None:
        document["annotations"] = [each for each in document["annotations"] if each["category_id"] == 3]

    rewritten(tmp_path, without_green)
    start()
    assert "no object to train on is of these classes, which the detector cannot learn: green" in caplog.text


def without_objects(document: dict[str, Any]) -> None:
    document["annotations"] = []


def test_data_without_an_object_is_not_trained_on(start: Start, tmp_path: Path) -> None:
    rewritten(tmp_path, without_objects)
    with pytest.raises(ls.DataError) as caught:
        start()
    assert caught.value.what == "There are no objects to train on."
    assert caught.value.given == "6 images, and no object on any of them"
    assert "check that data.train names the annotations of these images" in caught.value.hint
    assert not (tmp_path / "run").exists()


def test_objects_that_are_all_left_out_are_none(start: Start) -> None:
    class OfCrowds(Objects):
        def read_batch(self, indices: Any) -> dict[str, Any]:
            batch = super().read_batch(indices)
            return {**batch, "is_crowd": [labels > 0 for labels in batch["labels"]]}

    start(reader=lambda split: OfCrowds())
    with pytest.raises(ls.DataError, match=r"There are no objects to train on\."):
        start(lambda recipe: replace(recipe, data=replace(recipe.data, crowd=False)), lambda split: OfCrowds())


def test_first_images_without_objects_are_told(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    class Late(Objects):
        def read_batch(self, indices: Any) -> dict[str, Any]:
            batch, is_late = super().read_batch(indices % 24), indices >= 256
            names = ("boxes", "labels")
            return batch | {
                name: [each if late else each[:0] for each, late in zip(batch[name], is_late, strict=True)]
                for name in names
            }

        def __len__(self) -> int:
            return 300

    start(reader=lambda split: Late())
    assert "no object to train on is on the first 256 of 300 images" in caplog.text


def test_data_without_an_object_is_not_scored_by(start: Start, tmp_path: Path) -> None:
    empty = rewritten(tmp_path, without_objects, "empty.json")

    def scored(recipe: Recipe, **how: Any) -> Recipe:
        detection = DetectionEvaluation(**how)
        data, evaluate = replace(recipe.data, validation=empty), replace(recipe.evaluate, detection=detection)
        return replace(recipe, data=data, evaluate=evaluate)

    with pytest.raises(ls.DataError) as caught:
        start(scored)
    assert caught.value.what == "There are no objects on the validation images to score the detector by."
    assert "check that data.validation names" in caught.value.hint
    start(lambda recipe: scored(recipe, ignore_ground_truth=True, export_path=str(tmp_path / "found.json")))


def test_a_model_of_more_classes_than_the_data_is_told(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def numbered_from_one(document: dict[str, Any]) -> None:
        numbers = {old: new for new, old in enumerate(CATEGORIES, 1)}
        for each in document["categories"]:
            each["id"] = numbers[each["id"]]
        for each in document["annotations"]:
            each["category_id"] = numbers[each["category_id"]]

    rewritten(tmp_path, numbered_from_one)
    start(lambda recipe: replace(recipe, model=replace(recipe.model, num_classes=5))).run(conclude=False)
    assert "the model has 5 classes, the data 2 (model.num_classes=2)" in caplog.text


def test_a_model_of_fewer_classes_than_the_data_is_refused(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ls.DataError, match="more classes than the detector") as caught:
        start(lambda recipe: replace(recipe, model=replace(recipe.model, num_classes=1)))
    assert "--set model.num_classes=2" in caught.value.hint
    assert not (tmp_path / "run").exists()


def test_labels_beyond_the_classes_are_refused_by_the_first_example_that_has_one(start: Start, tmp_path: Path) -> None:
    class Beyond(Objects):
        def read_batch(self, indices: Any) -> dict[str, Any]:
            batch = super().read_batch(indices)
            return {**batch, "labels": [labels + 4 for labels in batch["labels"]]}

    with pytest.raises(ls.DataError) as caught:
        start(reader=lambda split: Beyond())
    error = caught.value
    assert error.what == "objects-1: object 0 has labels that cannot be used."
    assert error.expected == "1 to 2: the classes of the detector, as the data numbers them"
    assert "model.num_classes, data.labels_offset, data.label_map" in error.hint
    assert not (tmp_path / "run").exists()


def test_a_reader_that_draws_leaves_the_random_streams_alone(start: Start) -> None:
    class Drawing(Objects):
        def read_batch(self, indices: Any) -> dict[str, Any]:
            torch.rand(len(indices))
            return super().read_batch(indices)

    before = torch.get_rng_state()
    start(reader=lambda split: Drawing())
    assert torch.equal(torch.get_rng_state(), before)


def test_classes_with_other_labels_to_validate_on_are_refused(start: Start, tmp_path: Path) -> None:
    def exchanged(document: dict[str, Any]) -> None:
        first, second = document["categories"]
        first["name"], second["name"] = second["name"], first["name"]

    other = rewritten(tmp_path, exchanged, "other.json")
    with pytest.raises(ls.DataError) as caught:
        start(lambda recipe: replace(recipe, data=replace(recipe.data, validation=other)))
    error = caught.value
    assert error.what == "The classes of the validation examples have other labels than those to train on."
    assert error.given == "label 1 is 'green'; label 1 is 'red' to train on"
    assert "set data.label_map to" in error.hint
    assert not (tmp_path / "run").exists()


def test_other_ids_of_the_same_classes_are_the_same(start: Start, tmp_path: Path) -> None:
    def renumbered(document: dict[str, Any]) -> None:
        for each in document["categories"]:
            each["id"] += 100
        for each in document["annotations"]:
            each["category_id"] += 100

    other = rewritten(tmp_path, renumbered, "other.json")
    start(lambda recipe: replace(recipe, data=replace(recipe.data, validation=other)))


def test_images_smaller_than_the_stem_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fcos, "smallest_image", 33)
    with pytest.raises(ls.InputError) as caught:
        replace(tiny_recipe(tmp_path / "annotations.json"), model=Fcos(2))
    assert caught.value.what == "The images are too small for Fcos."
    assert caught.value.given == "data.resizer.height=32"
    assert caught.value.hint.startswith("set data.resizer.height to 33 or more")


def test_the_best_checkpoint_needs_objects_to_validate_on(start: Start, tmp_path: Path) -> None:
    def without_validation(recipe: Recipe) -> Recipe:
        retention = Retention(best=f"validation/{recipe.chosen_task.score_names[0]}")
        data, checkpoints = replace(recipe.data, validation=None), Checkpoints(retention=retention)  # type: ignore[type-var, call-arg]
        return replace(recipe, data=data, checkpoints=checkpoints)

    with pytest.raises(ls.InputError, match="there are no validation examples") as caught:
        start(without_validation)
    assert "checkpoints.retention.best='validation/PascalBoxes_Precision/mAP@0.5IOU'" in str(caught.value.given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["boxes", "scores"])
def test_detections_that_are_not_finite_name_their_example(
    start: Start, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = TinyDetector.postprocess

    def spoiled(self: TinyDetector, predictions: Any) -> Any:
        return [each._replace(**{name: getattr(each, name) * float("nan")}) for each in found(self, predictions)]

    monkeypatch.setattr(TinyDetector, "postprocess", spoiled)
    with pytest.raises(ls.NonFiniteError, match=rf"The detector has found {name} on 7 that are not finite"):
        start().run()


def test_a_detector_that_finds_nothing_is_scored(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    found = TinyDetector.postprocess

    def nothing(self: TinyDetector, predictions: Any) -> Any:
        return [Detections(*(values[:0] for values in each[:3])) for each in found(self, predictions)]

    monkeypatch.setattr(TinyDetector, "postprocess", nothing)
    assert start().run().evaluation["PascalBoxes_Precision/mAP@0.5IOU"] == 0  # type: ignore[index]
