"""Detectors as values of a recipe: each makes its net, whose modules are imported only then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from lockstep.checks import Hint, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Probability, Range
from lockstep.errors import InputError
from lockstep.models.torchvision_models import Option, check_library
from lockstep.models.values import Model

if TYPE_CHECKING:
    from lockstep.detection.detector import DetectionModel

NumClasses = Annotated[int, Range(ge=1, le=1_000_000)]
"""As many as the metrics of detections take; the data makes a list of their labels."""

_STRIDES = {3: 4, 4: 4, 6: 8, 7: 8, 9: 16, 10: 16, 11: 16, 12: 16}
"""Output stride of each Fire module of SqueezeNet, in pixels, by the module's number among the features."""

_LEVELS = 5
"""Levels of a feature pyramid on a ResNet."""


class Detector(Model):
    """Base of the models of recipes that are detectors."""

    image_size: ClassVar[int] = 300
    smallest_image: ClassVar[int] = 1

    num_classes: NumClasses
    """Number of classes, without the background."""

    if TYPE_CHECKING:

        def build(self, seed: int) -> DetectionModel:
            """Make the net, as any model does."""


class ScoredDetector(Detector):
    """Base of those that leave out detections of low scores, and those that overlap better ones."""

    score_threshold: Probability
    """Detections have higher scores than this."""
    iou_threshold: Probability
    """Detections of a class do not overlap by more."""
    max_detections: PositiveInt
    """Most detections of an image."""


@dataclass(frozen=True)
class Ssd300(ScoredDetector):
    """Torchvision's SSD on VGG16 for images of 300 x 300 pixels (ssd300_vgg16), with its parameters' names."""

    net: ClassVar[str] = "lockstep.detection.ssd.ssd300"
    image_size: ClassVar[int] = 300
    smallest_image: ClassVar[int] = 268

    num_classes: NumClasses
    score_threshold: Probability = 0.01
    iou_threshold: Probability = 0.45
    max_detections: PositiveInt = 200


@dataclass(frozen=True)
class Ssdlite(ScoredDetector):
    """Torchvision's SSDlite on MobileNetV3 (ssdlite320_mobilenet_v3_large), with its parameters' names.

    From nothing, the running statistics of its batch norm are of use after some 400 steps: they begin with a variance
    of 1, 200 times that in its layers, and their momentum is 0.03. `PreciseStatistics` scores earlier weights.
    """

    net: ClassVar[str] = "lockstep.detection.ssd.ssdlite"
    image_size: ClassVar[int] = 320
    smallest_image: ClassVar[int] = 32

    num_classes: NumClasses
    reduced_tail: bool = True
    """The backbone's last blocks have half the channels, as in torchvision's weights of COCO; False: for a backbone
    with the weights of a classifier."""
    score_threshold: Probability = 0.001
    iou_threshold: Probability = 0.55
    max_detections: PositiveInt = 300


@dataclass(frozen=True)
class Fcos(ScoredDetector):
    """Torchvision's FCOS on ResNet-50 with a feature pyramid (fcos_resnet50_fpn), with its parameters' names."""

    net: ClassVar[str] = "lockstep.detection.fcos.fcos"
    image_size: ClassVar[int] = 800
    smallest_image: ClassVar[int] = 32

    num_classes: NumClasses
    score_threshold: Probability = 0.2
    iou_threshold: Probability = 0.6
    candidates_per_level: PositiveInt = 1000
    """The best so many of a level compete."""
    max_detections: PositiveInt = 100


