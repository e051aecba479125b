"""The detectors of the Object Detection API as values of a recipe: SSD and Faster R-CNN with all their layers.

Names, defaults and meaning are those of its protos (tensorflow/models, research/object_detection/protos, Apache 2.0),
of October 2017 and of 2018, and of later ones what its published configurations use. A shape is in cells of a feature
map, a depth in channels. How images are resized is said by the data of a recipe. What is only about TPUs is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from lockstep.checks import (
    Checked,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Range,
)
from lockstep.detection import blocks
from lockstep.detection.values import Detector, NumClasses


@dataclass(frozen=True)
class TruncatedNormalInitializer(Checked):
    """Normal, without what is beyond two standard deviations."""

    mean: FiniteFloat = 0.0
    """Mean of the distribution."""
    stddev: NonNegativeFloat = 1.0
    """Standard deviation of the distribution."""


@dataclass(frozen=True)
class RandomNormalInitializer(Checked):
    """Draws from a normal distribution."""

    mean: FiniteFloat = 0.0
    """Mean of the distribution."""
    stddev: NonNegativeFloat = 1.0
    """Standard deviation of the distribution."""


@dataclass(frozen=True)
class VarianceScalingInitializer(Checked):
    """The variance is factor / n, where n is the number of inputs or outputs of a layer, or their mean."""

    factor: NonNegativeFloat = 2.0
    """Multiplies the variance."""
    uniform: bool = False
    """Uniform, or truncated normal."""
    mode: Literal["fan_in", "fan_out", "fan_avg"] = "fan_in"
    """What n is."""


Initializer = TruncatedNormalInitializer | VarianceScalingInitializer | RandomNormalInitializer


@dataclass(frozen=True)
class L1Regularizer(Checked):
    """weight * sum(|w|)."""

    weight: NonNegativeFloat = 1.0
    """Factor of the loss."""


@dataclass(frozen=True)
class L2Regularizer(Checked):
    """weight / 2 * sum(w ** 2)."""

    weight: NonNegativeFloat = 1.0
    """Factor of the loss."""


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
    """Added to the variance."""
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
    """Regularizer of the weights; None: there is none."""
    initializer: Initializer | None = None
    """First values of the weights; the reference takes no configuration of layers that it makes without one."""
    activation: Literal["none", "relu", "relu_6", "swish"] = "relu"
    """What follows each layer."""
    batch_norm: BatchNorm | None = None
    """Batch norm after each layer; None: there is none."""
    group_norm: GroupNorm | None = None
    """Group norm after each layer; None: there is none."""
    regularize_depthwise: bool = False
    """Regularize the weights of depthwise convolutions too."""
    force_use_bias: bool = False
    """A bias in the convolution although batch norm adds one."""


@dataclass(frozen=True)
class ConvolutionalBoxPredictor(Checked):
    """For each feature map convolutions of its own, for boxes and for classes."""

    conv_hyperparams: Hyperparams | None = None
    """Hyperparameters of the convolutions."""
    min_depth: NonNegativeInt = 0
    """The least depth of these layers."""
    max_depth: NonNegativeInt = 0
    """Depth of the layers before the predictions; 0: there are none."""
    num_layers_before_predictor: NonNegativeInt = 0
    """Convolutions before those that predict."""
    use_dropout: bool = True
    """Dropout before the predictions, in training."""
    dropout_keep_probability: Probability = 0.8
    """Share of the values that dropout keeps."""
    kernel_size: PositiveInt = 1
    """Height and width of the convolutions that predict, in cells."""
    box_code_size: PositiveInt = 4
    """Numbers that encode a box."""
    apply_sigmoid_to_scores: bool = False
    """Scores go through a sigmoid."""
    class_prediction_bias_init: FiniteFloat = 0.0
    """Bias of the scores before training."""
    use_depthwise: bool = False
    """Depthwise separable convolutions in place of full ones."""


@dataclass(frozen=True)
class BoxEncodingsClipRange(Checked):
    """Limits of the encoded boxes."""

    min: FiniteFloat
    """The least value."""
    max: FiniteFloat
    """The largest value."""


@dataclass(frozen=True)
class WeightSharedConvolutionalBoxPredictor(Checked):
    """The same convolutions for all feature maps, as in RetinaNet."""

    conv_hyperparams: Hyperparams | None = None
    """Hyperparameters of the convolutions."""
    num_layers_before_predictor: NonNegativeInt = 0
    """Convolutions before those that predict."""
    depth: NonNegativeInt = 0
    """Channels of the layers before the predictions."""
    kernel_size: PositiveInt = 3
    """Height and width of the convolutions that predict, in cells."""
    box_code_size: PositiveInt = 4
    """Numbers that encode a box."""
    class_prediction_bias_init: FiniteFloat = 0.0
    """Bias of the scores before training."""
    use_dropout: bool = False
    """Dropout before the predictions, in training."""
    dropout_keep_probability: Probability = 0.8
    """Share of the values that dropout keeps."""
    share_prediction_tower: bool = False
    """Boxes and classes share the layers before the predictions."""
    use_depthwise: bool = False
    """Depthwise separable convolutions in place of full ones."""
    score_converter: Literal["identity", "sigmoid"] = "identity"
    """How logits become scores."""
    box_encodings_clip_range: BoxEncodingsClipRange | None = None
    """Limits of the encoded boxes; None: there are none."""


@dataclass(frozen=True)
class MaskRcnnBoxPredictor(Checked):
    """The second stage of Faster R-CNN: boxes, classes and, if asked for, masks of each proposal."""

    fc_hyperparams: Hyperparams | None = None
    """Hyperparameters of the linear layers."""
    use_dropout: bool = False
    """Dropout before the predictions, in training."""
    dropout_keep_probability: Probability = 0.5
    """Share of the values that dropout keeps."""
    box_code_size: PositiveInt = 4
    """Numbers that encode a box."""
    conv_hyperparams: Hyperparams | None = None
    """Layers of the masks' branch."""
    predict_instance_masks: bool = False
    """Predict masks."""
    mask_prediction_conv_depth: NonNegativeInt = 256
    """Depth of the masks' branch; 0: by the depth of the features and the number of classes."""
    predict_keypoints: bool = False
    """Predict keypoints."""
    mask_height: PositiveInt = 15
    """Height of a predicted mask, in cells."""
    mask_width: PositiveInt = 15
    """Width of a predicted mask, in cells."""
    mask_prediction_num_conv_layers: PositiveInt = 2
    """Convolutions of the masks' branch."""
    masks_are_class_agnostic: bool = False
    """One mask for all classes, in place of one for each."""
    share_box_across_classes: bool = False
    """One box for all classes, in place of one for each."""
    convolve_then_upsample_masks: bool = False
    """Convolve before the masks are made larger; false: after it."""


