"""Options of TensorFlow's object detection API that lay some of the images down another way, and their objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.checks import Checked, NonNegativeInt, Probability
from lockstep.images.augment import turned_rows
from lockstep.images.moves import QUARTER_TURN, UPSIDE_DOWN
from lockstep.randomness import Draws


@dataclass(frozen=True)
class RandomVerticalFlip(Checked):
    """Exchange top and bottom of some of the images: random_vertical_flip."""

    p: Probability = 0.5
    """The probability that an image is flipped."""
    keypoint_flip_permutation: tuple[NonNegativeInt, ...] = ()
    """For each keypoint of an object the one that is in its place on the flipped image. Needed where there are
    keypoints."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with some of its images flipped; those not decoded yet are flipped when they are."""
        flipped = draws.uniform("RandomVerticalFlip image") < self.p
        return turned_rows(batch, "image", UPSIDE_DOWN, flipped, self, self.keypoint_flip_permutation)


@dataclass(frozen=True)
class RandomRotation90(Checked):
    """Turn some of the images counter-clockwise, by 90 degrees: random_rotation90.

    Images of one size, in one tensor, become a list of images unless they are square.
    """

    p: Probability = 0.5
    """The probability that an image is turned."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with some of its images turned; those not decoded yet are turned when they are."""
        turned = draws.uniform("RandomRotation90 image") < self.p
        return turned_rows(batch, "image", QUARTER_TURN, turned, self)
