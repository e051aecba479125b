"""The detectors of the Object Detection API that are trained here, why others are not, and what is nearest to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.detection import tf_configs
from lockstep.detection.blocks import PostProcessing, SsdAnchorGenerator
from lockstep.detection.tf_center_net_configs import CenterNet, TfDetector
from lockstep.detection.values import Detector
from lockstep.errors import InputError
from lockstep.inline_toml import kind_name
from lockstep.listing import did_you_mean

_SSD_KERAS = (
    "ssd_mobilenet_v1",
    "ssd_mobilenet_v1_fpn",
    "ssd_mobilenet_v2",
    "ssd_mobilenet_v2_fpn",
    "ssd_resnet50_v1_fpn",
    "ssd_resnet101_v1_fpn",
    "ssd_resnet152_v1_fpn",
)
_FASTER_RCNN_KERAS = (
    "faster_rcnn_resnet50",
    "faster_rcnn_resnet101",
    "faster_rcnn_resnet152",
    "faster_rcnn_inception_resnet_v2",
)
"""Nets that the reference has in both forms: of TF-Slim's layers, and, with "_keras" at the end, of Keras's."""
SSD_EXTRACTORS = (
    *_SSD_KERAS,
    *(f"{net}_keras" for net in _SSD_KERAS),
    "ssd_mobilenet_v3_small",
    "ssd_mobilenet_v3_large",
    "ssd_inception_v2",
    "ssd_inception_v3",
    *(f"ssd_efficientnet-b{size}_bifpn_keras" for size in range(8)),
)
CENTER_NET_EXTRACTORS = (
    "resnet_v1_50_fpn",
    "resnet_v1_101_fpn",
    "resnet_v2_50",
    "resnet_v2_101",
    "mobilenet_v2",
    "mobilenet_v2_fpn",
    "hourglass_104",
)
FASTER_RCNN_EXTRACTORS = (
    *_FASTER_RCNN_KERAS,
    *(f"{net}_keras" for net in _FASTER_RCNN_KERAS),
    "faster_rcnn_inception_v2",
)

_NETS: Mapping[str, tuple[str, float]] = {
    "mobilenet_v1": ("depthwise", 0.57),
    "mobilenet_v2": ("inverted", 0.30),
    "mobilenet_v3_large": ("inverted", 0.22),
    "mobilenet_v3_small": ("inverted", 0.06),
    "mobilenet_edgetpu": ("inverted", 0.99),
    "mobiledet_cpu": ("inverted", 0.2),
    "mobiledet_dsp": ("inverted", 1.1),
    "mobiledet_edgetpu": ("inverted", 0.6),
    "mobiledet_gpu": ("inverted", 1.1),
    "spaghettinet": ("inverted", 0.3),
    **{
        f"efficientnet-b{size}": ("inverted", cost)
        for size, cost in enumerate((0.39, 0.70, 1.0, 1.8, 4.2, 9.9, 19.0, 37.0))
    },
    "inception_resnet_v2": ("residual", 13.0),
    "inception_v2": ("inception", 2.0),
    "inception_v3": ("inception", 5.7),
    "pnas": ("cells", 25.0),
    "nas": ("cells", 24.0),
    "resnet50": ("residual", 4.1),
    "resnet101": ("residual", 7.8),
    "resnet152": ("residual", 11.5),
    **{
        f"resnet_v{version}_{depth}": ("residual", cost)
        for version in (1, 2)
        for depth, cost in ((50, 4.1), (101, 7.8))
    },
}
"""The kind of layers of a feature extractor, and its multiply-adds in thousand millions on an image of the size that
its publication takes, by a part of its name: the first that is in it."""
_OTHER_LAYERS = math.log(4)
"""Another kind of layers counts as four times as many multiply-adds, or a quarter of them."""


_REFUSALS = {
    "quantization": (
        "Quantization is no part of the model, but a field of the recipe.",
        "quantization.delay and the like in the recipe",
        "import the pipeline.config again; or --set model.untrained_parts=[] --set quantization.delay=0",
    ),
    "context_config": (
        "Context R-CNN is not trained here: a detector sees one image, and no others of the same camera.",
        "a detector without context",
        "--set model.untrained_parts=[], or `lockstep import pipeline` with --substitute-model, trains a Faster R-CNN",
    ),
}
"""What is said of a part that is not trained: what it is, what is expected, and the hint."""
_LEFT_OUT = ("context_config",)
"""Parts without which a detector is the nearest to the one with them: without context."""
_OTHER_REFUSAL = (
    "An SSD is not trained with this here.",
    "an SSD without it",
    "--set model.untrained_parts=[] trains it without",
)
_OF_CENTER_NET = (
    "A CenterNet predicts boxes and keypoints here: no masks, tracks or surfaces.",
    "an object_detection_task, and keypoint_estimation_task",
    "--set model.untrained_parts=[] trains it without",
)


def check_supported(model: Detector) -> None:
    """Refuse a detector of the Object Detection API that cannot be trained, with the reason; others all can.

    Raises:
        InputError: it is a Context R-CNN, or its feature extractor is not there.
    """
    if not isinstance(model, TfDetector):
        return
    _check_extractor(model)
    _check_untrained_parts(model)
    if isinstance(model, tf_configs.Ssd):
        _check_one_stage(model)
    elif isinstance(model, tf_configs.FasterRcnn):
        _check_two_stages(model)
    else:
        _check_keypoints(model)


def _check_keypoints(model: CenterNet) -> None:
    for number, task in enumerate(model.keypoint_estimation_task):
        if not task.keypoint_labels:
            raise InputError(
                "A CenterNet learns keypoints that have names, and those of a task have none.",
                given=f'model.keypoint_estimation_task.{number}.keypoint_labels=[] of "{task.task_name}"',
                expected=f'the keypoints of "{task.keypoint_class_name}", as a label map has them',
                hint="let keypoint_label_map_path name the label map, and import the config again; or "
                "--set model.keypoint_estimation_task=[] trains the boxes alone",
            )


def _check_untrained_parts(model: TfDetector) -> None:
    if not model.untrained_parts:
        return
    other = _OF_CENTER_NET if isinstance(model, CenterNet) else _OTHER_REFUSAL
    what, expected, hint = _REFUSALS.get(model.untrained_parts[0], other)
    raise InputError(what, given=f"model.untrained_parts={list(model.untrained_parts)}", expected=expected, hint=hint)


def _check_one_stage(model: tf_configs.Ssd) -> None:
    """Refuse what the layers and losses of an SSD do not have here."""
    extractor = model.feature_extractor
    on_top = extractor.conv_hyperparams or tf_configs.Hyperparams()
    of_backbone = on_top if extractor.override_base_feature_extractor_hyperparams else None
    lacking = {
        "feature_extractor.conv_hyperparams.batch_norm, of the backbone": of_backbone is not None
        and of_backbone.batch_norm is None,
        "explicit_background_class": model.explicit_background_class,
        "use_confidences_as_targets": model.use_confidences_as_targets,
        "loss.expected_loss_weights": model.loss.expected_loss_weights != "none",
        f"box_predictor.kind={kind_name(type(model.box_predictor))}": not isinstance(
            model.box_predictor, tf_configs.ConvolutionalBoxPredictor | tf_configs.WeightSharedConvolutionalBoxPredictor
        ),
        **_ignored_nms_options("post_processing", model.post_processing),
        **_ignored_layers(model),
    }
    if given := [f"model.{name}" for name, is_given in lacking.items() if is_given]:
        raise InputError(
            "An SSD is not trained with this here.",
            given=", ".join(given),
            expected="an SSD without it; a backbone has batch norm",
            hint="leave it out of the recipe, or set what stands in its place",
        )
    if "inception" in extractor.net and of_backbone is None:
        raise InputError(
            f"{extractor.net} has no layers of its own: they are always those of conv_hyperparams.",
            given="model.feature_extractor.override_base_feature_extractor_hyperparams=false",
            expected="true, as the reference wants it",
            hint="--set model.feature_extractor.override_base_feature_extractor_hyperparams=true",
        )


def _ignored_layers(model: tf_configs.Ssd) -> dict[str, bool]:
    """Return what an SSD's layers have not here, or not in the reference, and whether it is asked for."""
    extractor = model.feature_extractor
    layers = {
        "feature_extractor.conv_hyperparams": extractor.conv_hyperparams,
        "box_predictor.conv_hyperparams": getattr(model.box_predictor, "conv_hyperparams", None),
    }
    of_resnets = {"depth_multiplier": 1.0, "use_depthwise": False, "use_explicit_padding": False}
    is_efficient = "efficientnet" in extractor.net
    net = "an EfficientNet" if is_efficient else "a ResNet"
    if is_efficient:
        of_resnets["override_base_feature_extractor_hyperparams"] = False
    norms = {name: part.batch_norm for name, part in layers.items() if part is not None}
    return {
        **{
            f"{name}, with batch norm of fixed statistics": is_set and model.freeze_batchnorm
            for name, is_set in _ignored_layer_options(layers).items()
        },
        "feature_extractor.bifpn, none": is_efficient and extractor.bifpn is None,
        "feature_extractor.bifpn": not is_efficient and extractor.bifpn is not None,
        "feature_extractor.bifpn.combine_method": extractor.bifpn is not None
        and extractor.bifpn.combine_method != "fast_attention",
        **{
            f"{name}.batch_norm.train=false, with layers of Keras": extractor.is_keras
            and norm is not None
            and not norm.train
            for name, norm in norms.items()
        },
        **{
            f"feature_extractor.{name}={getattr(extractor, name)}, of {net}": (
                is_efficient or "resnet" in extractor.net
            )
            and getattr(extractor, name) != usual
            for name, usual in of_resnets.items()
        },
    }