@dataclass(frozen=True)
class RtDetr(Detector):
    """RT-DETR on a ResNet-vd; its parameters have the names of the files published for Hugging Face's transformers.

    It needs no anchors and no suppression. Training needs scipy.
    """

    net: ClassVar[str] = "lockstep.detection.rt_detr.rt_detr"
    image_size: ClassVar[int] = 640
    smallest_image: ClassVar[int] = 32

    num_classes: NumClasses
    backbone: Literal["r18vd", "r34vd", "r50vd", "r101vd"] = "r18vd"
    """As in the names of the published files; it also says how deep and wide the encoder and decoder are."""
    freeze_batchnorm: bool = False
    """The backbone's batch norm keeps statistics, scale and shift of the weights that it starts from."""
    num_queries: PositiveInt = 300
    """Most objects of an image that can be found."""
    num_denoising: NonNegativeInt = 100
    """Queries with noise of an image, in training, about as many to be found again and as many not to."""
    label_noise_ratio: Probability = 0.5
    """Twice the share of these queries whose class is drawn anew."""
    box_noise_scale: NonNegativeFloat = 1.0
    """How far the edges of these queries may move, in halves of the box's sides; twice as far where not to be found."""
    score_threshold: Probability = 0.0
    """Detections have higher scores than this."""
    max_detections: PositiveInt = 300
    """Most detections of an image."""

    def check_installed(self) -> None:
        """Refuse to train where scipy is not installed; it is not imported for it."""
        check_library("scipy")


@dataclass(frozen=True)
class SqueezeSsd(ScoredDetector):
    """A small SSD on SqueezeNet 1.1, which learns from a few hundred images in minutes without an accelerator.

    It takes images as Caffe's SqueezeNet, whose weights are warm-started with `add_prefix="backbone."`.
    """

    net: ClassVar[str] = "lockstep.detection.ssd.squeeze_ssd"
    image_size: ClassVar[int] = 240
    smallest_image: ClassVar[int] = 32

    num_classes: NumClasses
    layers: tuple[PositiveInt, ...] = (7, 12)
    """Layers of SqueezeNet's features that anchors predict from, in order: 3 and 4 have a cell for 4 x 4 pixels, 6 and
    7 for 8 x 8, 9 to 12 for 16 x 16."""
    extra_maps: NonNegativeInt = 0
    """Feature maps on top of the last one, each of half the height and width of the one before."""
    anchor_sizes: tuple[tuple[PositiveFloat, ...], ...] = ((16.0, 32.0), (64.0, 128.0))
    """Sizes on each feature map, in pixels of the network's input: the square root of an anchor's area."""
    anchor_ratios: tuple[PositiveFloat, ...] = (1.0,)
    """Height over width of the anchors, as torchvision's `AnchorGenerator` has them; each with each size."""
    matched_threshold: Probability = 0.5
    """IoU from which on an anchor learns an object."""
    score_threshold: Probability = 0.02
    iou_threshold: Probability = 0.45
    max_detections: PositiveInt = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        number = len(self.layers) + self.extra_maps
        is_increasing = list(self.layers) == sorted({*self.layers} & _STRIDES.keys())
        if not self.layers or not is_increasing or len(self.anchor_sizes) != number:
            raise InputError(
                "Each feature map of a SqueezeSsd has anchors of its own.",
                given=f"layers={list(self.layers)}, {self.extra_maps} extra_maps, {len(self.anchor_sizes)} sizes",
                expected=f"layers of {[*_STRIDES]} in order, and as many anchor_sizes as layers and extra_maps",
                hint="write layers=[7, 12] and anchor_sizes=[[16.0, 32.0], [64.0, 128.0]], say",
            )

    @property
    def strides(self) -> tuple[int, ...]:
        """Pixels to a cell of each feature map."""
        own = [_STRIDES[layer] for layer in self.layers]
        return *own, *(own[-1] << number for number in range(1, self.extra_maps + 1))


