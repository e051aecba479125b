"""The model of a pipeline.config, with the resizing of its images and its quantization.

The fields and defaults are those of image_resizer.proto and graph_rewriter.proto of tensorflow/models (Apache 2.0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from lockstep.augmentations import resizers
from lockstep.checks import Checked, PositiveInt
from lockstep.detection import blocks, tf_configs
from lockstep.detection.tf_configs import FasterRcnn, Ssd
from lockstep.inline_toml import kind_name
from lockstep.recipes.messages import At, FieldOutcome, MessageReader, made_together, no_effect, not_mapped, to
from lockstep.records.text_format import Field, Place

_Method = Annotated[Literal["bilinear", "nearest_neighbor", "bicubic", "area"], to("data.resizer.resize_method")]
METHODS: Mapping[str, str] = {"nearest_neighbor": "nearest"}
"""The methods of resizing that have another name in the config."""
_GREY = not_mapped("images have three channels")
_OTHER = not_mapped("images are resized to a fixed shape, or with their aspect ratio; the recipe says 300 x 300")


@dataclass(frozen=True)
class KeepAspectRatioResizerConfig(Checked):
    """The shorter side to `min_dimension`, or the longer one to `max_dimension` where it would be longer."""

    min_dimension: Annotated[PositiveInt, to("data.resizer.min_dimension")] = 600
    max_dimension: Annotated[PositiveInt, to("data.resizer.max_dimension")] = 1024
    resize_method: _Method = "bilinear"
    pad_to_max_dimension: Annotated[bool, to("data.resizer.pad_to_max_dimension")] = False
    per_channel_pad_value: Annotated[tuple[float, ...], to("data.resizer.per_channel_pad_value")] = ()
    convert_to_grayscale: Annotated[bool, _GREY] = False

    def resizer(self) -> resizers.KeepAspectRatioResizer:
        """Make the resizer of the data."""
        colour: Any = tuple(map(round, self.per_channel_pad_value)) or (0, 0, 0)
        method = METHODS.get(self.resize_method, self.resize_method)
        return resizers.KeepAspectRatioResizer(
            self.min_dimension, self.max_dimension, method, self.pad_to_max_dimension, colour
        )


@dataclass(frozen=True)
class FixedShapeResizerConfig(Checked):
    """Resizes images to one height and width."""

    height: Annotated[PositiveInt, to("data.resizer.height")] = 300
    width: Annotated[PositiveInt, to("data.resizer.width")] = 300
    resize_method: _Method = "bilinear"
    convert_to_grayscale: Annotated[bool, _GREY] = False

    def resizer(self) -> resizers.FixedShapeResizer:
        """Make the resizer of the data."""
        return resizers.FixedShapeResizer(self.height, self.width, METHODS.get(self.resize_method, self.resize_method))


@dataclass(frozen=True)
class IdentityResizerConfig:
    """Images stay as they are; of 2018, as is the next one."""


@dataclass(frozen=True)
class ConditionalShapeResizerConfig:
    """Images of which a side is beyond `size_threshold`, or below it, are resized to meet it."""

    condition: Annotated[Literal["greater", "smaller"], _OTHER] = "greater"
    size_threshold: Annotated[int, _OTHER] = 300
    resize_method: Annotated[Literal["bilinear", "nearest_neighbor", "bicubic", "area"], _OTHER] = "bilinear"
    convert_to_grayscale: Annotated[bool, _OTHER] = False


@dataclass(frozen=True)
class BesideTheModel:
    """What the message of a model says that is no field of its configuration here."""

    image_resizer: Annotated[
        KeepAspectRatioResizerConfig | FixedShapeResizerConfig | IdentityResizerConfig | ConditionalShapeResizerConfig,
        to("data.resizer"),
    ]
    first_stage_only: Annotated[bool, to("model.number_of_stages")] = False
    """The setting by which Faster R-CNN computed its first stage alone before October 2017."""


@dataclass(frozen=True)
class GraphRewriter:
    """`graph_rewriter`, whose one field is among those of `UNTRAINED`."""


UNTRAINED: Mapping[tf_configs.UntrainedPart, FieldOutcome] = {
    "quantization": not_mapped("detectors are not trained for whole numbers (quantization) here"),
    "context_config": not_mapped("Context R-CNN is not trained here"),
    "rfcn_box_predictor": not_mapped("R-FCN is not trained here"),
    "bifpn": not_mapped("there is no bidirectional feature pyramid here"),
    "random_example_sampler": not_mapped("anchors are not sampled here"),
    "equalization_loss": not_mapped("there is no equalization loss here"),
}
"""What is said of parts that nothing trains; the model keeps their names, and is refused for them."""
_BESIDE = tuple(each.name for each in fields(BesideTheModel))
_MODELS: Mapping[str, type[Ssd | FasterRcnn]] = {"ssd": Ssd, "faster_rcnn": FasterRcnn}
_TPU = no_effect("it is about TPUs, or how the same is computed")
_OUTPUT = no_effect("it names further outputs, and changes none")
_DEPRECATED = no_effect("losses are kept for each anchor anyway")
_NO_MASKS = not_mapped("an SSD predicts boxes alone")
_ANCHORWISE = {"anchorwise_output": _DEPRECATED}
ELSEWHERE: Mapping[type, Mapping[str, FieldOutcome]] = {
    GraphRewriter: {"quantization": UNTRAINED["quantization"]},
    blocks.Loss: {name: UNTRAINED[name] for name in ("random_example_sampler", "equalization_loss")},
    tf_configs.Ssd: {
        "inplace_batchnorm_update": _TPU,
        "return_raw_detections_during_predict": _OUTPUT,
        "mask_head_config": _NO_MASKS,
    },
    tf_configs.FasterRcnn: {
        "context_config": UNTRAINED["context_config"],
        **dict.fromkeys(
            (
                "inplace_batchnorm_update",
                "use_static_shapes",
                "use_static_shapes_for_eval",
                "use_static_balanced_label_sampler",
                "use_matmul_crop_and_resize",
                "use_matmul_gather_in_matcher",
                "use_partitioned_nms_in_first_stage",
                "use_combined_nms_in_first_stage",
            ),
            _TPU,
        ),
        **dict.fromkeys(
            ("return_raw_detections_during_predict", "output_final_box_features", "output_final_box_rpn_features"),
            _OUTPUT,
        ),
    },
    tf_configs.SsdFeatureExtractor: {
        "bifpn": UNTRAINED["bifpn"],
        "replace_preprocessor_with_placeholder": no_effect("images are always prepared outside of the model"),
        "batch_norm_trainable": not_mapped("model.freeze_batchnorm says it, and the hyperparameters of the layers"),
    },
    tf_configs.ConvolutionalBoxPredictor: {"mask_head": _NO_MASKS},
    tf_configs.WeightSharedConvolutionalBoxPredictor: {"mask_head": _NO_MASKS},
    blocks.ArgmaxMatcher: {"use_matmul_gather": _TPU},
    blocks.BatchNonMaxSuppression: dict.fromkeys(("use_static_shapes", "combined_nms", "use_combined_nms"), _TPU),
    blocks.PostProcessing: {"calibration_config": not_mapped("scores are not calibrated")},
    blocks.WeightedL2: _ANCHORWISE,
    blocks.WeightedSmoothL1: _ANCHORWISE,
    blocks.WeightedSigmoid: _ANCHORWISE,
    blocks.WeightedSigmoidFocal: _ANCHORWISE,
    blocks.WeightedSoftmax: _ANCHORWISE,
    blocks.WeightedLogitsSoftmax: _ANCHORWISE,
    blocks.BootstrappedSigmoid: _ANCHORWISE,
}
"""The fields that messages of the model have, and its configuration here has not."""


class ReadModel(NamedTuple):
    """A model, and the resizer of its images."""

    model: Ssd | FasterRcnn
    resizer: resizers.FixedShapeResizer | resizers.KeepAspectRatioResizer


def read_model(reader: MessageReader, models: Sequence[Field], graph: Sequence[Field]) -> ReadModel:
    """Read a model from what is in the messages `model` and `graph_rewriter`."""
    if len(models) != 1 or models[0].name not in _MODELS:
        given = ", ".join(field.name for field in models) or "none"
        place = models[0].place if models else Place(1, 1)
        raise reader.wrong("model", place, given, " or ".join(_MODELS), "other models are not imported")
    (field,) = models
    at = At(f"model.{field.name}", field.value_place, to("model"))
    message = reader.message(field, at)
    beside = [inner for inner in message if inner.name in _BESIDE]
    rfcn = [inner for inner in message if inner.name == "second_stage_box_predictor" and _is_rfcn(inner)]
    reader.leave(rfcn, at._replace(outcome=UNTRAINED["rfcn_box_predictor"]))
    rest = [inner for inner in message if inner.name not in _BESIDE and inner not in rfcn]
    found = made_together(
        {
            "model": partial(reader.read, _MODELS[field.name], rest, at),
            "beside": partial(reader.read, BesideTheModel, beside, at),
            "graph": partial(reader.read, GraphRewriter, graph, At("graph_rewriter", Place(1, 1), to("model"))),
        }
    )
    said = {row.outcome for row in reader.rows}
    model = replace(
        found["model"], untrained_parts=tuple(name for name, outcome in UNTRAINED.items() if outcome in said)
    )
    if found["beside"].first_stage_only and isinstance(model, FasterRcnn):
        model = replace(model, number_of_stages=1)
    given_resizer = found["beside"].image_resizer
    if isinstance(given_resizer, KeepAspectRatioResizerConfig | FixedShapeResizerConfig):
        return ReadModel(model, given_resizer.resizer())
    reader.revise(f"{at.path}.image_resizer.{kind_name(type(given_resizer))}", _OTHER)
    return ReadModel(model, resizers.FixedShapeResizer())


def _is_rfcn(predictor: Field) -> bool:
    kinds = predictor.value if isinstance(predictor.value, list) else []
    return [kind.name for kind in kinds] == ["rfcn_box_predictor"]
