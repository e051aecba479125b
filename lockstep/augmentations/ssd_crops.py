"""The random crops of SSD, each image's by one of several operations, as TensorFlow's object detection API has them.

Liu et al., SSD: Single shot multibox detector, 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.augmentations.padding import Colour, RandomCropPadImage, Ratios, crop_and_pad, pad_to_aspect_ratio
from lockstep.augmentations.random_crops import CropLimits, crop_at_random, crop_to_aspect_ratio
from lockstep.checks import Checked, PositiveFloat, Probability
from lockstep.images.augment import Int64s, Share
from lockstep.randomness import Draws

_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
_OVERLAP_OF_THE_SECOND_CROP = 0.3


@dataclass(frozen=True)
class SsdRandomCropOperation(CropLimits):
    """One of the operations that `SsdRandomCrop` and `SsdRandomCropPadFixedAspectRatio` choose from."""

    min_object_covered: Probability = 0.0
    min_aspect_ratio: PositiveFloat = 0.5
    max_aspect_ratio: PositiveFloat = 2.0
    overlap_thresh: Probability = 0.0


@dataclass(frozen=True)
class SsdRandomCropPadOperation(SsdRandomCropOperation):
    """One of the operations that `SsdRandomCropPad` chooses from."""

    min_padded_size_ratio: Ratios = (1.0, 1.0)
    """As `RandomCropPadImage` has them."""
    max_padded_size_ratio: Ratios = (2.0, 2.0)
    pad_color_r: Colour = 0.0
    """Red of the padding, 0 to 255; without operations it has the mean colour of the crop."""
    pad_color_g: Colour = 0.0
    pad_color_b: Colour = 0.0


@dataclass(frozen=True)
class SsdRandomCropFixedAspectRatioOperation(Checked):
    """One of the operations that `SsdRandomCropFixedAspectRatio` chooses from: see `CropLimits`."""

    min_object_covered: Probability = 0.0
    min_area: Share = 0.1
    max_area: Share = 1.0
    overlap_thresh: Probability = 0.0
    random_coef: Probability = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.limits(1.0)

    def limits(self, aspect_ratio: float) -> CropLimits:
        """Return the limits of windows of this aspect."""
        areas = self.min_area, self.max_area
        return CropLimits(
            self.min_object_covered, aspect_ratio, aspect_ratio, *areas, self.overlap_thresh, self.random_coef
        )


@dataclass(frozen=True)
class SsdRandomCrop:
    """Crop each image by one of several operations, each as often: ssd_random_crop."""

    operations: tuple[SsdRandomCropOperation, ...] = ()
    """None: those of the paper, where a window shows a share of 0, 0.1, 0.3, 0.5, 0.7, 0.9 or all of an object, and
    keeps the objects that it shows as much of; an image in 7 stays as it is (0.15)."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images cropped: a list of images of several sizes."""
        return _cropped_by_one_of(self.operations or _operations(), batch, draws, self)


@dataclass(frozen=True)
class SsdRandomCropPad:
    """Crop and pad each image by one of several operations, each as often: ssd_random_crop_pad."""

    operations: tuple[SsdRandomCropPadOperation, ...] = ()
    """None: those of the paper without the share of 0; padded to as much as twice the height and the width of the image
    before, with the mean colour of the crop."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images cropped and padded: a list of images of several sizes."""
        operations = [_as_crop_pad(operation) for operation in self.operations] or [
            RandomCropPadImage(share, 0.5, 2.0, overlap_thresh=share, random_coef=0.15) for share in _SHARES
        ]
        return crop_and_pad(batch, draws, operations, _chosen(operations, draws, self), self)


@dataclass(frozen=True)
class SsdRandomCropFixedAspectRatio(Checked):
    """Crop by one of several operations, by windows of one aspect: ssd_random_crop_fixed_aspect_ratio.

    Then all images, also those that have stayed as they were, are cropped as by `RandomCropToAspectRatio`.
    """

    operations: tuple[SsdRandomCropFixedAspectRatioOperation, ...] = ()
    """None: those of `SsdRandomCrop`."""
    aspect_ratio: PositiveFloat = 1.0
    """Width / height of a window. Without operations it is 1, whatever is given here, as in the reference."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images cropped: a list of images of several sizes."""
        ratio = self.aspect_ratio if self.operations else 1.0
        limits = [each.limits(ratio) for each in self.operations] or _operations(ratio, ratio)
        batch = _cropped_by_one_of(limits, batch, draws, self)
        return crop_to_aspect_ratio(batch, draws, ratio, _OVERLAP_OF_THE_SECOND_CROP, self)


@dataclass(frozen=True)
class SsdRandomCropPadFixedAspectRatio(Checked):
    """Crop as `SsdRandomCrop`, then pad as `RandomPadToAspectRatio`: ssd_random_crop_pad_fixed_aspect_ratio."""

    operations: tuple[SsdRandomCropOperation, ...] = ()
    """None: those of `SsdRandomCrop`."""
    aspect_ratio: PositiveFloat = 1.0
    """Width / height of the result."""
    min_padded_size_ratio: Ratios = (1.0, 1.0)
    """As `RandomPadToAspectRatio` has them, of the crop."""
    max_padded_size_ratio: Ratios = (2.0, 2.0)

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images cropped and padded: a list of images of several sizes."""
        batch = _cropped_by_one_of(self.operations or _operations(), batch, draws, self)
        ratios = self.min_padded_size_ratio, self.max_padded_size_ratio
        return pad_to_aspect_ratio(batch, draws, self.aspect_ratio, *ratios, self)


def _operations(least: float = 0.5, most: float = 2.0) -> list[CropLimits]:
    """Return the operations of the paper, for windows of a width / height between these."""
    return [CropLimits(share, least, most, overlap_thresh=share, random_coef=0.15) for share in (0.0, *_SHARES)]


def _as_crop_pad(operation: SsdRandomCropPadOperation) -> RandomCropPadImage:
    limits = {name: getattr(operation, name) for name in CropLimits.__dataclass_fields__}
    colour = operation.pad_color_r, operation.pad_color_g, operation.pad_color_b
    return RandomCropPadImage(
        **limits,
        min_padded_size_ratio=operation.min_padded_size_ratio,
        max_padded_size_ratio=operation.max_padded_size_ratio,
        pad_color=colour,
    )


def _cropped_by_one_of(
    operations: Sequence[CropLimits], batch: dict[str, Any], draws: Draws, wanted_by: object
) -> dict[str, Any]:
    return crop_at_random(batch, draws, operations, _chosen(operations, draws, wanted_by), wanted_by)


def _chosen(operations: Sequence[CropLimits], draws: Draws, wanted_by: object) -> Int64s:
    """Draw the number of the operation for each image, shape (batch,)."""
    return draws.integers(f"{type(wanted_by).__name__} image operation", 0, len(operations))
