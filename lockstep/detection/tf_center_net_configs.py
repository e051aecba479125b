"""CenterNet of the Object Detection API as a value of a recipe, by the names and defaults of its center_net.proto."""

from __future__ import annotations

import re
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
from lockstep.detection.tf_configs import FasterRcnn, FeatureExtractorType, Ssd, UntrainedPart
from lockstep.detection.values import Detector, NumClasses
from lockstep.errors import InputError


@dataclass(frozen=True)
class CenterNetFeatureExtractor(FeatureExtractorType):
    """The features of a CenterNet, one cell for 4 x 4 pixels."""

    channel_means: tuple[FiniteFloat, ...] = ()
    """Subtracted from the channels of 0 to 255, in their order; none: 0."""
    channel_stds: tuple[PositiveFloat, ...] = ()
    """What the channels are divided by then; none: 1."""
    bgr_ordering: bool = False
    """The order is blue, green, red; false: red, green, blue."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if {len(self.channel_means), len(self.channel_stds)} - {0, 3}:
            raise InputError(
                "Images have three channels.",
                given=f"channel_means={list(self.channel_means)}, channel_stds={list(self.channel_stds)}",
                expected="three numbers, or none, in each",
                hint="write one for each of blue, green and red, or of red, green and blue",
            )


@dataclass(frozen=True)
class PredictionHeadParams(Checked):
    """The convolutions of a head, each followed by a ReLU; one of 1x1 predicts."""

    num_filters: tuple[PositiveInt, ...] = ()
    """Channels of each; none: 256 of one."""
    kernel_sizes: tuple[PositiveInt, ...] = ()
    """Height and width of each kernel, in cells, odd; none: 3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.num_filters or (0,)) != len(self.kernel_sizes or (0,)) or not all(k % 2 for k in self.kernel_sizes):
            raise InputError(
                "Each convolution of a head has a number of filters and an odd kernel.",
                given=f"num_filters={list(self.num_filters)}, kernel_sizes={list(self.kernel_sizes)}",
                expected="as many of the one as of the other, the kernels 1, 3, 5 and so on",
                hint="write num_filters=[256] and kernel_sizes=[3], or leave out both",
            )


SizeLoss = blocks.L1LocalizationLoss | blocks.WeightedSmoothL1 | blocks.WeightedL2
"""A loss of two numbers, such as height and width."""


@dataclass(frozen=True)
class ObjectDetection(Checked):
    """The boxes of a CenterNet: height and width of an object, and where in its cell the middle is."""

    localization_loss: SizeLoss
    """The loss of both."""
    task_loss_weight: NonNegativeFloat = 1.0
    """Factor of both losses."""
    offset_loss_weight: NonNegativeFloat = 1.0
    """Factor of the loss of the place in the cell."""
    scale_loss_weight: NonNegativeFloat = 0.1
    """Factor of the loss of height and width, in cells."""
    scale_head_params: PredictionHeadParams = field(default_factory=PredictionHeadParams)
    """The head of height and width."""
    offset_head_params: PredictionHeadParams = field(default_factory=PredictionHeadParams)
    """The head of the place in the cell."""


@dataclass(frozen=True)
class ObjectCenterParams(Checked):
    """The heat map of a CenterNet, which is 1 in the cells with the middles of objects."""

    classification_loss: blocks.ClassificationLoss
    """The loss of the heat map."""
    object_center_loss_weight: NonNegativeFloat = 1.0
    """Factor of this loss."""
    heatmap_bias_init: FiniteFloat = -2.19
    """Bias of the scores before training: -2.19 is a score of 0.1."""
    min_box_overlap_iou: Annotated[float, Range(gt=0, lt=1)] = 0.7
    """Less of the loss of cells counts from which a box would overlap the object by as much."""
    max_box_predictions: PositiveInt = 100
    """Most detections of an image."""
    center_head_params: PredictionHeadParams = field(default_factory=PredictionHeadParams)
    """The head of the heat map."""
    peak_max_pool_kernel_size: PositiveInt = 3
    """A peak is the largest of so many cells in height and width."""


@dataclass(frozen=True)
class KeypointLoss(Checked):
    """The losses of keypoints."""

    localization_loss: SizeLoss
    """The loss of places: of a keypoint in its cell, and of an object's keypoints from its middle."""
    classification_loss: blocks.ClassificationLoss
    """The loss of the heat maps."""


@dataclass(frozen=True)
class NumberOfKeypoint(Checked):
    """A number for the keypoint of this label, as `keypoint_label_to_std` maps them."""

    key: str
    """The label of the keypoint."""
    value: PositiveFloat
    """Its number."""


