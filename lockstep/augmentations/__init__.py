"""Augmentations of images with the objects on them: boxes, masks and keypoints go where the pixels go."""

from __future__ import annotations

from lockstep.images.augment import HorizontalFlip

AUGMENTATIONS: tuple[type, ...] = (HorizontalFlip,)
"""All that the data of a detector may name in `augment`."""
