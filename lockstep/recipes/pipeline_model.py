"""The model of a pipeline.config, and what is said beside it: how images are resized, and quantization.

The fields and defaults are those of image_resizer.proto and graph_rewriter.proto of tensorflow/models (Apache 2.0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from lockstep.augmentations import resizers
from lockstep.checks import Checked, PositiveInt
from lockstep.detection import box_configs, configs, layer_configs
from lockstep.detection.configs import FasterRcnn, Ssd
from lockstep.inline_toml import kind_name
from lockstep.recipes.messages import At, FieldOutcome, MessageReader, made_together, no_effect, not_mapped, to
from lockstep.text_format import Field, Place

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
    """To one height and width."""

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
    """Of Faster R-CNN before October 2017."""


@dataclass(frozen=True)
class GraphRewriter:
    """`graph_rewriter`."""

    quantization: configs.Quantization | None = None


_BESIDE = tuple(each.name for each in fields(BesideTheModel))
_MODELS: Mapping[str, type[Ssd | FasterRcnn]] = {"ssd": Ssd, "faster_rcnn": FasterRcnn}
_TPU = no_effect("it is about TPUs, or how the same is computed")
_OUTPUT = no_effect("it names further outputs, and changes none")
_DEPRECATED = no_effect("losses are kept for each anchor anyway")
_NO_MASKS = not_mapped("an SSD predicts boxes alone")
_ANCHORWISE = {"anchorwise_output": _DEPRECATED}
ELSEWHERE: Mapping[type, Mapping[str, FieldOutcome]] = {
    configs.Ssd: {
        "inplace_batchnorm_update": _TPU,
        "return_raw_detections_during_predict": _OUTPUT,
        "mask_head_config": _NO_MASKS,
    },
    configs.FasterRcnn: {
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
    layer_configs.SsdFeatureExtractor: {
        "replace_preprocessor_with_placeholder": no_effect("images are always prepared outside of the model"),
        "batch_norm_trainable": not_mapped("model.freeze_batchnorm says it, and the hyperparameters of the layers"),
    },
    layer_configs.ConvolutionalBoxPredictor: {"mask_head": _NO_MASKS},
    layer_configs.WeightSharedConvolutionalBoxPredictor: {"mask_head": _NO_MASKS},
    box_configs.ArgmaxMatcher: {"use_matmul_gather": _TPU},
    configs.BatchNonMaxSuppression: dict.fromkeys(("use_static_shapes", "combined_nms", "use_combined_nms"), _TPU),
    configs.PostProcessing: {"calibration_config": not_mapped("scores are not calibrated")},
    configs.WeightedL2: _ANCHORWISE,
    configs.WeightedSmoothL1: _ANCHORWISE,
    configs.WeightedSigmoid: _ANCHORWISE,
    configs.WeightedSigmoidFocal: _ANCHORWISE,
    configs.WeightedSoftmax: _ANCHORWISE,
    configs.WeightedLogitsSoftmax: _ANCHORWISE,
    configs.BootstrappedSigmoid: _ANCHORWISE,
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
    rest = [inner for inner in message if inner.name not in _BESIDE]
    found = made_together(
        {
            "model": partial(reader.read, _MODELS[field.name], rest, at),
            "beside": partial(reader.read, BesideTheModel, beside, at),
            "graph": partial(reader.read, GraphRewriter, graph, At("graph_rewriter", Place(1, 1), to("model"))),
        }
    )
    model = replace(found["model"], quantization=found["graph"].quantization)
    if found["beside"].first_stage_only and isinstance(model, FasterRcnn):
        model = replace(model, number_of_stages=1)
    given_resizer = found["beside"].image_resizer
    if isinstance(given_resizer, KeepAspectRatioResizerConfig | FixedShapeResizerConfig):
        return ReadModel(model, given_resizer.resizer())
    reader.revise(f"{at.path}.image_resizer.{kind_name(type(given_resizer))}", _OTHER)
    return ReadModel(model, resizers.FixedShapeResizer())
