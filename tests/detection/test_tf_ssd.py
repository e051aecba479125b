"""SSDs of the Object Detection API: the published configs make nets that learn and detect."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator

import lockstep as ls
from lockstep.detection.blocks import (
    BatchNonMaxSuppression,
    PostProcessing,
    SsdAnchorGenerator,
)
from lockstep.detection.detector import Targets
from lockstep.detection.tf_configs import BatchNorm, Hyperparams, L2Regularizer, Ssd, SsdFeatureExtractor
from lockstep.detection.tf_feature_maps import EXTRACTORS
from lockstep.detection.tf_ssd import TfSsd
from lockstep.detection.tf_supported import SSD_EXTRACTORS, substituted
from lockstep.errors import InputError
from lockstep.recipes.pipeline_config import import_pipeline

FIXTURES = Path(__file__).parents[1] / "fixtures" / "odapi_configs"
CONFIGS = [
    "ssd_inception_v3_pets",
    "ssd_mobilenet_v1_coco",
    "ssd_mobilenet_v1_focal_loss_pets",
    "ssd_mobilenet_v1_pets",
    "ssd_mobilenet_v2_coco",
    "ssd_mobilenet_v2_mnasfpn_shared_box_predictor_320x320_coco_sync",
    "ssdlite_mobiledet_cpu_320x320_coco_sync_4x4",
    "ssdlite_mobilenet_v1_coco",
    "ssdlite_mobilenet_v3_small_320x320_coco",
]
SIDE = 80
GOLDEN = Path(__file__).parents[1] / "golden" / "slim_nets_golden.npz"


def published(name: str) -> Ssd:
    """The config with thin layers and few classes, so that it is quick."""
    path = FIXTURES / f"{name}.config"
    model = substituted(import_pipeline(path.read_text(), path.name, path.stem).recipe.model)  # type: ignore[arg-type]
    assert isinstance(model, Ssd)
    thin = replace(model.feature_extractor, depth_multiplier=0.1)
    return replace(model, num_classes=3, feature_extractor=thin)


def targets() -> Targets:
    boxes = [torch.tensor([[10.0, 10.0, 60.0, 50.0], [0.0, 20.0, 40.0, 80.0]]), torch.zeros(0, 4)]
    classes = torch.eye(3)[[0, 2]]
    return Targets(
        boxes=boxes,
        labels=[torch.tensor([1, 3]), torch.zeros(0, dtype=torch.int64)],
        classes=[classes, torch.zeros(0, 3)],
        weights=[torch.ones(2), torch.zeros(0)],
        is_crowd=[torch.zeros(2, dtype=torch.bool), torch.zeros(0, dtype=torch.bool)],
        shape=(SIDE, SIDE),
    )


def images() -> torch.Tensor:
    return 255 * torch.rand(2, 3, SIDE, SIDE, generator=Generator().manual_seed(0))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (number % 3 > 0)) for number, name in enumerate(CONFIGS)]
)
def test_a_published_config_predicts_has_losses_and_detects(name: str) -> None:
    torch.set_num_threads(1)
    model = published(name).build(seed=1).train()
    assigned = model.assign(targets())
    predictions = model(model.preprocess(images()), assigned)
    losses = model.losses(predictions, assigned)
    assert {*losses} == {"classification", "localization", "regularization"}
    assert all(0 < loss.item() < 1e5 for loss in losses.values())
    assert model.counts(assigned)["classification"] >= 2
    sum(losses.values(), start=torch.zeros(())).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        model.eval()
        detections = model.postprocess(model(model.preprocess(images())))
    assert [len(each.boxes) <= 100 for each in detections] == [True, True]


def made(**given: Any) -> TfSsd:
    model = replace(published("ssd_mobilenet_v1_pets"), **given).build(seed=3)
    assert isinstance(model, TfSsd)
    return model


def test_the_first_weights_depend_on_the_seed_alone() -> None:
    stream = torch.get_rng_state()
    first, second = made().state_dict(), made().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), stream)


def test_the_penalty_is_that_of_the_configuration_and_of_the_backbone() -> None:
    config = published("ssd_mobilenet_v1_pets")
    model = made()
    of_losses = model.losses(model(model.preprocess(images()), None), model.assign(targets()))["regularization"]
    kernels = [parameter for name, parameter in model.named_parameters() if parameter.ndim == 4]
    assert config.feature_extractor.conv_hyperparams is not None
    assert config.feature_extractor.conv_hyperparams.regularizer == L2Regularizer(4e-5)
    assert of_losses.item() == pytest.approx(4e-5 / 2 * sum(each.square().sum().item() for each in kernels), rel=1e-5)
    plain = made(add_regularization_loss=False)
    assert "regularization" not in plain.losses(plain(plain.preprocess(images())), plain.assign(targets()))


@pytest.mark.parametrize(
    ("background", "zeros", "logits", "first"), [(True, False, 4, 1), (True, True, 4, 0), (False, False, 3, 0)]
)
def test_the_background_may_be_a_class_or_none(background: bool, zeros: bool, logits: int, first: int) -> None:
    model = made(add_background_class=background, encode_background_as_zeros=zeros)
    assigned = model.assign(targets())
    assert model(model.preprocess(images()))["logits"].shape[-1] == assigned.classes.shape[-1] == logits
    assert assigned.classes[1, 0, 0] == first


@pytest.mark.parametrize(
    ("takes", "prefix", "share"),
    [("classifier", "", "backbone.features."), ("features", "FeatureExtractor/", "backbone."), ("detector", "", "")],
)
def test_what_is_taken_of_a_checkpoint_is_found_by_its_variables(takes: Any, prefix: str, share: str) -> None:
    """The variables are those that TensorFlow gave an SSD on MobileNet v1, see tests/golden."""
    with np.load(GOLDEN, allow_pickle=False) as file:
        shapes = json.loads(str(file["ssd_mobilenet_v1/variables"]))
    if takes == "classifier":
        of_net = {name.removeprefix("FeatureExtractor/"): shape for name, shape in shapes.items()}
        shapes = {
            name: shape for name, shape in of_net.items() if re.match(r"MobilenetV1/Conv2d_\d+(_\w+wise)?/", name)
        }
    values = {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()}
    config = published("ssd_mobilenet_v1_pets")
    wide = replace(config, feature_extractor=replace(config.feature_extractor, depth_multiplier=0.75))
    state = ls.TrainState(wide.build(0), ls.optim.SGD(lr=0.1))
    ls.warm_start(state, values, takes=takes)
    model = state.model
    loaded = {name for name, parameter in model.named_parameters() if (parameter == 0.5).all()}
    assert loaded == {name for name, _ in model.named_parameters() if name.startswith(share)}


def test_anchors_must_be_as_many_as_feature_maps() -> None:
    with pytest.raises(InputError, match="anchors for 4 feature maps, and 6 feature maps"):
        made(anchor_generator=SsdAnchorGenerator(num_layers=4))


def test_images_smaller_than_the_net_can_take_are_refused() -> None:
    with pytest.raises(InputError, match="each side 33 pixels or more"):
        made()(torch.zeros(1, 3, 32, 40))


def test_the_list_of_extractors_is_that_of_those_that_are_made() -> None:
    assert {SsdFeatureExtractor(each).net for each in SSD_EXTRACTORS} == EXTRACTORS.keys()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"use_confidences_as_targets": True}, "model.use_confidences_as_targets"),
        ({"explicit_background_class": True}, "model.explicit_background_class"),
        ({"untrained_parts": ("equalization_loss",)}, r"model.untrained_parts=\['equalization_loss'\]"),
        (
            {"post_processing": PostProcessing(BatchNonMaxSuppression(max_classes_per_detection=2))},
            "max_classes_per_detection=2",
        ),
        (
            {
                "freeze_batchnorm": True,
                "feature_extractor": SsdFeatureExtractor(
                    "ssd_mobilenet_v1", conv_hyperparams=Hyperparams(force_use_bias=True)
                ),
            },
            "model.feature_extractor.conv_hyperparams.force_use_bias",
        ),
        (
            {
                "feature_extractor": SsdFeatureExtractor(
                    "ssd_mobilenet_v2_keras", conv_hyperparams=Hyperparams(batch_norm=BatchNorm(train=False))
                )
            },
            "batch_norm.train=false, with layers of Keras",
        ),
        ({"feature_extractor": SsdFeatureExtractor("ssd_inception_v3_keras")}, "no feature extractor"),
        (
            {"feature_extractor": SsdFeatureExtractor("ssd_resnet50_v1_fpn", use_depthwise=True)},
            "use_depthwise=True, of a ResNet",
        ),
        ({"feature_extractor": SsdFeatureExtractor("ssd_inception_v3")}, "override_base_feature_extractor"),
    ],
)
def test_what_is_not_there_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        made(**given)
