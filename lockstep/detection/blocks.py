"""Building blocks of detectors as plain values: anchors, box coders, matchers, similarities, losses, suppression.

Names, defaults and meaning are those of the Object Detection API's protos (tensorflow/models,
research/object_detection/protos, Apache 2.0). Sizes are in pixels of the resized image, scales in shares of it;
`aspect_ratios` are width over height, while the `anchor_ratios` of Lockstep's own detectors are height over width.
Beside them are those of torchvision's detectors, with torchvision's names where nothing else has them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
class GridAnchorGenerator(Checked):
    """At each cell of one feature map an anchor of each scale and aspect ratio."""

    height: PositiveInt = 256
    """Height of an anchor of scale 1, in pixels."""
    width: PositiveInt = 256
    """Height and width of an anchor of scale 1."""
    height_stride: PositiveInt = 16
    """Pixels between rows of anchors."""
    width_stride: PositiveInt = 16
    """Pixels between columns of anchors."""
    height_offset: int = 0
    """Pixels from the top to the centre of the first anchor."""
    width_offset: int = 0
    """Pixels from the left to the centre of the first anchor."""
    scales: tuple[PositiveFloat, ...] = ()
    """Scales of the anchors."""
    aspect_ratios: tuple[PositiveFloat, ...] = ()
    """Width over height."""


@dataclass(frozen=True)
class SsdAnchorGenerator(Checked):
    """For each feature map a scale of its own, from `min_scale` to `max_scale` (Liu et al.: SSD, 2016)."""

    num_layers: PositiveInt = 6
    """Feature maps."""
    min_scale: PositiveFloat = 0.2
    """Scale of the finest feature map."""
    max_scale: PositiveFloat = 0.95
    """Scale of the coarsest feature map."""
    scales: tuple[PositiveFloat, ...] = ()
    """Scales that take the place of those from `min_scale` to `max_scale`."""
    aspect_ratios: tuple[PositiveFloat, ...] = ()
    """Width over height."""
    interpolated_scale_aspect_ratio: NonNegativeFloat = 1.0
    """Aspect ratio of one more anchor, whose scale is between those of two feature maps; 0: there is none."""
    reduce_boxes_in_lowest_layer: bool = True
    """Three anchors a cell in the finest feature map."""
    base_anchor_height: PositiveFloat = 1.0
    """Height of an anchor of scale 1, in shorter sides of the image."""
    base_anchor_width: PositiveFloat = 1.0
    """Width of an anchor of scale 1, in shorter sides of the image."""
    height_stride: tuple[PositiveInt, ...] = ()
    """Pixels between rows of anchors of each feature map; none: by its size."""
    width_stride: tuple[PositiveInt, ...] = ()
    """Strides of each feature map; none: by its size."""
    height_offset: tuple[int, ...] = ()
    """Pixels from the top to the centre of the first anchor, of each feature map."""
    width_offset: tuple[int, ...] = ()
    """Pixels from the left to the centre of the first anchor, of each feature map."""


@dataclass(frozen=True)
class MultiscaleAnchorGenerator(Checked):
    """Anchors for a feature pyramid (Lin et al.: RetinaNet, 2017)."""

    min_level: PositiveInt = 3
    """The finest level."""
    max_level: PositiveInt = 7
    """The coarsest level."""
    anchor_scale: PositiveFloat = 4.0
    """Size of an anchor over the stride of its level."""
    aspect_ratios: tuple[PositiveFloat, ...] = ()
    """Width over height."""
    scales_per_octave: PositiveInt = 2
    """Sizes of anchors from one level to the next."""
    normalize_coordinates: bool = True
    """Anchors are in shares of the image; false: in pixels."""


@dataclass(frozen=True)
class AnchorGrid(Checked):
    """The anchors of one feature map."""

    height_stride: PositiveInt
    """Pixels between rows of anchors."""
    width_stride: PositiveInt
    """Pixels between columns of anchors."""
    base_sizes: tuple[PositiveFloat, ...] = ()
    """Sizes of the anchors, in pixels: the square root of their area."""
    aspect_ratios: tuple[PositiveFloat, ...] = ()
    """Width over height, of each size."""
    height_offset: NonNegativeInt = 0
    """Pixels from the top to the centre of the first anchor."""
    width_offset: NonNegativeInt = 0
    """Pixels from the left to the centre of the first anchor."""


@dataclass(frozen=True)
class FlexibleGridAnchorGenerator(Checked):
    """Grids of anchors, each said in full."""

    anchor_grid: tuple[AnchorGrid, ...] = ()
    """The grids, one for each feature map."""
    normalize_coordinates: bool = True
    """Anchors are in shares of the image; false: in pixels."""


@dataclass(frozen=True)
class DefaultBoxGenerator(Checked):
    """The default boxes of torchvision's SSD: at each cell squares of two sizes, then each aspect ratio both ways."""

    aspect_ratios: tuple[tuple[PositiveFloat, ...], ...]
    """The longer side over the shorter one, for each feature map."""
    scales: tuple[PositiveFloat, ...]
    """Scales of the feature maps, and one more: the second square's is between those of two feature maps."""
    steps: tuple[PositiveInt, ...] = ()
    """Pixels between the cells of each feature map; none: by its size."""
    clip: bool = True
    """No box is larger than the image."""