@dataclass(frozen=True)
class RfcnBoxPredictor(Checked):
    """The second stage of an R-FCN: boxes and classes of each proposal, of maps that see a part of an object each."""

    conv_hyperparams: Hyperparams | None = None
    """Hyperparameters of the convolutions."""
    num_spatial_bins_height: PositiveInt = 3
    """Parts of a proposal, one below the other."""
    num_spatial_bins_width: PositiveInt = 3
    """Parts of a proposal, side by side."""
    depth: PositiveInt = 1024
    """Channels of the layer before the predictions."""
    box_code_size: PositiveInt = 4
    """Numbers that encode a box."""
    crop_height: PositiveInt = 12
    """Points in a proposal, one below the other, at which the maps are read: a multiple of its parts."""
    crop_width: PositiveInt = 12
    """Points side by side."""


BoxPredictor = (
    ConvolutionalBoxPredictor | MaskRcnnBoxPredictor | RfcnBoxPredictor | WeightSharedConvolutionalBoxPredictor
)


@dataclass(frozen=True)
class FeaturePyramidNetworks(Checked):
    """A feature pyramid; level l has one cell for 2 ** l pixels."""

    min_level: PositiveInt = 3
    """The finest level."""
    max_level: PositiveInt = 7
    """The coarsest level."""
    additional_layer_depth: PositiveInt = 256
    """Channels of the levels beyond those of the feature extractor."""


@dataclass(frozen=True)
class BidirectionalFeaturePyramidNetworks(Checked):
    """A feature pyramid that is gone down and up again (Tan et al.: EfficientDet, 2020)."""

    num_iterations: PositiveInt
    """How many times it is gone down and up."""
    num_filters: PositiveInt
    """Channels of all levels."""
    min_level: PositiveInt = 3
    """The finest level."""
    max_level: PositiveInt = 7
    """The coarsest level."""
    combine_method: str = "fast_attention"
    """How maps of one level are added up: by shares that are learned and are above 0, the only one there is here."""


_KERAS = "_keras"


