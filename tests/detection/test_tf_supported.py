"""Which published configs are trained, which are with another feature extractor, and which are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.detection.tf_configs import FasterRcnn, Ssd, SsdFeatureExtractor
from lockstep.detection.tf_supported import check_supported, substituted, substitutes
from lockstep.errors import InputError
from lockstep.recipes.pipeline_config import import_pipeline

FIXTURES = Path(__file__).parents[1] / "fixtures" / "odapi_configs"
TRAINED = {
    "faster_rcnn_resnet101_atrous_coco",
    "faster_rcnn_resnet101_fgvc",
    "faster_rcnn_resnet101_voc07",
    "faster_rcnn_resnet50_coco",
    "mask_rcnn_resnet101_pets",
    "mask_rcnn_resnet50_atrous_coco",
    "ssd_inception_v3_pets",
    "ssd_mobilenet_v1_coco",
    "ssd_mobilenet_v1_focal_loss_pets",
    "ssd_mobilenet_v1_pets",
    "ssd_mobilenet_v2_coco",
    "ssdlite_mobilenet_v1_coco",
    "ssdlite_mobilenet_v3_small_320x320_coco",
}
SUBSTITUTED = {
    "faster_rcnn_inception_resnet_v2_atrous_oid": "faster_rcnn_resnet101",
    "faster_rcnn_inception_v2_coco": "faster_rcnn_resnet50",
    "mask_rcnn_inception_resnet_v2_atrous_coco": "faster_rcnn_resnet101",
    "ssd_inception_v2_coco": "ssd_inception_v3",
    "ssd_mobilenet_v2_mnasfpn_shared_box_predictor_320x320_coco_sync": "ssd_mobilenet_v2_fpn",
    "ssdlite_mobiledet_cpu_320x320_coco_sync_4x4": "ssd_mobilenet_v3_large",
    "ssdlite_mobiledet_gpu_320x320_coco_sync_4x4": "ssd_mobilenet_v2",
}
REFUSED = {
    "context_rcnn_resnet101_snapshot_serengeti": "Context R-CNN is not trained",
    "facessd_mobilenet_v2_quantized_320x320_open_image_v4": "whole numbers (quantization)",
    "rfcn_resnet101_pets": "R-FCN is not trained",
    "ssd_mobilenet_v1_0.75_depth_quantized_300x300_pets_sync": "whole numbers (quantization)",
    "ssd_mobilenet_v2_quantized_300x300_coco": "whole numbers (quantization)",
}


def model_of(name: str) -> Ssd | FasterRcnn:
    path = FIXTURES / f"{name}.config"
    model = import_pipeline(path.read_text(), path.name, path.stem).recipe.model
    assert isinstance(model, Ssd | FasterRcnn)
    return model


def test_the_table_has_all_published_configs() -> None:
    names = {path.stem for path in FIXTURES.glob("*.config")}
    assert names == TRAINED | SUBSTITUTED.keys() | REFUSED.keys()
    assert (len(TRAINED), len(SUBSTITUTED), len(REFUSED)) == (13, 7, 5)


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
def test_what_no_extractor_mends_is_refused_with_the_reason(name: str) -> None:
    model = model_of(name)
    assert not substitutes(model)
    with pytest.raises(InputError) as caught:
        check_supported(model)
    assert REFUSED[name] in caught.value.what


def test_an_extractor_that_nothing_is_near_is_refused_with_all_there_are() -> None:
    model = model_of("ssd_mobilenet_v2_coco")
    assert isinstance(model, Ssd)
    other = replace(model, feature_extractor=SsdFeatureExtractor("ssd_mobilenet_v22"))
    assert not substitutes(other)
    with pytest.raises(InputError) as caught:
        check_supported(other)
    assert caught.value.hint == 'did you mean "ssd_mobilenet_v2"?'