@dataclass(frozen=True)
class PyramidAnchorGenerator(Checked):
    """The anchors of torchvision's Faster R-CNN, RetinaNet and FCOS (`AnchorGenerator` there)."""

    sizes: tuple[tuple[PositiveInt, ...], ...]
    """Sizes on each feature map, in pixels: the square root of an anchor's area."""
    anchor_ratios: tuple[PositiveFloat, ...] = (0.5, 1.0, 2.0)
    """Height over width; each with each size, the sizes first."""


AnchorGenerator = GridAnchorGenerator | SsdAnchorGenerator | MultiscaleAnchorGenerator | FlexibleGridAnchorGenerator


@dataclass(frozen=True)
class FasterRcnnBoxCoder(Checked):
    """Centre and logarithm of the size, relative to the anchor, each times its factor."""

    y_scale: PositiveFloat = 10.0
    """Factor of the distance of the centres in y."""
    x_scale: PositiveFloat = 10.0
    """Factor of the distance of the centres in x."""
    height_scale: PositiveFloat = 5.0
    """Factor of the logarithm of the height."""
    width_scale: PositiveFloat = 5.0
    """Factor of the logarithm of the width."""


@dataclass(frozen=True)
class SquareBoxCoder(Checked):
    """Centre and side of a square."""

    y_scale: PositiveFloat = 10.0
    """Factor of the distance of the centres in y."""
    x_scale: PositiveFloat = 10.0
    """Factor of the distance of the centres in x."""
    length_scale: PositiveFloat = 5.0
    """Factor of the logarithm of the side."""


@dataclass(frozen=True)
class XYBoxCoder(Checked):
    """The code of `FasterRcnnBoxCoder` in torchvision's order: x before y, width before height (`BoxCoder` there).

    Decoded boxes are at most 62.5 times as wide and high as the anchor.
    """

    weights: tuple[PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat] = (10.0, 10.0, 5.0, 5.0)
    """Factors of x, y, width and height."""


@dataclass(frozen=True)
class LinearBoxCoder:
    """Distances from the anchor's centre to the left, top, right and bottom edge, over the anchor's size (FCOS)."""


BoxCoder = FasterRcnnBoxCoder | SquareBoxCoder


@dataclass(frozen=True)
class ArgmaxMatcher(Checked):
    """Each anchor belongs to the object that is most similar to it, if it is similar enough."""

    matched_threshold: FiniteFloat = 0.5
    """Least similarity of an anchor that belongs to an object."""
    unmatched_threshold: FiniteFloat = 0.5
    """Similarity below which an anchor belongs to none."""
    ignore_thresholds: bool = False
    """Each anchor belongs to its most similar object."""
    negatives_lower_than_unmatched: bool = True
    """Anchors below both thresholds are background, and those between them ignored; False: the other way round."""
    force_match_for_each_row: bool = False
    """Each object gets the anchor that is most similar to it."""


@dataclass(frozen=True)
class SsdMatcher(Checked):
    """Torchvision's matcher of SSD: as `ArgmaxMatcher`, and each object gets the anchor that is most similar to it.

    Of several objects with the same such anchor, the last one gets it.
    """

    threshold: Probability = 0.5


@dataclass(frozen=True)
class ThresholdMatcher(Checked):
    """Torchvision's matcher of Faster R-CNN and RetinaNet (`Matcher` there).

    Anchors below `low_threshold` are background, and those between both thresholds are ignored.
    """

    high_threshold: Probability
    low_threshold: Probability
    allow_low_quality_matches: bool = False
    """The anchors that are most similar to an object belong to the object that is most similar to them."""