def _ignored_nms_options(name: str, given: PostProcessing) -> dict[str, bool]:
    """Return options of non-maximum suppression that are not implemented, and whether they are set."""
    most = given.batch_non_max_suppression.max_classes_per_detection
    return {f"{name}.batch_non_max_suppression.max_classes_per_detection={most}": most > 1}


def _ignored_layer_options(
    parts: Mapping[str, tf_configs.Hyperparams | None], *, normed: bool = True
) -> dict[str, bool]:
    """Return options of layers, with norms or without, that are not implemented, and whether they are set."""
    fields = ("force_use_bias",) if normed else ("force_use_bias", "batch_norm", "group_norm")
    return {f"{name}.{field}": bool(getattr(part, field, None)) for name, part in parts.items() for field in fields}


def _check_two_stages(model: tf_configs.FasterRcnn) -> None:
    """Refuse what the layers and losses of a Faster R-CNN do not have here."""
    predictor, extractor = model.second_stage_box_predictor, model.feature_extractor
    crops = (model.initial_crop_size, model.maxpool_kernel_size, model.maxpool_stride)
    lacking = {
        "number_of_stages=1": model.number_of_stages == 1,
        "second_stage_box_predictor": not isinstance(
            predictor, tf_configs.MaskRcnnBoxPredictor | tf_configs.RfcnBoxPredictor
        ),
        "initial_crop_size, maxpool_kernel_size or maxpool_stride, none": None in crops
        and not isinstance(predictor, tf_configs.RfcnBoxPredictor),
        f"feature_extractor.first_stage_features_stride={extractor.first_stage_features_stride}": (
            extractor.first_stage_features_stride not in ({16} if extractor.is_keras else {8, 16})
        ),
        "feature_extractor.fpn": extractor.fpn is not None,
        **_ignored_nms_options("second_stage_post_processing", model.second_stage_post_processing),
        **_ignored_layer_options(
            {"first_stage_box_predictor_conv_hyperparams": model.first_stage_box_predictor_conv_hyperparams},
            normed=False,
        ),
    }
    lacking |= _ignored_of_regions("second_stage_box_predictor", predictor)
    if given := [f"model.{name}" for name, is_given in lacking.items() if is_given]:
        raise InputError(
            "A Faster R-CNN is not trained with this here.",
            given=", ".join(given),
            expected="two stages or three, a mask_rcnn_box_predictor with pooled crops or an rfcn_box_predictor whose "
            "crop is a multiple of its bins, a stride of 16 or (TF-Slim) 8",
            hint="set what stands in its place, or take FasterRcnnFpn, which has a feature pyramid",
        )


