"""How a detector takes weights that something else has trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.detection.values import Ssd300, Ssdlite
from lockstep.errors import CheckpointError
from lockstep.models.mobilenet import mobilenet_v3_features
from lockstep.models.vgg import vgg16_features
from lockstep.training.warm_start import fitted, names_in_words, targets_of
from lockstep.weights.assignment import assign_tensors
from lockstep.weights.layouts import CONVOLUTION
from lockstep.weights.names import NameMap, Rename
from lockstep.weights.source import MemorySource
from lockstep.weights.warm_start import Takes, Target, WarmStart, WarmStartReport

BACKBONE = {"backbone.body.conv1.weight": (8, 3, 3, 3), "backbone.body.layer1.0.conv1.weight": (8, 8, 1, 1)}
HEAD = {"head.classes.weight": (6, 8, 1, 1), "head.classes.bias": (6,), "head.boxes.weight": (4, 8, 1, 1)}
DETECTOR = {name: Target(shape, "float32", role="kernel") for name, shape in {**BACKBONE, **HEAD}.items()}


def taken(
    shapes: dict[str, tuple[int, ...]],
    takes: Takes,
    mapping: WarmStart | None = None,
    name_maps: tuple[NameMap, ...] = (),
) -> WarmStartReport:
    """Plan what a detector takes of tensors of these shapes."""
    source = MemorySource({name: torch.zeros(shape) for name, shape in shapes.items()})
    found = fitted(source, DETECTOR, takes, mapping or WarmStart(), prefixes=("backbone.",), name_maps=name_maps)
    return assign_tensors(source, DETECTOR, found).report


def loaded(report: WarmStartReport) -> set[str]:
    return {each.target for each in report.loaded}


def without(prefix: str, shapes: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): shape for name, shape in shapes.items()}


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_classifier_becomes_the_backbone_and_its_own_head_is_left(wrapper: str) -> None:
    classifier = {f"{wrapper}{name}": shape for name, shape in without("backbone.body.", BACKBONE).items()}
    report = taken({**classifier, f"{wrapper}fc.weight": (1000, 8)}, "classifier")
    assert loaded(report) == BACKBONE.keys()
    assert {each.name for each in report.skipped} == HEAD.keys()


def test_of_another_detector_the_features_or_all_are_taken() -> None:
    assert loaded(taken({**BACKBONE, **HEAD}, "features")) == BACKBONE.keys()
    assert loaded(taken({**BACKBONE, **HEAD}, "detector")) == DETECTOR.keys()


def test_heads_of_another_number_of_classes_stay_fresh_and_are_named() -> None:
    other = {**HEAD, "head.classes.weight": (91, 8, 1, 1), "head.classes.bias": (91,)}
    report = taken({**BACKBONE, **other}, "detector")
    assert loaded(report) == {*BACKBONE, "head.boxes.weight"}
    assert [each.target for each in report.mismatched] == ["head.classes.weight", "head.classes.bias"]


def test_a_map_of_the_detectors_own_goes_before_one_that_finds_less() -> None:
    slim = {"net/conv1/weights": (3, 3, 3, 8), "net/unit/weights": (1, 1, 8, 8), "net/logits/weights": (1, 1, 8, 9)}
    own = NameMap(
        (
            Rename("^net/conv1/weights$", "body.conv1.weight", CONVOLUTION),
            Rename("^net/unit/weights$", "body.layer1.0.conv1.weight", CONVOLUTION),
        )
    )
    assert loaded(taken(slim, "classifier", name_maps=(own,))) == BACKBONE.keys()
    with pytest.raises(CheckpointError, match="Too little of the model would be loaded"):
        taken(slim, "classifier")


def test_names_that_the_user_gives_are_taken() -> None:
    mapping = WarmStart(rename=(Rename("^stem$", "backbone.body.conv1.weight"),), require_loaded=0.5)
    report = taken({"stem": (8, 3, 3, 3), "layer1.0.conv1.weight": (8, 8, 1, 1)}, "classifier", mapping)
    assert loaded(report) == {"backbone.body.conv1.weight"}
    with pytest.raises(CheckpointError, match="Too little"):
        taken({"stem": (8, 3, 3, 3)}, "classifier", WarmStart(add_prefix="head."))


def test_next_to_nothing_is_refused() -> None:
    large = {name: (*shape[:1], *shape[1:]) for name, shape in BACKBONE.items()}
    large["backbone.body.conv1.weight"] = (9, 3, 3, 3)
    large["backbone.body.layer1.0.conv1.weight"] = (9, 8, 1, 1)
    with pytest.raises(CheckpointError) as caught:
        taken({**large, "head.classes.bias": (6,)}, "detector")
    assert "require_loaded=0.1" in caught.value.expected
    assert loaded(taken({**large, **HEAD}, "detector", WarmStart(require_loaded=0.0))) == HEAD.keys()


def test_the_log_says_by_which_names() -> None:
    mapping = WarmStart(name_map="tensorflow", add_prefix="backbone.", rename=(Rename("^module[.]", ""),))
    assert names_in_words(mapping) == "name map tensorflow, rename '^module[.]' to '', add_prefix backbone."
    assert not names_in_words(WarmStart())


@pytest.mark.parametrize(
    ("detector", "classifier", "num_new"),
    [
        (Ssd300(num_classes=3), vgg16_features, 21),
        (Ssdlite(num_classes=3, reduced_tail=False), mobilenet_v3_features, 36),
    ],
)
def test_a_classifier_becomes_a_backbone_that_has_it_in_two_parts(detector: Any, classifier: Any, num_new: int) -> None:
    model = detector.build(0)
    source = MemorySource({f"features.{name}": value for name, value in classifier().state_dict().items()})
    targets = targets_of(model)
    mapping = fitted(source, targets, "classifier", WarmStart(), prefixes=("backbone.",), name_maps=model.name_maps)
    report = assign_tensors(source, targets, mapping).report
    assert not report.unexpected
    assert not report.mismatched
    parameters = [name for name in report.missing if targets[name].kind == "parameter"]
    assert len(parameters) == num_new, parameters
    assert all(name.startswith(("backbone.extra.", "backbone.scale_weight")) for name in parameters)