@dataclass(frozen=True)
class KeypointEstimation(Checked):
    """The keypoints of the objects of one class of a CenterNet.

    Each keypoint has a heat map, and the middle of an object says where its keypoints are about: of the peaks nearby
    one is taken, and where there is none, what the middle says. Sizes are in cells.
    """

    loss: KeypointLoss
    """The losses."""
    task_name: str = ""
    """The name of the task, which its losses and layers have."""
    keypoint_class_name: str = ""
    """The name of the class in the label map."""
    label: PositiveInt = 1
    """The label of this class."""
    keypoint_labels: tuple[str, ...] = ()
    """The names of the keypoints, in the label map's order; none: they are not known yet, and nothing is trained."""
    keypoint_ids: tuple[NonNegativeInt, ...] = ()
    """The place of each keypoint among those that the data has of an object, from 0 on; none: 0, 1, 2 and so on."""
    task_loss_weight: NonNegativeFloat = 1.0
    """Factor of all losses."""
    keypoint_label_to_std: tuple[NumberOfKeypoint, ...] = ()
    """The spread of a keypoint on its heat map, in spreads of the object's middle; 1 where there is none."""
    keypoint_regression_loss_weight: NonNegativeFloat = 1.0
    """Factor of the loss of what an object's middle says of its keypoints."""
    keypoint_heatmap_loss_weight: NonNegativeFloat = 1.0
    """Factor of the loss of the heat maps."""
    keypoint_offset_loss_weight: NonNegativeFloat = 1.0
    """Factor of the loss of the place in the cell."""
    heatmap_bias_init: FiniteFloat = -2.19
    """Bias of the heat maps before training: -2.19 is a score of 0.1."""
    keypoint_candidate_score_threshold: Probability = 0.1
    """Peaks with a lower score are no keypoints."""
    num_candidates_per_keypoint: PositiveInt = 100
    """Most peaks of each keypoint on an image."""
    peak_max_pool_kernel_size: PositiveInt = 3
    """A peak is the largest of so many cells in height and width."""
    unmatched_keypoint_score: Probability = 0.1
    """The score of a keypoint without a peak nearby."""
    box_scale: PositiveFloat = 1.2
    """A peak is an object's in a box so many times as high and wide as the object's."""
    candidate_search_scale: NonNegativeFloat = 0.3
    """How far a peak may be from what the middle says, in longer sides of this box."""
    candidate_ranking_mode: Literal[
        "min_distance", "score_distance_ratio", "score_scaled_distance_ratio", "gaussian_weighted"
    ] = "min_distance"
    """How a peak is chosen: the nearest, or the one with the best score for its distance."""
    score_distance_offset: PositiveFloat = 1.0
    """Added to distances that scores are divided by, of "score_distance_ratio"."""
    score_distance_multiplier: PositiveFloat = 0.1
    """Added to them, in longer sides of the object's box, of "score_scaled_distance_ratio"."""
    std_dev_multiplier: PositiveFloat = 1.0
    """How wide scores are weighted, in spreads of the heat map, of "gaussian_weighted"."""
    offset_peak_radius: NonNegativeInt = 0
    """Cells around a keypoint, and around an object's middle, that learn too where it is from them."""
    per_keypoint_offset: bool = False
    """Each keypoint has a place in the cell of its own; false: they share one."""
    heatmap_head_params: PredictionHeadParams = field(default_factory=PredictionHeadParams)
    """The head of the heat maps."""
    offset_head_params: PredictionHeadParams = field(default_factory=PredictionHeadParams)
    """The head of the place in the cell."""
    regress_head_params: PredictionHeadParams = field(default_factory=PredictionHeadParams)
    """The head of what an object's middle says of its keypoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = self.keypoint_ids
        if ids and not len(ids) == len({*ids}) == len(self.keypoint_labels):
            raise InputError(
                "Each keypoint has a place of its own.",
                given=f"keypoint_ids={list(ids)} for keypoint_labels={list(self.keypoint_labels)}",
                expected="as many of the one as of the other, each id once",
                hint="leave out keypoint_ids: they are 0, 1, 2 and so on then",
            )

    @property
    def name(self) -> str:
        """The task's name as a part of names of layers and losses."""
        return re.sub(r"\W", "_", self.task_name) or "keypoints"

    @property
    def ids(self) -> tuple[int, ...]:
        """The place of each keypoint among those of the data."""
        return self.keypoint_ids or tuple(range(len(self.keypoint_labels)))

    @property
    def spreads(self) -> tuple[float, ...]:
        """The spread of each keypoint, in spreads of the object's middle."""
        known = {each.key: each.value for each in self.keypoint_label_to_std}
        return tuple(known.get(label, 1.0) for label in self.keypoint_labels)


@dataclass(frozen=True)
class CenterNet(Detector):
    """A detector that finds the middles of objects in a heat map (Zhou et al.: Objects as Points, 2019)."""

    net: ClassVar[str] = "lockstep.detection.tf_center_net.TfCenterNet"

    num_classes: NumClasses
    feature_extractor: CenterNetFeatureExtractor
    """The backbone, and the layers that bring its features to a stride of 4."""
    object_detection_task: ObjectDetection
    """The boxes."""
    object_center_params: ObjectCenterParams
    """The heat map."""
    keypoint_estimation_task: tuple[KeypointEstimation, ...] = ()
    """The keypoints, of one class each."""
    untrained_parts: tuple[UntrainedPart, ...] = ()
    """What its configuration asks for and nothing trains here: the model is refused until the list is empty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tasks = [task for task in self.keypoint_estimation_task if task.keypoint_labels]
        names, labels = {each.name for each in tasks}, {each.label for each in tasks}
        if min(len(names), len(labels)) < len(tasks) or max(labels, default=0) > self.num_classes:
            raise InputError(
                "Each class has one task of keypoints at most, with a name of its own.",
                given=", ".join(f'task_name="{each.task_name}" of label={each.label}' for each in tasks),
                expected=f"other names, and other labels from 1 to num_classes={self.num_classes}",
                hint="name the tasks, and leave out all but one of a class",
            )

    @property
    def num_keypoints(self) -> int:
        """The number of keypoints that the data has of an object; 0: none are learned."""
        return max((index + 1 for task in self.keypoint_estimation_task for index in task.ids), default=0)


TfDetector = Ssd | FasterRcnn | CenterNet
"""The models of a configuration."""