@dataclass(frozen=True)
class FeatureExtractorType(Checked):
    """Base of the feature extractors: the reference's name, of which that of TensorFlow 2's nets ends in "_keras"."""

    type: str
    """The reference's name of the backbone, such as "ssd_mobilenet_v1" or "faster_rcnn_resnet101_keras"."""

    @property
    def net(self) -> str:
        """The name of the net, without "_keras"."""
        return self.type.removesuffix(_KERAS)

    @property
    def is_keras(self) -> bool:
        """Whether the net is built as the reference builds it of Keras's layers, in TensorFlow 2."""
        return self.type.endswith(_KERAS)


@dataclass(frozen=True)
class SsdFeatureExtractor(FeatureExtractorType):
    """The feature maps of an SSD: a backbone, and layers on top of it."""

    depth_multiplier: PositiveFloat = 1.0
    """Scales the channels of the backbone."""
    min_depth: PositiveInt = 16
    """Channels that remain, whatever the multiplier."""
    conv_hyperparams: Hyperparams | None = None
    """Hyperparameters of the layers on top."""
    override_base_feature_extractor_hyperparams: bool = False
    """The backbone has these hyperparameters too."""
    pad_to_multiple: PositiveInt = 1
    """Height and width of the images are padded with zeros to a multiple of this number of pixels."""
    use_explicit_padding: bool = False
    """Pad the layers on top explicitly, as the reference's option of that name."""
    use_depthwise: bool = False
    """Depthwise separable convolutions in place of full ones."""
    fpn: FeaturePyramidNetworks | None = None
    """The feature pyramid on the backbone; None: there is none."""
    bifpn: BidirectionalFeaturePyramidNetworks | None = None
    """The pyramid of an EfficientDet; None: there is none."""
    num_layers: PositiveInt = 6
    """Feature maps."""


@dataclass(frozen=True)
class FasterRcnnFeatureExtractor(FeatureExtractorType):
    """The features of a Faster R-CNN."""

    first_stage_features_stride: PositiveInt = 16
    """Pixels to a cell of the first stage's feature map: 8 or 16."""
    batch_norm_trainable: bool = False
    """False: the backbone's batch norm keeps its statistics."""
    conv_hyperparams: Hyperparams | None = None
    """Hyperparameters of the convolutions."""
    fpn: FeaturePyramidNetworks | None = None
    """The feature pyramid on the backbone; None: there is none."""
    override_base_feature_extractor_hyperparams: bool = False
    """The backbone has these hyperparameters too."""
    pad_to_multiple: PositiveInt = 32
    """Height and width of the images are padded with zeros to a multiple of this number of pixels."""


UntrainedPart = Literal[
    "quantization",
    "context_config",
    "random_example_sampler",
    "equalization_loss",
    "mask_estimation_task",
    "deepmac_mask_estimation",
    "densepose_estimation_task",
    "track_estimation_task",
    "temporal_offset_task",
]
"""Parts of configurations that have no values here, by the names of their messages."""


@dataclass(frozen=True)
class Ssd(Detector):
    """A detector that predicts from anchors in one stage (Liu et al.: SSD, 2016), RetinaNet among them."""

    net: ClassVar[str] = "lockstep.detection.tf_ssd.TfSsd"

    num_classes: NumClasses
    feature_extractor: SsdFeatureExtractor
    """The backbone, and the layers on top of it."""
    box_coder: blocks.BoxCoder
    """How boxes are encoded relative to their anchors."""
    matcher: blocks.Matcher
    """The rule by which anchors belong to objects."""
    similarity_calculator: blocks.Similarity
    """How anchors are compared with objects."""
    box_predictor: BoxPredictor
    """The layers that predict boxes and classes."""
    anchor_generator: blocks.AnchorGenerator
    """The anchors."""
    loss: blocks.Loss
    """The losses."""
    post_processing: blocks.PostProcessing = field(default_factory=blocks.PostProcessing)
    """How predictions become detections."""
    encode_background_as_zeros: bool = False
    """The background has no class of its own in the targets."""
    negative_class_weight: Probability = 1.0
    """Weight of the classification loss of the background."""
    normalize_loss_by_num_matches: bool = True
    """Divide the losses by the number of anchors with an object."""
    normalize_loc_loss_by_codesize: bool = False
    """Divide the loss of a box by the numbers that encode it."""
    freeze_batchnorm: bool = False
    """Batch norm keeps its statistics, and normalises with them in training too."""
    add_background_class: bool = True
    """Predict a score of the background, too."""
    explicit_background_class: bool = False
    """The background is among the classes of the data."""
    use_confidences_as_targets: bool = False
    """Take the objects' confidences as targets of their classes."""
    implicit_example_weight: NonNegativeFloat = 1.0
    """Weight of anchors that are background by no label."""
    add_regularization_loss: bool = True
    """Train on the regularizers of the layers; of the training's configuration."""
    untrained_parts: tuple[UntrainedPart, ...] = ()
    """What its configuration asks for and nothing trains here: the model is refused until the list is empty."""


