"""Which detectors of the Object Detection API are trained here, why others are not, and what is nearest to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lockstep.detection.box_configs import MultiscaleAnchorGenerator
from lockstep.detection.configs import FasterRcnn, Ssd
from lockstep.detection.layer_configs import RfcnBoxPredictor
from lockstep.errors import InputError
from lockstep.listing import did_you_mean

SSD_EXTRACTORS = (
    "ssd_mobilenet_v1",
    "ssd_mobilenet_v2",
    "ssd_mobilenet_v3_small",
    "ssd_mobilenet_v3_large",
    "ssd_inception_v3",
)
FASTER_RCNN_EXTRACTORS = ("faster_rcnn_resnet50", "faster_rcnn_resnet101")

NEAREST = {
    "ssd_inception_v2": "ssd_inception_v3",
    "ssd_mobilenet_v2_mnasfpn": "ssd_mobilenet_v2",
    "ssd_mobiledet_cpu": "ssd_mobilenet_v3_large",
    "ssd_mobiledet_gpu": "ssd_mobilenet_v2",
    "faster_rcnn_inception_v2": "faster_rcnn_resnet50",
    "faster_rcnn_inception_resnet_v2": "faster_rcnn_resnet101",
}
"""The feature extractor that comes nearest to one that is not there, by speed and kind of layers."""

_FIRST_LEVEL = 4
"""Of the maps of a MobileNet in an SSD: a cell of the finest one is 2 ** 4 pixels high and wide."""


def check_supported(model: Ssd | FasterRcnn) -> None:
    """Refuse a detector that cannot be trained, with the reason.

    Raises:
        InputError: it is quantized, an R-FCN or a Context R-CNN, or its feature extractor is not there.
    """
    if model.quantization is not None:
        raise InputError(
            "Detectors are not trained for whole numbers (quantization) here.",
            given=f"model.quantization, with delay={model.quantization.delay}",
            expected="a detector of floating point",
            hint="--set model.quantization=none trains it as one",
        )
    if isinstance(model, FasterRcnn):
        _check_two_stages(model)
    _check_extractor(model)


def _check_two_stages(model: FasterRcnn) -> None:
    if model.context_config is not None:
        raise InputError(
            "Context R-CNN is not trained here: a detector sees one image, and no others of the same camera.",
            given="model.context_config",
            expected="a detector without context",
            hint="--set model.context_config=none trains it as a Faster R-CNN",
        )
    if isinstance(model.second_stage_box_predictor, RfcnBoxPredictor):
        raise InputError(
            "R-FCN is not trained here: there are no position-sensitive score maps.",
            given='model.second_stage_box_predictor.kind="rfcn_box_predictor"',
            expected='"mask_rcnn_box_predictor"',
            hint="take a Faster R-CNN of the same feature extractor, such as faster_rcnn_resnet101",
        )


def _check_extractor(model: Ssd | FasterRcnn) -> None:
    given, known = model.feature_extractor.type, _extractors_for(model)
    if given in known:
        return
    nearest = NEAREST.get(given)
    raise InputError(
        f"There is no feature extractor {given} here.",
        given=f'model.feature_extractor.type="{given}"',
        expected=f"one of {', '.join(known)}",
        hint=f"{nearest} is the nearest: `lockstep import pipeline CONFIG --to RECIPE --substitute-model` takes it"
        if nearest in known
        else did_you_mean(given, known) or "name one of these",
    )


def _extractors_for(model: Ssd | FasterRcnn) -> tuple[str, ...]:
    return SSD_EXTRACTORS if isinstance(model, Ssd) else FASTER_RCNN_EXTRACTORS


def substitutes(model: Ssd | FasterRcnn) -> Mapping[str, object]:
    """Return fields of the model, by their paths, with which the nearest feature extractor takes the place of its own.

    Returns:
        Nothing where its own is there, or where none is near it.
    """
    extractor = model.feature_extractor
    nearest = NEAREST.get(extractor.type)
    if nearest not in _extractors_for(model):
        return {}
    fields: dict[str, object] = {"feature_extractor.type": nearest}
    if extractor.fpn is not None:
        fields["feature_extractor.fpn"] = None
    if isinstance(model, Ssd) and isinstance(generator := model.anchor_generator, MultiscaleAnchorGenerator):
        number = generator.max_level - generator.min_level + 1
        fields["feature_extractor.num_layers"] = number
        fields["anchor_generator.min_level"] = _FIRST_LEVEL
        fields["anchor_generator.max_level"] = _FIRST_LEVEL + number - 1
    return fields


def substituted(model: Ssd | FasterRcnn) -> Ssd | FasterRcnn:
    """Return the model with the nearest feature extractor in place of one that is not there."""
    by_part: dict[str, dict[str, object]] = {}
    for path, value in substitutes(model).items():
        part, _, field = path.partition(".")
        by_part.setdefault(part, {})[field] = value
    return replace(model, **{part: replace(getattr(model, part), **fields) for part, fields in by_part.items()})