def _ignored_of_regions(name: str, predictor: tf_configs.BoxPredictor | None) -> dict[str, bool]:
    """Return what the layers of the second stage have not here, and whether it is asked for."""
    code_size = getattr(predictor, "box_code_size", 4)
    lacking = {f"{name}.box_code_size={code_size}": code_size != 4}
    match predictor:
        case tf_configs.MaskRcnnBoxPredictor():
            lacking |= {
                f"{name}.predict_keypoints": predictor.predict_keypoints,
                **_ignored_layer_options({f"{name}.fc_hyperparams": predictor.fc_hyperparams}, normed=False),
                **_ignored_layer_options({f"{name}.conv_hyperparams": predictor.conv_hyperparams}),
            }
        case tf_configs.RfcnBoxPredictor():
            for side in ("height", "width"):
                points, bins = getattr(predictor, f"crop_{side}"), getattr(predictor, f"num_spatial_bins_{side}")
                lacking[f"{name}.crop_{side}={points}, of {bins} bins"] = points % bins > 0
            lacking |= _ignored_layer_options({f"{name}.conv_hyperparams": predictor.conv_hyperparams}, normed=False)
    return lacking


def _check_extractor(model: TfDetector) -> None:
    given, known = model.feature_extractor.type, _extractors_for(model)
    if given in known:
        return
    nearest = _nearest(model)
    raise InputError(
        f"There is no feature extractor {given} here.",
        given=f'model.feature_extractor.type="{given}"',
        expected=f"one of {', '.join(known)}",
        hint=f"{nearest} is the nearest: `lockstep import pipeline CONFIG --to RECIPE --substitute-model` takes it"
        if nearest
        else did_you_mean(given, known) or "name one of these",
    )


