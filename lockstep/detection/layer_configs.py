"""What a detector's layers are made of, as plain values: initializers, regularizers, norms, and box predictors.

Names, defaults and meaning are those of the Object Detection API's hyperparams.proto and box_predictor.proto
(tensorflow/models, Apache 2.0). A shape is in cells of a feature map, a depth in channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.checks import (
    Checked,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
)


@dataclass(frozen=True)
class TruncatedNormalInitializer(Checked):
    """Normal, without what is beyond two standard deviations."""

    mean: FiniteFloat = 0.0
    stddev: NonNegativeFloat = 1.0


@dataclass(frozen=True)
class RandomNormalInitializer(Checked):
    """Normal."""

    mean: FiniteFloat = 0.0
    stddev: NonNegativeFloat = 1.0


@dataclass(frozen=True)
class VarianceScalingInitializer(Checked):
    """Of the variance factor / n, where n is the number of inputs or outputs of a layer, or their mean."""

    factor: NonNegativeFloat = 2.0
    uniform: bool = False
    """Uniform, or truncated normal."""
    mode: Literal["fan_in", "fan_out", "fan_avg"] = "fan_in"


Initializer = TruncatedNormalInitializer | VarianceScalingInitializer | RandomNormalInitializer


@dataclass(frozen=True)
class L1Regularizer(Checked):
    """weight * sum(|w|)."""

    weight: NonNegativeFloat = 1.0


@dataclass(frozen=True)
class L2Regularizer(Checked):
    """weight / 2 * sum(w ** 2)."""

    weight: NonNegativeFloat = 1.0


Regularizer = L1Regularizer | L2Regularizer


@dataclass(frozen=True)
class BatchNorm(Checked):
    """Batch norm after each convolution."""

    decay: Probability = 0.999
    """The share of the moving statistics that a step keeps."""
    center: bool = True
    """Add a trained bias."""
    scale: bool = False
    """Multiply by a trained factor."""
    epsilon: NonNegativeFloat = 0.001
    train: bool = True
    """False: normalise with the moving statistics in training too, and leave them as they are."""


@dataclass(frozen=True)
class GroupNorm:
    """Group norm after each convolution."""


@dataclass(frozen=True)
class Hyperparams(Checked):
    """The convolutions, or linear layers, of a part of a detector."""

    op: Literal["conv", "fc"] = "conv"
    """Convolutions, or linear layers."""
    regularizer: Regularizer | None = None
    """Of the weights; None: there is none."""
    initializer: Initializer | None = None
    """Of the weights; the reference takes no configuration of layers that it makes without one."""
    activation: Literal["none", "relu", "relu_6", "swish"] = "relu"
    batch_norm: BatchNorm | None = None
    group_norm: GroupNorm | None = None
    regularize_depthwise: bool = False
    """Regularize the weights of depthwise convolutions too."""
    force_use_bias: bool = False
    """A bias in the convolution although batch norm adds one."""


@dataclass(frozen=True)
class ConvolutionalBoxPredictor(Checked):
    """For each feature map convolutions of its own, for boxes and for classes."""

    conv_hyperparams: Hyperparams | None = None
    min_depth: NonNegativeInt = 0
    max_depth: NonNegativeInt = 0
    """Depth of the layers before the predictions; 0: there are none."""
    num_layers_before_predictor: NonNegativeInt = 0
    use_dropout: bool = True
    dropout_keep_probability: Probability = 0.8
    kernel_size: PositiveInt = 1
    box_code_size: PositiveInt = 4
    apply_sigmoid_to_scores: bool = False
    class_prediction_bias_init: FiniteFloat = 0.0
    """Bias of the scores before training."""
    use_depthwise: bool = False


@dataclass(frozen=True)
class BoxEncodingsClipRange(Checked):
    """Limits of the encoded boxes."""

    min: FiniteFloat
    max: FiniteFloat


@dataclass(frozen=True)
class WeightSharedConvolutionalBoxPredictor(Checked):
    """The same convolutions for all feature maps, as in RetinaNet."""

    conv_hyperparams: Hyperparams | None = None
    num_layers_before_predictor: NonNegativeInt = 0
    depth: NonNegativeInt = 0
    kernel_size: PositiveInt = 3
    box_code_size: PositiveInt = 4
    class_prediction_bias_init: FiniteFloat = 0.0
    """Bias of the scores before training."""
    use_dropout: bool = False
    dropout_keep_probability: Probability = 0.8
    share_prediction_tower: bool = False
    """Boxes and classes share the layers before the predictions."""
    use_depthwise: bool = False
    score_converter: Literal["identity", "sigmoid"] = "identity"
    box_encodings_clip_range: BoxEncodingsClipRange | None = None


@dataclass(frozen=True)
class MaskRcnnBoxPredictor(Checked):
    """The second stage of Faster R-CNN: boxes, classes and, if asked for, masks of each proposal."""

    fc_hyperparams: Hyperparams | None = None
    use_dropout: bool = False
    dropout_keep_probability: Probability = 0.5
    box_code_size: PositiveInt = 4
    conv_hyperparams: Hyperparams | None = None
    """Of the masks' branch."""
    predict_instance_masks: bool = False
    mask_prediction_conv_depth: NonNegativeInt = 256
    """Depth of the masks' branch; 0: by the depth of the features and the number of classes."""
    predict_keypoints: bool = False
    mask_height: PositiveInt = 15
    mask_width: PositiveInt = 15
    mask_prediction_num_conv_layers: PositiveInt = 2
    masks_are_class_agnostic: bool = False
    share_box_across_classes: bool = False
    """One box for all classes, in place of one for each."""
    convolve_then_upsample_masks: bool = False