@dataclass(frozen=True)
class FasterRcnnFpn(ScoredDetector):
    """Torchvision's Faster R-CNN on a ResNet-50 with a feature pyramid.

    Fields of the first stage and of what is drawn have the names of its arguments, others those of the SSDs. Its losses
    are means over what each tower has drawn of the anchors and proposals of its images.
    """

    net: ClassVar[str] = "lockstep.detection.faster_rcnn.faster_rcnn_fpn"
    image_size: ClassVar[int] = 800
    smallest_image: ClassVar[int] = 32

    num_classes: NumClasses
    freeze_batchnorm: bool = True
    """The backbone's batch norm keeps statistics, scale and shift of the weights that it starts from; False: it learns
    them, for a start from nothing with many images a tower."""
    anchor_sizes: tuple[PositiveInt, ...] = (32, 64, 128, 256, 512)
    """Size on each of the five levels, in pixels of the network's input: the square root of an anchor's area."""
    anchor_ratios: tuple[PositiveFloat, ...] = (0.5, 1.0, 2.0)
    """Height over width of the anchors, as torchvision's `AnchorGenerator` has them."""
    rpn_pre_nms_top_n_train: PositiveInt = 2000
    """Anchors of each level that become candidates for proposals, in training."""
    rpn_pre_nms_top_n_test: PositiveInt = 1000
    """The same, in evaluation."""
    rpn_post_nms_top_n_train: PositiveInt = 2000
    """Proposals of an image, in training."""
    rpn_post_nms_top_n_test: PositiveInt = 1000
    """The same, in evaluation."""
    rpn_iou_threshold: Probability = 0.7
    """Proposals of a level do not overlap by more."""
    rpn_batch_size_per_image: PositiveInt = 256
    """Anchors that the first stage's losses are computed on."""
    rpn_positive_fraction: Probability = 0.5
    """Largest share of these that learn an object."""
    box_batch_size_per_image: PositiveInt = 512
    """Proposals that the second stage's losses are computed on."""
    box_positive_fraction: Probability = 0.25
    """Largest share of these that learn an object."""
    score_threshold: Probability = 0.05
    iou_threshold: Probability = 0.5
    max_detections: PositiveInt = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.anchor_sizes) != _LEVELS or not self.anchor_ratios:
            raise InputError(
                f"Each of the {_LEVELS} levels of the feature pyramid has anchors of one size.",
                given=f"{len(self.anchor_sizes)} anchor_sizes, {len(self.anchor_ratios)} anchor_ratios",
                expected=f"{_LEVELS} sizes, and a ratio at least",
                hint="write anchor_sizes=[32, 64, 128, 256, 512] and anchor_ratios=[0.5, 1.0, 2.0], say",
            )

    def proposals(self, *, training: bool) -> tuple[int, int]:
        """Return the candidates of each level and the proposals of an image."""
        if training:
            return self.rpn_pre_nms_top_n_train, self.rpn_post_nms_top_n_train
        return self.rpn_pre_nms_top_n_test, self.rpn_post_nms_top_n_test


@dataclass(frozen=True)
class MaskRcnnFpn(FasterRcnnFpn):
    """Torchvision's Mask R-CNN on a ResNet-50 with a feature pyramid; its fields are those of `FasterRcnnFpn`."""

    net: ClassVar[str] = "lockstep.detection.faster_rcnn.mask_rcnn_fpn"


@dataclass(frozen=True)
class KeypointRcnnFpn(FasterRcnnFpn):
    """Torchvision's Keypoint R-CNN on a ResNet-50 with a feature pyramid; other fields are those of `FasterRcnnFpn`."""

    net: ClassVar[str] = "lockstep.detection.keypoint_rcnn.keypoint_rcnn_fpn"

    num_keypoints: PositiveInt = 17
    """Number of keypoints of each object, as `data.num_keypoints`: 17 of COCO's persons."""


@dataclass(frozen=True)
class TorchvisionDetector(Detector):
    """A detector of torchvision, by the name that `torchvision.models.get_model` knows it by, without weights.

    Images are not resized by it. Its losses are means over the images of a tower.
    """

    net: ClassVar[str] = "lockstep.detection.torchvision_detectors.torchvision_detector"
    image_size: ClassVar[int] = 800

    name: Annotated[str, Hint('write name="retinanet_resnet50_fpn_v2"')]
    """As in "retinanet_resnet50_fpn_v2"."""
    num_classes: NumClasses
    options: Mapping[str, Option] = field(default_factory=dict)
    """Other arguments of the function of that name: {"score_thresh": 0.2}."""

    def check_installed(self) -> None:
        """Refuse the model where torchvision is not installed; it is not imported for it."""
        check_library("torchvision")
