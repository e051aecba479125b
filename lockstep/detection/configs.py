"""Detectors as values of a recipe: SSD and Faster R-CNN with all their parts, and no behaviour.

Names, defaults and meaning are those of the Object Detection API's protos (tensorflow/models,
research/object_detection/protos, Apache 2.0), of October 2017 and of 2018, and of later ones what its published
configurations use. How images are resized is said by the data of a recipe. What is only about TPUs is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

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
from lockstep.detection.box_configs import AnchorGenerator, BoxCoder, Matcher, Similarity
from lockstep.detection.layer_configs import (
    BoxPredictor,
    FasterRcnnFeatureExtractor,
    Hyperparams,
    SsdFeatureExtractor,
)
from lockstep.models.values import Model

if TYPE_CHECKING:
    from lockstep.detection.detector import DetectionModel

NumClasses = Annotated[int, Range(ge=1, le=1_000_000)]
"""As many as the metrics of detections take; the data makes a list of their labels."""


@dataclass(frozen=True)
class WeightedL2:
    """Half the squared distance of the encoded boxes."""


@dataclass(frozen=True)
class WeightedSmoothL1(Checked):
    """Huber loss of the encoded boxes."""

    delta: PositiveFloat = 1.0
    """Differences up to here are squared."""


@dataclass(frozen=True)
class WeightedIou:
    """1 - intersection over union."""


@dataclass(frozen=True)
class L1LocalizationLoss:
    """Distance of the encoded boxes."""


@dataclass(frozen=True)
class WeightedGiou:
    """1 - generalised intersection over union."""


LocalizationLoss = WeightedL2 | WeightedSmoothL1 | WeightedIou | L1LocalizationLoss | WeightedGiou


@dataclass(frozen=True)
class WeightedSigmoid:
    """Sigmoid cross entropy of each class."""


@dataclass(frozen=True)
class WeightedSoftmax(Checked):
    """Softmax cross entropy."""

    logit_scale: PositiveFloat = 1.0
    """The logits are divided by it."""


@dataclass(frozen=True)
class WeightedLogitsSoftmax(Checked):
    """Softmax cross entropy against the softmax of a teacher's logits."""

    logit_scale: PositiveFloat = 1.0


@dataclass(frozen=True)
class BootstrappedSigmoid(Checked):
    """Sigmoid cross entropy against a mixture of the targets and the model's own predictions."""

    alpha: Probability
    """The share of the targets."""
    hard_bootstrap: bool = False
    """The predictions are rounded to 0 or 1."""


@dataclass(frozen=True)
class WeightedSigmoidFocal(Checked):
    """Focal loss (Lin et al.: RetinaNet, 2017)."""

    gamma: NonNegativeFloat = 2.0
    alpha: Probability | None = None
    """Weight of the objects; that of the background is 1 - alpha. None: both 1."""


@dataclass(frozen=True)
class PenaltyReducedLogisticFocalLoss(Checked):
    """Focal loss of heat maps (Zhou et al.: Objects as Points, 2019)."""

    alpha: FiniteFloat | None = None
    beta: FiniteFloat | None = None


@dataclass(frozen=True)
class WeightedDiceClassificationLoss(Checked):
    """1 - Dice coefficient."""

    squared_normalization: bool = False


ClassificationLoss = (
    WeightedSigmoid
    | WeightedSoftmax
    | WeightedLogitsSoftmax
    | BootstrappedSigmoid
    | WeightedSigmoidFocal
    | PenaltyReducedLogisticFocalLoss
    | WeightedDiceClassificationLoss
)


@dataclass(frozen=True)
class HardExampleMiner(Checked):
    """Of all anchors, those with the largest losses count, without near duplicates."""

    num_hard_examples: NonNegativeInt = 64
    """At most so many an image; 0: no limit."""
    iou_threshold: Probability = 0.7
    """Anchors that overlap one with a larger loss by more are left out."""
    loss_type: Literal["both", "classification", "localization"] = "both"
    """The loss that is compared."""
    max_negatives_per_positive: NonNegativeInt = 0
    """0: no limit."""
    min_negatives_per_image: NonNegativeInt = 0


@dataclass(frozen=True)
class RandomExampleSampler(Checked):
    """Anchors are drawn."""

    positive_sample_fraction: Probability = 0.01


@dataclass(frozen=True)
class EqualizationLoss(Checked):
    """Scores of rare classes are not pushed down by the objects of others."""

    weight: NonNegativeFloat = 0.0
    exclude_prefixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loss(Checked):
    """The losses of an SSD."""

    localization_loss: LocalizationLoss
    classification_loss: ClassificationLoss
    hard_example_miner: HardExampleMiner | None = None
    """None: all anchors count."""
    classification_weight: NonNegativeFloat = 1.0
    localization_weight: NonNegativeFloat = 1.0
    random_example_sampler: RandomExampleSampler | None = None
    equalization_loss: EqualizationLoss | None = None
    expected_loss_weights: Literal["none", "expected_sampling", "reweighting_unmatched_anchors"] = "none"
    """Weights in place of sampling."""
    min_num_negative_samples: NonNegativeFloat = 0.0
    desired_negative_sampling_ratio: NonNegativeFloat = 3.0


@dataclass(frozen=True)
class BatchNonMaxSuppression(Checked):
    """Which boxes become detections."""

    score_threshold: FiniteFloat = 0.0
    iou_threshold: Probability = 0.6
    """Boxes that overlap one with a higher score by more are left out."""
    max_detections_per_class: PositiveInt = 100
    max_total_detections: PositiveInt = 100
    use_class_agnostic_nms: bool = False
    max_classes_per_detection: PositiveInt = 1
    """With `use_class_agnostic_nms`."""
    soft_nms_sigma: NonNegativeFloat = 0.0
    """Above 0, scores are lowered in place of leaving boxes out (Bodla et al.: Soft-NMS, 2017)."""


