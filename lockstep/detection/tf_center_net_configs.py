"""CenterNet of the Object Detection API as a value of a recipe, by the names and defaults of its center_net.proto."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from lockstep.checks import Checked, FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt, Range
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
    untrained_parts: tuple[UntrainedPart, ...] = ()
    """What its configuration asks for and nothing trains here: the model is refused until the list is empty."""


TfDetector = Ssd | FasterRcnn | CenterNet
"""The models of a configuration."""