@dataclass(frozen=True)
class BipartiteMatcher:
    """Each object gets one anchor, the most similar pairs first."""


Matcher = ArgmaxMatcher | BipartiteMatcher


@dataclass(frozen=True)
class IouSimilarity:
    """Intersection over union."""


@dataclass(frozen=True)
class IoaSimilarity:
    """Intersection over the area of the second box."""


@dataclass(frozen=True)
class ThresholdedIouSimilarity(Checked):
    """1 where the intersection over union is greater than the threshold, else 0."""

    iou_threshold: Probability = 0.5
    """The threshold."""


Similarity = IouSimilarity | IoaSimilarity | ThresholdedIouSimilarity


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
    """The logits are divided by it."""


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
    """Exponent of the focal factor; 0: plain cross entropy."""
    alpha: Probability | None = None
    """Weight of the objects; that of the background is 1 - alpha. None: both 1."""


@dataclass(frozen=True)
class PenaltyReducedLogisticFocalLoss(Checked):
    """Focal loss of heat maps (Zhou et al.: Objects as Points, 2019)."""

    alpha: FiniteFloat | None = None
    """Exponent of the focal factor."""
    beta: FiniteFloat | None = None
    """Exponent of the lower penalty near a centre."""


@dataclass(frozen=True)
class WeightedDiceClassificationLoss(Checked):
    """1 - Dice coefficient."""

    squared_normalization: bool = False
    """Square the values in the denominator."""


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
    """The anchors with the largest losses count, without near duplicates."""

    num_hard_examples: NonNegativeInt = 64
    """At most so many an image; 0: no limit."""
    iou_threshold: Probability = 0.7
    """Anchors that overlap one with a larger loss by more are left out."""
    loss_type: Literal["both", "classification", "localization"] = "both"
    """The loss that is compared."""
    max_negatives_per_positive: NonNegativeInt = 0
    """0: no limit."""
    min_negatives_per_image: NonNegativeInt = 0
    """Background anchors that count at least, also in images without objects."""


@dataclass(frozen=True)
class Loss(Checked):
    """The losses of an SSD."""

    localization_loss: LocalizationLoss
    """The loss of the boxes."""
    classification_loss: ClassificationLoss
    """The loss of the classes."""
    hard_example_miner: HardExampleMiner | None = None
    """None: all anchors count."""
    classification_weight: NonNegativeFloat = 1.0
    """Factor of the loss of the classes."""
    localization_weight: NonNegativeFloat = 1.0
    """Factor of the loss of the boxes."""
    expected_loss_weights: Literal["none", "expected_sampling", "reweighting_unmatched_anchors"] = "none"
    """Weights in place of sampling."""
    min_num_negative_samples: NonNegativeFloat = 0.0
    """The least number of background anchors that are sampled."""
    desired_negative_sampling_ratio: NonNegativeFloat = 3.0
    """Background anchors for each one with an object that are aimed at."""


@dataclass(frozen=True)
class BatchNonMaxSuppression(Checked):
    """Non-maximum suppression: the boxes that become detections."""

    score_threshold: FiniteFloat = 0.0
    """The least score of a detection."""
    iou_threshold: Probability = 0.6
    """Boxes that overlap one with a higher score by more are left out."""
    max_detections_per_class: PositiveInt = 100
    """The most detections of a class on an image."""
    max_total_detections: PositiveInt = 100
    """The most detections on an image."""
    use_class_agnostic_nms: bool = False
    """Boxes compete with those of all classes, and not of their own alone."""
    max_classes_per_detection: PositiveInt = 1
    """With `use_class_agnostic_nms`."""
    soft_nms_sigma: NonNegativeFloat = 0.0
    """Above 0, scores are lowered in place of leaving boxes out (Bodla et al.: Soft-NMS, 2017)."""


@dataclass(frozen=True)
class PostProcessing(Checked):
    """How predictions become detections."""

    batch_non_max_suppression: BatchNonMaxSuppression = field(default_factory=BatchNonMaxSuppression)
    """The choice of the boxes that are kept."""
    score_converter: Literal["identity", "sigmoid", "softmax"] = "identity"
    """How logits become scores."""
    logit_scale: PositiveFloat = 1.0
    """The logits are divided by it."""