@dataclass(frozen=True)
class PostProcessing(Checked):
    """From predictions to detections."""

    batch_non_max_suppression: BatchNonMaxSuppression = field(default_factory=BatchNonMaxSuppression)
    score_converter: Literal["identity", "sigmoid", "softmax"] = "identity"
    logit_scale: PositiveFloat = 1.0
    """The logits are divided by it."""


@dataclass(frozen=True)
class Quantization(Checked):
    """Training that imitates a network of whole numbers."""

    delay: NonNegativeInt = 500_000
    """Steps before it begins."""
    weight_bits: PositiveInt = 8
    activation_bits: PositiveInt = 8
    symmetric: bool = False


@dataclass(frozen=True)
class Context(Checked):
    """Attention to features of other images of the same camera (Beery et al.: Context R-CNN, 2020)."""

    max_num_context_features: PositiveInt = 8500
    attention_bottleneck_dimension: PositiveInt = 2048
    attention_temperature: PositiveFloat = 0.01
    context_feature_length: PositiveInt = 2057


class Detector(Model):
    """Base of the models of recipes that are detectors."""

    image_size: ClassVar[int] = 300
    smallest_image: ClassVar[int] = 1

    if TYPE_CHECKING:

        def build(self, seed: int) -> DetectionModel:
            """Make the net, as any model does."""


@dataclass(frozen=True)
class Ssd(Detector):
    """A detector that predicts from anchors in one stage (Liu et al.: SSD, 2016), RetinaNet among them."""

    net: ClassVar[str] = "lockstep.detection.configured_ssd.ConfiguredSsd"

    num_classes: NumClasses
    """Without the background."""
    feature_extractor: SsdFeatureExtractor
    box_coder: BoxCoder
    matcher: Matcher
    similarity_calculator: Similarity
    box_predictor: BoxPredictor
    anchor_generator: AnchorGenerator
    loss: Loss
    post_processing: PostProcessing = field(default_factory=PostProcessing)
    encode_background_as_zeros: bool = False
    """The background has no class of its own in the targets."""
    negative_class_weight: Probability = 1.0
    """Weight of the classification loss of the background."""
    normalize_loss_by_num_matches: bool = True
    normalize_loc_loss_by_codesize: bool = False
    freeze_batchnorm: bool = False
    add_background_class: bool = True
    explicit_background_class: bool = False
    use_confidences_as_targets: bool = False
    implicit_example_weight: NonNegativeFloat = 1.0
    add_regularization_loss: bool = True
    """Train on the regularizers of the layers; of the training's configuration."""
    quantization: Quantization | None = None


@dataclass(frozen=True)
class FasterRcnn(Detector):
    """A detector of two stages: proposals, then their classes and boxes (Ren et al., 2015).

    With masks it is a Mask R-CNN (He et al., 2017), with an `RfcnBoxPredictor` an R-FCN.
    """

    net: ClassVar[str] = "lockstep.detection.configured_faster_rcnn.ConfiguredFasterRcnn"

    num_classes: NumClasses
    """Without the background."""
    feature_extractor: FasterRcnnFeatureExtractor
    first_stage_anchor_generator: AnchorGenerator
    first_stage_box_predictor_conv_hyperparams: Hyperparams | None = None
    number_of_stages: Annotated[int, Range(ge=1, le=3)] = 2
    """1: proposals alone; 3: masks of the detections, and not of the proposals."""
    first_stage_atrous_rate: PositiveInt = 1
    first_stage_box_predictor_kernel_size: PositiveInt = 3
    first_stage_box_predictor_depth: PositiveInt = 512
    first_stage_minibatch_size: PositiveInt = 256
    """Anchors of an image that the first stage's losses are computed on."""
    first_stage_positive_balance_fraction: Probability = 0.5
    first_stage_nms_score_threshold: FiniteFloat = 0.0
    first_stage_nms_iou_threshold: Probability = 0.7
    first_stage_max_proposals: PositiveInt = 300
    first_stage_localization_loss_weight: NonNegativeFloat = 1.0
    first_stage_objectness_loss_weight: NonNegativeFloat = 1.0
    initial_crop_size: PositiveInt | None = None
    """Height and width that a proposal's features are resized to, before the pooling."""
    maxpool_kernel_size: PositiveInt | None = None
    maxpool_stride: PositiveInt | None = None
    second_stage_box_predictor: BoxPredictor | None = None
    """None where there is one stage."""
    second_stage_batch_size: PositiveInt = 64
    """Proposals of an image that the second stage's losses are computed on."""
    second_stage_balance_fraction: Probability = 0.25
    second_stage_post_processing: PostProcessing = field(default_factory=PostProcessing)
    second_stage_localization_loss_weight: NonNegativeFloat = 1.0
    second_stage_classification_loss_weight: NonNegativeFloat = 1.0
    second_stage_mask_prediction_loss_weight: NonNegativeFloat = 1.0
    hard_example_miner: HardExampleMiner | None = None
    second_stage_classification_loss: ClassificationLoss = field(default_factory=WeightedSoftmax)
    clip_anchors_to_image: bool = False
    resize_masks: bool = True
    """Masks for training are resized with the image."""
    context_config: Context | None = None
    add_regularization_loss: bool = True
    """Train on the regularizers of the layers; of the training's configuration."""
    quantization: Quantization | None = None