@dataclass(frozen=True)
class RfcnBoxPredictor(Checked):
    """The second stage of R-FCN: position-sensitive score maps."""

    conv_hyperparams: Hyperparams | None = None
    num_spatial_bins_height: PositiveInt = 3
    num_spatial_bins_width: PositiveInt = 3
    depth: PositiveInt = 1024
    box_code_size: PositiveInt = 4
    crop_height: PositiveInt = 12
    crop_width: PositiveInt = 12


BoxPredictor = (
    ConvolutionalBoxPredictor | MaskRcnnBoxPredictor | RfcnBoxPredictor | WeightSharedConvolutionalBoxPredictor
)


@dataclass(frozen=True)
class FeaturePyramidNetworks(Checked):
    """A feature pyramid; level l has one cell for 2 ** l pixels."""

    min_level: PositiveInt = 3
    max_level: PositiveInt = 7
    additional_layer_depth: PositiveInt = 256
    """Channels of the levels beyond those of the feature extractor."""


@dataclass(frozen=True)
class BidirectionalFeaturePyramidNetworks(Checked):
    """A feature pyramid that goes up and down several times (BiFPN)."""

    min_level: PositiveInt = 3
    max_level: PositiveInt = 7
    num_iterations: PositiveInt | None = None
    num_filters: PositiveInt | None = None
    combine_method: str = "fast_attention"


@dataclass(frozen=True)
class SsdFeatureExtractor(Checked):
    """The feature maps of an SSD: a backbone, and layers on top of it."""

    type: str
    """The reference's name of the backbone, such as "ssd_mobilenet_v1"."""
    depth_multiplier: PositiveFloat = 1.0
    """Scales the channels of the backbone."""
    min_depth: PositiveInt = 16
    """Channels that remain, whatever the multiplier."""
    conv_hyperparams: Hyperparams | None = None
    """Of the layers on top."""
    override_base_feature_extractor_hyperparams: bool = False
    """Of the backbone too."""
    pad_to_multiple: PositiveInt = 1
    """Height and width of the images are padded with zeros to a multiple of this number of pixels."""
    use_explicit_padding: bool = False
    use_depthwise: bool = False
    fpn: FeaturePyramidNetworks | None = None
    bifpn: BidirectionalFeaturePyramidNetworks | None = None
    num_layers: PositiveInt = 6
    """Feature maps."""


@dataclass(frozen=True)
class FasterRcnnFeatureExtractor(Checked):
    """The features of a Faster R-CNN."""

    type: str
    """The reference's name of the backbone, such as "faster_rcnn_resnet101"."""
    first_stage_features_stride: PositiveInt = 16
    """Pixels to a cell of the first stage's feature map: 8 or 16."""
    batch_norm_trainable: bool = False
    """False: the backbone's batch norm keeps its statistics."""
    conv_hyperparams: Hyperparams | None = None
    fpn: FeaturePyramidNetworks | None = None
    override_base_feature_extractor_hyperparams: bool = False
    pad_to_multiple: PositiveInt = 32
