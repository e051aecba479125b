"""Which published configs are trained, which are with another feature extractor, and which are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.detection.blocks import (
    L1LocalizationLoss,
    MultiscaleAnchorGenerator,
    PenaltyReducedLogisticFocalLoss,
)
from lockstep.detection.tf_center_net_configs import (
    CenterNet,
    CenterNetFeatureExtractor,
    KeypointEstimation,
    KeypointLoss,
    ObjectCenterParams,
    ObjectDetection,
    TfDetector,
)
from lockstep.detection.tf_configs import (
    BidirectionalFeaturePyramidNetworks,
    FasterRcnn,
    FeaturePyramidNetworks,
    RfcnBoxPredictor,
    Ssd,
    SsdFeatureExtractor,
    WeightSharedConvolutionalBoxPredictor,
)
from lockstep.detection.tf_supported import check_supported, substituted, substitutes
from lockstep.errors import InputError
from lockstep.recipes.pipeline_config import import_pipeline

FIXTURES = Path(__file__).parents[1] / "fixtures" / "odapi_configs"
TRAINED = {
    "ssd_mobilenet_v2_quantized_300x300_coco",
    "ssd_mobilenet_v1_0.75_depth_quantized_300x300_pets_sync",
    "facessd_mobilenet_v2_quantized_320x320_open_image_v4",
    "faster_rcnn_inception_resnet_v2_atrous_oid",
    "faster_rcnn_inception_v2_coco",
    "faster_rcnn_resnet101_atrous_coco",
    "faster_rcnn_resnet101_fgvc",
    "faster_rcnn_resnet101_voc07",
    "faster_rcnn_resnet50_coco",
    "mask_rcnn_inception_resnet_v2_atrous_coco",
    "mask_rcnn_resnet101_pets",
    "mask_rcnn_resnet50_atrous_coco",
    "rfcn_resnet101_pets",
    "ssd_inception_v2_coco",
    "ssd_inception_v3_pets",
    "ssd_mobilenet_v1_coco",
    "ssd_mobilenet_v1_focal_loss_pets",
    "ssd_mobilenet_v1_pets",
    "ssd_mobilenet_v2_coco",
    "ssdlite_mobilenet_v1_coco",
    "ssdlite_mobilenet_v3_small_320x320_coco",
}
SUBSTITUTED = {
    "ssd_mobilenet_v2_mnasfpn_shared_box_predictor_320x320_coco_sync": "ssd_mobilenet_v2_fpn",
    "ssdlite_mobiledet_cpu_320x320_coco_sync_4x4": "ssd_mobilenet_v3_large",
    "ssdlite_mobiledet_gpu_320x320_coco_sync_4x4": "ssd_mobilenet_v2",
}
REFUSED = {
    "context_rcnn_resnet101_snapshot_serengeti": "Context R-CNN is not trained",
}


PUBLISHED: list[tuple[str, str, int, int, str]] = [
    ("faster_rcnn_resnet50", "", 4, 0, "faster_rcnn_resnet50"),
    ("faster_rcnn_resnet101", "", 9, 0, "faster_rcnn_resnet101"),
    ("faster_rcnn_resnet101", "context_config", 2, 0, "faster_rcnn_resnet101"),
    ("faster_rcnn_resnet101", "rfcn_box_predictor", 2, 0, "faster_rcnn_resnet101"),
    ("faster_rcnn_resnet152", "", 2, 0, "faster_rcnn_resnet152"),
    ("faster_rcnn_inception_v2", "", 3, 0, "faster_rcnn_inception_v2"),
    ("faster_rcnn_inception_resnet_v2", "", 6, 0, "faster_rcnn_inception_resnet_v2"),
    ("faster_rcnn_nas", "", 1, 0, "faster_rcnn_inception_resnet_v2"),
    ("faster_rcnn_resnet50_keras", "", 0, 3, "faster_rcnn_resnet50_keras"),
    ("faster_rcnn_resnet101_keras", "", 0, 3, "faster_rcnn_resnet101_keras"),
    ("faster_rcnn_resnet152_keras", "", 0, 3, "faster_rcnn_resnet152_keras"),
    ("faster_rcnn_resnet50_fpn_keras", "fpn", 0, 1, ""),
    ("faster_rcnn_inception_resnet_v2_keras", "resize_masks", 0, 1, "faster_rcnn_inception_resnet_v2_keras"),
    ("embedded_ssd_mobilenet_v1", "", 1, 0, "ssd_mobilenet_v1"),
    ("ssd_inception_v2", "", 2, 0, "ssd_inception_v2"),
    ("ssd_inception_v3", "", 1, 0, "ssd_inception_v3"),
    ("ssd_mobilenet_v1", "", 7, 0, "ssd_mobilenet_v1"),
    ("ssd_mobilenet_v1", "quantization", 3, 0, "ssd_mobilenet_v1"),
    ("ssd_mobilenet_v1_fpn", "", 1, 0, "ssd_mobilenet_v1_fpn"),
    ("ssd_mobilenet_v1_ppn", "", 1, 0, "ssd_mobilenet_v1"),
    ("ssd_mobilenet_v2", "", 4, 0, "ssd_mobilenet_v2"),
    ("ssd_mobilenet_v2", "quantization", 2, 0, "ssd_mobilenet_v2"),
    ("ssd_mobilenet_v2_fpn", "quantization", 1, 0, "ssd_mobilenet_v2_fpn"),
    ("ssd_mobilenet_v2_mnasfpn", "", 1, 0, "ssd_mobilenet_v2_fpn"),
    ("ssd_mobilenet_v3_large", "", 1, 0, "ssd_mobilenet_v3_large"),
    ("ssd_mobilenet_v3_small", "", 1, 0, "ssd_mobilenet_v3_small"),
    ("ssd_mobilenet_edgetpu", "", 1, 0, "ssd_mobilenet_v2"),
    ("ssd_mobilenet_edgetpu", "quantization", 1, 0, "ssd_mobilenet_v2"),
    ("ssd_mobiledet_cpu", "", 1, 0, "ssd_mobilenet_v3_large"),
    ("ssd_mobiledet_dsp", "", 1, 0, "ssd_mobilenet_v2"),
    ("ssd_mobiledet_edgetpu", "", 1, 0, "ssd_mobilenet_v2"),
    ("ssd_mobiledet_gpu", "", 1, 0, "ssd_mobilenet_v2"),
    ("ssd_resnet50_v1_fpn", "", 1, 0, "ssd_resnet50_v1_fpn"),
    ("ssd_resnet101_v1_fpn", "", 1, 0, "ssd_resnet101_v1_fpn"),
    ("ssd_mobilenet_v2_keras", "", 1, 1, "ssd_mobilenet_v2_keras"),
    ("ssd_mobilenet_v1_fpn_keras", "", 0, 1, "ssd_mobilenet_v1_fpn_keras"),
    ("ssd_mobilenet_v2_fpn_keras", "", 0, 2, "ssd_mobilenet_v2_fpn_keras"),
    ("ssd_resnet50_v1_fpn_keras", "", 0, 2, "ssd_resnet50_v1_fpn_keras"),
    ("ssd_resnet101_v1_fpn_keras", "", 0, 2, "ssd_resnet101_v1_fpn_keras"),
    ("ssd_resnet152_v1_fpn_keras", "", 0, 2, "ssd_resnet152_v1_fpn_keras"),
    ("ssd_efficientnet-b0_bifpn_keras", "bifpn", 0, 1, "ssd_efficientnet-b0_bifpn_keras"),
    ("ssd_efficientnet-b1_bifpn_keras", "bifpn", 0, 1, "ssd_efficientnet-b1_bifpn_keras"),
    ("ssd_efficientnet-b2_bifpn_keras", "bifpn", 0, 1, "ssd_efficientnet-b2_bifpn_keras"),
    ("ssd_efficientnet-b3_bifpn_keras", "bifpn", 0, 1, "ssd_efficientnet-b3_bifpn_keras"),
    ("ssd_efficientnet-b4_bifpn_keras", "bifpn", 0, 1, "ssd_efficientnet-b4_bifpn_keras"),
    ("ssd_efficientnet-b5_bifpn_keras", "bifpn", 0, 1, "ssd_efficientnet-b5_bifpn_keras"),
    ("ssd_efficientnet-b6_bifpn_keras", "bifpn", 0, 1, "ssd_efficientnet-b6_bifpn_keras"),
    ("ssd_efficientnet-b7_bifpn_keras", "bifpn", 0, 1, "ssd_efficientnet-b7_bifpn_keras"),
    ("hourglass_104", "", 0, 2, "hourglass_104"),
    ("resnet_v1_101_fpn", "", 0, 1, "resnet_v1_101_fpn"),
    ("resnet_v2_50", "", 0, 1, "resnet_v2_50"),
    ("hourglass_104", "keypoint_estimation_task", 0, 2, "hourglass_104"),
    ("resnet_v1_50_fpn", "keypoint_estimation_task", 0, 1, "resnet_v1_50_fpn"),
    ("resnet_v2_50", "keypoint_estimation_task", 0, 1, "resnet_v2_50"),
    ("hourglass_104", "deepmac_mask_estimation", 0, 3, ""),
]
"""Of all published configs: the feature extractor, what else nothing trains, how many configs of TensorFlow 1 and 2
have both, and with which feature extractor they are trained; none: they are refused."""


def is_as_it_is(row: tuple[str, str, int, int, str]) -> bool:
    """Whether such configs are trained with all that they ask for."""
    extractor, part, _, _, nearest = row
    return extractor == nearest and part != "context_config"


def with_extractor(extractor: str, part: Any) -> TfDetector:
    """A published model, with this feature extractor and what its configs ask for beside it."""
    if extractor.startswith(("hourglass", "resnet_v", "mobilenet_v2")):
        boxes, heat = (
            ObjectDetection(L1LocalizationLoss()),
            ObjectCenterParams(PenaltyReducedLogisticFocalLoss(2.0, 4.0)),
        )
        losses = KeypointLoss(boxes.localization_loss, heat.classification_loss)
        tasks = (KeypointEstimation(losses, keypoint_labels=("nose",)),) if part == "keypoint_estimation_task" else ()
        parts = (part,) if part and not tasks else ()
        return CenterNet(90, CenterNetFeatureExtractor(extractor), boxes, heat, tasks, parts)
    if extractor.startswith("faster_rcnn"):
        two_stages = model_of("faster_rcnn_resnet50_coco")
        assert isinstance(two_stages, FasterRcnn)
        own: Any = replace(two_stages.feature_extractor, type=extractor)
        if part == "fpn":
            return replace(two_stages, feature_extractor=replace(own, fpn=FeaturePyramidNetworks()))
        if part == "resize_masks":
            return replace(two_stages, feature_extractor=own, resize_masks=False)
        if part == "rfcn_box_predictor":
            return replace(two_stages, feature_extractor=own, second_stage_box_predictor=RfcnBoxPredictor())
        return replace(two_stages, feature_extractor=own, untrained_parts=(part,) if part else ())
    model = model_of("ssd_mobilenet_v1_coco")
    if "fpn" in extractor:
        predictor = WeightSharedConvolutionalBoxPredictor(depth=64)
        pyramid = None if part == "bifpn" else FeaturePyramidNetworks()
        twofold = BidirectionalFeaturePyramidNetworks(3, 64) if part == "bifpn" else None
        anchors = MultiscaleAnchorGenerator(aspect_ratios=(1.0,))
        model = replace(model, box_predictor=predictor, anchor_generator=anchors)
        own = replace(model.feature_extractor, fpn=pyramid, bifpn=twofold, depth_multiplier=1.0)
    else:
        own = replace(model.feature_extractor, override_base_feature_extractor_hyperparams="inception" in extractor)
    parts = (part,) if part not in ("", "bifpn", "quantization") else ()
    return replace(model, feature_extractor=replace(own, type=extractor), untrained_parts=parts)


@pytest.mark.parametrize(("extractor", "part", "nearest"), [(row[0], row[1], row[4]) for row in PUBLISHED])
def test_each_published_feature_extractor_is_trained_has_a_nearest_one_or_is_refused(
    extractor: str, part: str, nearest: str
) -> None:
    model = with_extractor(extractor, part)
    taken = substituted(model)
    if nearest:
        check_supported(taken)
        assert taken.feature_extractor.type == nearest
        assert (model == taken) == is_as_it_is((extractor, part, 0, 0, nearest))
    else:
        with pytest.raises(InputError):
            check_supported(taken)


def test_the_page_counts_all_published_configs() -> None:
    counts = {
        version: [
            sum(row[column] for row in PUBLISHED if said(row))
            for said in (is_as_it_is, lambda row: row[4] and not is_as_it_is(row), lambda row: not row[4])
        ]
        for version, column in {"TensorFlow 1": 2, "TensorFlow 2": 3}.items()
    }
    assert {version: sum(each) for version, each in counts.items()} == {"TensorFlow 1": 64, "TensorFlow 2": 40}
    page = (Path(__file__).parents[2] / "docs/reference/object-detection-api.md").read_text()
    for version, each in counts.items():
        row = " | ".join(map(str, [version, sum(each), *each]))
        assert f"| {row} |" in page


def model_of(name: str) -> Ssd | FasterRcnn:
    path = FIXTURES / f"{name}.config"
    model = import_pipeline(path.read_text(), path.name, path.stem).recipe.model
    assert isinstance(model, Ssd | FasterRcnn)
    return model


def test_the_nearest_of_a_center_net_is_of_its_size() -> None:
    given = {"mobilenet_v2_fpn_sep_conv": "mobilenet_v2_fpn", "resnet_v1_101": "resnet_v2_101"}
    assert {name: substituted(with_extractor(name, "")).feature_extractor.type for name in given} == given


def test_the_table_has_all_published_configs() -> None:
    names = {path.stem for path in FIXTURES.glob("*.config")}
    assert names == TRAINED | SUBSTITUTED.keys() | REFUSED.keys()
    assert (len(TRAINED), len(SUBSTITUTED), len(REFUSED)) == (21, 3, 1)


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_a_config_whose_parts_are_there_is_taken_as_it_is(name: str) -> None:
    model = model_of(name)
    check_supported(model)
    assert not substitutes(model)
    assert substituted(model) == model


@pytest.mark.parametrize("name", sorted(SUBSTITUTED))
def test_a_feature_extractor_that_is_not_there_has_a_nearest_one(name: str) -> None:
    model, nearest = model_of(name), SUBSTITUTED[name]
    with pytest.raises(InputError) as caught:
        check_supported(model)
    assert caught.value.what == f"There is no feature extractor {model.feature_extractor.type} here."
    assert nearest in caught.value.hint
    assert "--substitute-model" in caught.value.hint
    check_supported(substituted(model))
    assert substituted(model).feature_extractor.type == nearest


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_no_extractor_mends_is_refused_with_the_reason_and_may_be_left_out(name: str) -> None:
    model = model_of(name)
    with pytest.raises(InputError) as caught:
        check_supported(model)
    assert REFUSED[name] in caught.value.what
    assert "--substitute-model" in caught.value.hint
    assert substitutes(model) == {"untrained_parts": ()}
    assert substituted(model) == replace(model, untrained_parts=())
    check_supported(substituted(model))


def test_an_extractor_that_nothing_is_near_is_refused_with_all_there_are() -> None:
    model = model_of("ssd_mobilenet_v2_coco")
    assert isinstance(model, Ssd)
    other = replace(model, feature_extractor=SsdFeatureExtractor("ssd_mobilenetv2"))
    assert not substitutes(other)
    with pytest.raises(InputError) as caught:
        check_supported(other)
    assert caught.value.hint == 'did you mean "ssd_mobilenet_v2"?'