@dataclass(frozen=True)
class FasterRcnn(Detector):
    """A detector of two stages: proposals, then their classes and boxes (Ren et al., 2015).

    With masks it is a Mask R-CNN (He et al., 2017), with an `RfcnBoxPredictor` an R-FCN (Dai et al., 2016).
    """

    net: ClassVar[str] = "lockstep.detection.tf_faster_rcnn.TfFasterRcnn"

    num_classes: NumClasses
    feature_extractor: FasterRcnnFeatureExtractor
    """The backbone."""
    first_stage_anchor_generator: blocks.AnchorGenerator
    """The anchors of the first stage."""
    first_stage_box_predictor_conv_hyperparams: Hyperparams | None = None
    """Hyperparameters of the first stage's convolutions."""
    number_of_stages: Annotated[int, Range(ge=1, le=3)] = 2
    """1: proposals alone; 3: masks of the detections, and not of the proposals."""
    first_stage_atrous_rate: PositiveInt = 1
    """Cells from one weight to the next in the first stage's convolution."""
    first_stage_box_predictor_kernel_size: PositiveInt = 3
    """Height and width of the first stage's convolution, in cells."""
    first_stage_box_predictor_depth: PositiveInt = 512
    """Channels of the first stage's convolution."""
    first_stage_minibatch_size: PositiveInt = 256
    """Anchors of an image that the first stage's losses are computed on."""
    first_stage_positive_balance_fraction: Probability = 0.5
    """The largest share of objects among these anchors."""
    first_stage_nms_score_threshold: FiniteFloat = 0.0
    """The least score of a proposal."""
    first_stage_nms_iou_threshold: Probability = 0.7
    """Proposals that overlap one with a higher score by more are left out."""
    first_stage_max_proposals: PositiveInt = 300
    """The most proposals of an image."""
    first_stage_localization_loss_weight: NonNegativeFloat = 1.0
    """Factor of the loss of the proposals' boxes."""
    first_stage_objectness_loss_weight: NonNegativeFloat = 1.0
    """Factor of the loss of the proposals' scores."""
    initial_crop_size: PositiveInt | None = None
    """Height and width that a proposal's features are resized to, before the pooling."""
    maxpool_kernel_size: PositiveInt | None = None
    """Height and width of the pooling of a proposal's features, in cells."""
    maxpool_stride: PositiveInt | None = None
    """Stride of this pooling, in cells."""
    second_stage_box_predictor: BoxPredictor | None = None
    """None where there is one stage."""
    second_stage_batch_size: PositiveInt = 64
    """Proposals of an image that the second stage's losses are computed on."""
    second_stage_balance_fraction: Probability = 0.25
    """The share of objects among these proposals that is aimed at."""
    second_stage_post_processing: blocks.PostProcessing = field(default_factory=blocks.PostProcessing)
    """How the second stage's predictions become detections."""
    second_stage_localization_loss_weight: NonNegativeFloat = 1.0
    """Factor of the loss of the boxes."""
    second_stage_classification_loss_weight: NonNegativeFloat = 1.0
    """Factor of the loss of the classes."""
    second_stage_mask_prediction_loss_weight: NonNegativeFloat = 1.0
    """Factor of the loss of the masks."""
    hard_example_miner: blocks.HardExampleMiner | None = None
    """The proposals that count in the second stage's losses; None: all that were sampled."""
    second_stage_classification_loss: blocks.ClassificationLoss = field(default_factory=blocks.WeightedSoftmax)
    """The loss of the classes."""
    clip_anchors_to_image: bool = False
    """Clip anchors to the image."""
    resize_masks: bool = True
    """The reference resizes masks once more than images; here they are always resized with the image."""
    add_regularization_loss: bool = True
    """Train on the regularizers of the layers; of the training's configuration."""
    untrained_parts: tuple[UntrainedPart, ...] = ()
    """What its configuration asks for and nothing trains here: the model is refused until the list is empty."""
