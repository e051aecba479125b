"""A detector's anchors and boxes, as plain values.

Names, defaults and meaning are those of the Object Detection API's protos of anchor generators, box coders, matchers
and similarities (tensorflow/models, Apache 2.0). Sizes are in pixels of the resized image, scales in shares of it.
Beside them are those that torchvision's detectors are made of, with torchvision's names where no other thing has them.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    width: PositiveInt = 256
    """Of an anchor of scale 1."""
    height_stride: PositiveInt = 16
    width_stride: PositiveInt = 16
    height_offset: int = 0
    width_offset: int = 0
    scales: tuple[PositiveFloat, ...] = ()
    aspect_ratios: tuple[PositiveFloat, ...] = ()
    """Width over height."""


@dataclass(frozen=True)
class SsdAnchorGenerator(Checked):
    """For each feature map a scale of its own, from `min_scale` to `max_scale` (Liu et al.: SSD, 2016)."""

    num_layers: PositiveInt = 6
    min_scale: PositiveFloat = 0.2
    max_scale: PositiveFloat = 0.95
    scales: tuple[PositiveFloat, ...] = ()
    """In place of those from `min_scale` to `max_scale`."""
    aspect_ratios: tuple[PositiveFloat, ...] = ()
    """Width over height."""
    interpolated_scale_aspect_ratio: NonNegativeFloat = 1.0
    """Of one more anchor, whose scale is between those of two feature maps; 0: there is none."""
    reduce_boxes_in_lowest_layer: bool = True
    """Three anchors a cell in the finest feature map."""
    base_anchor_height: PositiveFloat = 1.0
    base_anchor_width: PositiveFloat = 1.0
    height_stride: tuple[PositiveInt, ...] = ()
    width_stride: tuple[PositiveInt, ...] = ()
    """Of each feature map; none: by its size."""
    height_offset: tuple[int, ...] = ()
    width_offset: tuple[int, ...] = ()


@dataclass(frozen=True)
class MultiscaleAnchorGenerator(Checked):
    """Anchors for a feature pyramid (Lin et al.: RetinaNet, 2017)."""

    min_level: PositiveInt = 3
    max_level: PositiveInt = 7
    anchor_scale: PositiveFloat = 4.0
    """Size of an anchor over the stride of its level."""
    aspect_ratios: tuple[PositiveFloat, ...] = ()
    scales_per_octave: PositiveInt = 2
    normalize_coordinates: bool = True


@dataclass(frozen=True)
class AnchorGrid(Checked):
    """The anchors of one feature map."""

    height_stride: PositiveInt
    width_stride: PositiveInt
    base_sizes: tuple[PositiveFloat, ...] = ()
    aspect_ratios: tuple[PositiveFloat, ...] = ()
    height_offset: NonNegativeInt = 0
    width_offset: NonNegativeInt = 0


@dataclass(frozen=True)
class FlexibleGridAnchorGenerator(Checked):
    """Grids of anchors, each said in full."""

    anchor_grid: tuple[AnchorGrid, ...] = ()
    normalize_coordinates: bool = True


@dataclass(frozen=True)
class DefaultBoxGenerator(Checked):
    """The default boxes of torchvision's SSD: at each cell squares of two sizes, then each aspect ratio both ways."""

    aspect_ratios: tuple[tuple[PositiveFloat, ...], ...]
    """Of each feature map: the longer side over the shorter one."""
    scales: tuple[PositiveFloat, ...]
    """Of each feature map, and one more: the second square's is between those of two feature maps."""
    steps: tuple[PositiveInt, ...] = ()
    """Pixels between the cells of each feature map; none: by its size."""
    clip: bool = True
    """No box is larger than the image."""


@dataclass(frozen=True)
class PyramidAnchorGenerator(Checked):
    """The anchors of torchvision's Faster R-CNN, RetinaNet and FCOS (`AnchorGenerator` there)."""

    sizes: tuple[tuple[PositiveInt, ...], ...]
    """Of each feature map, in pixels: the square root of an anchor's area."""
    aspect_ratios: tuple[PositiveFloat, ...] = (0.5, 1.0, 2.0)
    """Height over width; each with each size, the sizes first."""


AnchorGenerator = GridAnchorGenerator | SsdAnchorGenerator | MultiscaleAnchorGenerator | FlexibleGridAnchorGenerator


@dataclass(frozen=True)
class FasterRcnnBoxCoder(Checked):
    """Centre and logarithm of the size, relative to the anchor, each times its factor."""

    y_scale: PositiveFloat = 10.0
    x_scale: PositiveFloat = 10.0
    height_scale: PositiveFloat = 5.0
    width_scale: PositiveFloat = 5.0


@dataclass(frozen=True)
class KeypointBoxCoder(Checked):
    """A box like `FasterRcnnBoxCoder`, and keypoints relative to the anchor's centre."""

    num_keypoints: PositiveInt
    y_scale: PositiveFloat = 10.0
    x_scale: PositiveFloat = 10.0
    height_scale: PositiveFloat = 5.0
    width_scale: PositiveFloat = 5.0


@dataclass(frozen=True)
class MeanStddevBoxCoder(Checked):
    """Corners relative to the anchor's, over a standard deviation."""

    stddev: PositiveFloat = 0.01


@dataclass(frozen=True)
class SquareBoxCoder(Checked):
    """Centre and side of a square."""

    y_scale: PositiveFloat = 10.0
    x_scale: PositiveFloat = 10.0
    length_scale: PositiveFloat = 5.0


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


BoxCoder = FasterRcnnBoxCoder | KeypointBoxCoder | MeanStddevBoxCoder | SquareBoxCoder


@dataclass(frozen=True)
class ArgmaxMatcher(Checked):
    """Each anchor belongs to the object that is most similar to it, if it is similar enough."""

    matched_threshold: FiniteFloat = 0.5
    unmatched_threshold: FiniteFloat = 0.5
    ignore_thresholds: bool = False
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
class NegSqDistSimilarity:
    """Minus the squared distance of the corners."""


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


Similarity = NegSqDistSimilarity | IouSimilarity | IoaSimilarity | ThresholdedIouSimilarity