def _extractors_for(model: TfDetector) -> tuple[str, ...]:
    if isinstance(model, CenterNet):
        return CENTER_NET_EXTRACTORS
    return SSD_EXTRACTORS if isinstance(model, tf_configs.Ssd) else FASTER_RCNN_EXTRACTORS


def _facts(extractor: str) -> tuple[str, float] | None:
    return next((facts for name, facts in _NETS.items() if name in extractor), None)


def _nearest(model: TfDetector) -> str | None:
    """Name the feature extractor that is nearest to the model's, of those with a pyramid if it has one, else without.

    Nearest is what has the least different number of multiply-adds; another kind of layers counts too.
    """
    extractor, own = model.feature_extractor, _facts(model.feature_extractor.type)
    if own is None:
        return None
    distances = {}
    for name in _extractors_for(model):
        is_keras = name.endswith("_keras")
        if (facts := _facts(name)) and _pyramid(name) == _pyramid(extractor.type):
            kind, cost = facts
            distance = abs(math.log(cost / own[1])) + _OTHER_LAYERS * (kind != own[0])
            distances[name] = (is_keras != extractor.is_keras, distance)
    return min(distances, key=lambda name: distances[name], default=None)


def _pyramid(extractor: str) -> str:
    return "bifpn" if "bifpn" in extractor else "fpn" if "fpn" in extractor else ""


def substitutes(model: TfDetector) -> dict[str, object]:
    """Return fields of the model, by their paths, with which the nearest detector that is there takes its place.

    Returns:
        Nothing where its own is there, or where none is near it.
    """
    is_there = model.feature_extractor.type in _extractors_for(model)
    nearest = None if is_there else _nearest(model)
    if nearest is None and not is_there:
        return {}
    found: dict[str, object] = {} if nearest is None else {"feature_extractor.type": nearest}
    if nearest is not None and isinstance(model, tf_configs.Ssd):
        anchors, number = model.anchor_generator, model.feature_extractor.num_layers
        if isinstance(anchors, SsdAnchorGenerator) and anchors.num_layers != number:
            found["feature_extractor.num_layers"] = anchors.num_layers
    if {*_LEFT_OUT} & {*model.untrained_parts}:
        found["untrained_parts"] = tuple(part for part in model.untrained_parts if part not in _LEFT_OUT)
    return found


def substituted(model: TfDetector) -> TfDetector:
    """Return the nearest model that is there in place of one that is not."""
    for path, value in substitutes(model).items():
        model = _with_field(model, path.split("."), value)
    return model


def _with_field(part: Any, path: Sequence[str], value: object) -> Any:
    if not path:
        return value
    return replace(part, **{path[0]: _with_field(getattr(part, path[0]), path[1:], value)})
