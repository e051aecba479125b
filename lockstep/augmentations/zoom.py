"""Zooming in and out of images with the objects on them, as torchvision's transforms v2 have it.

The crop and the expansion of SSD (Liu et al., SSD: Single shot multibox detector, 2016), and large scale jitter (Ghiasi
et al., Simple copy-paste, 2021). Names, parameters, defaults and laws are torchvision's; the numbers drawn are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch

from lockstep.augmentations.augment import Bounds, Share, drawn_between, drawn_corners, drawn_shares
from lockstep.augmentations.joining import Colours, canvas, dtype_of
from lockstep.checks import (
    Checked,
    Hint,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    Range,
    check_least_and_most,
    ordered,
)
from lockstep.errors import InputError
from lockstep.images.fields import cropped_image, decoded, draw_moved, images_of, sides_of
from lockstep.images.moves import Bools, Float64s, Int64s, Region, move
from lockstep.images.objects import Fields, as_ragged, move_objects, object_fields, select_objects
from lockstep.images.resizing import resized

if TYPE_CHECKING:
    from lockstep.randomness import Draws

_Sides = Annotated[tuple[PositiveInt, PositiveInt], Hint("write [1024, 1024]")]
_Expansion = Annotated[float, Range(ge=1)]

_OPTIONS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
_MOST_ROUNDS = 50  # of 40 trials each: an image that has no such crop stays whole


@dataclass(frozen=True)
class ScaleJitter(Checked):
    """Resize each image, at its own aspect, to a random scale of the one at which it fits into the target size."""

    target_size: _Sides = (1024, 1024)
    """Height and width into which an image fits at scale 1, in pixels."""
    scale_range: Bounds = (0.1, 2.0)
    """The least and the most of the scale."""
    field: str = "image"
    """The field of a batch that holds the images."""

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images resized, as a list of images."""
        images = images_of(batch, self.field, self)
        sides = sides_of(images)
        scales = drawn_between(draws, f"ScaleJitter {self.field} scale", *self.scale_range)
        fits = (np.array(self.target_size) / sides).min(1)
        after = np.floor(sides * (fits * scales)[:, None]).astype(np.int64).clip(1)
        moves = [move(each, to=to) for each, to in zip(sides.tolist(), after.tolist(), strict=True)]
        pixels = [resized(decoded(image), by.to_height, by.to_width) for image, by in zip(images, moves, strict=True)]
        return {**move_objects(batch, moves), self.field: pixels}


@dataclass(frozen=True)
class FixedSizeCrop(Checked):
    """Cut a random part of one size out of each image; one that is too small is filled up at the right and below.

    It follows `ScaleJitter`, as in torchvision's training of detectors with large scale jitter.
    """

    size: _Sides = (1024, 1024)
    """Height and width of the result, in pixels."""
    fill: Colours = (0, 0, 0)
    """Red, green and blue of what is filled up."""
    field: str = "image"
    """The field of a batch that holds the images."""

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images cropped, as a tensor of shape (batch, 3, height, width)."""
        images = images_of(batch, self.field, self)
        sides = sides_of(images)
        corners = drawn_corners(draws, f"FixedSizeCrop {self.field}", (sides - self.size).clip(0))
        moves = [
            move(each, Region(corner[0], corner[1], *self.size))
            for each, corner in zip(sides.tolist(), corners.tolist(), strict=True)
        ]
        pixels = canvas(*self.size, self.fill, dtype_of(images)).repeat(len(images), 1, 1, 1)
        for result, image, by in zip(pixels, images, moves, strict=True):
            draw_moved(image, by, result)
        return {**move_objects(batch, moves), self.field: pixels}


@dataclass(frozen=True)
class RandomZoomOut(Checked):
    """Put some images at a random place on a larger canvas, so that their objects become small once it is resized."""

    fill: Colours = (0, 0, 0)
    """Red, green and blue of the canvas."""
    side_range: Annotated[tuple[_Expansion, _Expansion], ordered, Hint("write [1.0, 4.0]")] = (1.0, 4.0)
    """The least and the most of its sides, in those of the image."""
    p: Probability = 0.5
    """The probability that an image is put on a canvas."""
    field: str = "image"
    """The field of a batch that holds the images."""

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images, as a list of images."""
        images = [*images_of(batch, self.field, self)]
        column = f"RandomZoomOut {self.field}"
        sides = sides_of(images)
        scales = drawn_between(draws, f"{column} scale", *self.side_range)
        large = np.floor(sides * scales[:, None]).astype(np.int64)
        corners = np.floor((large - sides) * drawn_shares(draws, column, "top", "left")).astype(np.int64)
        moves = [move(each) for each in sides.tolist()]
        for row in np.flatnonzero(draws.uniform(f"{column} p") < self.p).tolist():
            by = moves[row] = move(moves[row][:2], Region(*(-corners[row]).tolist(), *large[row].tolist()))
            zoomed = canvas(by.to_height, by.to_width, self.fill, dtype_of(images[row : row + 1]))
            draw_moved(images[row], by, zoomed)
            images[row] = zoomed
        return {**move_objects(batch, moves), self.field: images}


@dataclass(frozen=True)
class RandomIoUCrop(Checked):
    """Cut a random part out of each image that overlaps one of its objects enough, as SSD does.

    One of the options is drawn: 1 or more keeps all of the image, any other is the least overlap (intersection over
    union) that the part must have with an object whose center lies in it. Of so many trials the first part that has it
    is taken; if none has, another option is drawn. An image without objects stays whole. Objects whose centers lie
    outside of the part are dropped.
    """

    min_scale: Share = 0.3
    """The least of height and width of the part, in those of the image."""
    max_scale: Share = 1.0
    """The most of them."""
    min_aspect_ratio: PositiveFloat = 0.5
    """The least of the part's width by its height."""
    max_aspect_ratio: PositiveFloat = 2.0
    """The most of it."""
    sampler_options: Annotated[tuple[NonNegativeFloat, ...], Hint("write [0.0, 0.5, 1.0]")] = _OPTIONS
    """The least overlaps, each drawn as often."""
    trials: PositiveInt = 40
    """Parts that are tried for an option."""
    field: str = "image"
    """The field of a batch that holds the images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least_and_most(self, "min_scale", "max_scale")
        check_least_and_most(self, "min_aspect_ratio", "max_aspect_ratio")
        if not self.sampler_options:
            raise InputError(
                "There is no overlap to draw.",
                given="sampler_options=()",
                expected="one number or more",
                hint="leave it out, and it is 0, 0.1, 0.3, 0.5, 0.7, 0.9 or 1",
            )

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images cropped, as a list of images; encoded ones are decoded there only, later."""
        images = images_of(batch, self.field, self)
        if "boxes" not in object_fields(batch):
            return batch
        sides = sides_of(images)
        boxes = as_ragged(batch["boxes"])
        corners = boxes.values.double().numpy() * np.tile(sides, 2)[boxes.owner.numpy()]
        regions = self.regions(sides, corners, boxes.lengths.numpy(), draws)
        moves = [move(each, Region(*part)) for each, part in zip(sides.tolist(), regions.tolist(), strict=True)]
        inside = _centers_inside(corners, regions[boxes.owner.numpy()][:, :, None])[:, 0]
        is_whole = np.array([by.stays_whole for by in moves], np.bool_)[boxes.owner.numpy()]
        kept = select_objects(batch, torch.from_numpy(inside | is_whole))
        return {**move_objects(kept, moves), self.field: list(map(cropped_image, images, moves))}

    def regions(self, sides: Int64s, boxes: Float64s, lengths: Int64s, draws: Draws) -> Int64s:
        """Draw the part of each image: top, left, height and width in pixels, shape (batch, 4).

        Sides (batch, 2) and boxes (total, 4) are in pixels; `lengths` says how many boxes each image has, (batch,).
        """
        regions = np.concatenate([np.zeros_like(sides), sides], axis=1)
        ends = np.cumsum(lengths)
        open_rows = np.flatnonzero(lengths)
        for number in range(_MOST_ROUNDS):
            theirs = draws.of_rows(open_rows)
            options = theirs.integers(f"RandomIoUCrop {self.field} {number} option", 0, len(self.sampler_options))
            least = np.array(self.sampler_options)[options]
            open_rows, theirs, least = open_rows[least < 1], theirs.of_rows(least < 1), least[least < 1]
            if not len(open_rows):
                break
            tried, is_valid = self._tried(sides[open_rows], theirs, f"RandomIoUCrop {self.field} {number}")
            found = np.zeros(len(open_rows), np.bool_)
            for place, row in enumerate(open_rows.tolist()):
                own = boxes[ends[row] - lengths[row] : ends[row]]
                fits = is_valid[place] & (_overlaps(own, tried[place]) >= least[place])
                if fits.any():
                    found[place], regions[row] = True, tried[place, fits.argmax()]
            open_rows = open_rows[~found]
        return regions

    def _tried(self, sides: Int64s, draws: Draws, column: str) -> tuple[Int64s, Bools]:
        """Draw parts to try, shape (rows, trials, 4), and say which of them have a size and an aspect as asked for."""
        numbers = (draws.uniforms(f"{column} {what}", self.trials) for what in ("height", "width", "top", "left"))
        height, width, top, left = numbers
        span = self.max_scale - self.min_scale
        whole = sides[:, None]
        part = np.floor(whole * (self.min_scale + span * np.stack([height, width], axis=2))).astype(np.int64)
        corner = np.floor((whole - part) * np.stack([top, left], axis=2)).astype(np.int64)
        with np.errstate(divide="ignore", invalid="ignore"):
            aspect = part[..., 1] / part[..., 0]
        is_valid = (part > 0).all(2) & (self.min_aspect_ratio <= aspect) & (aspect <= self.max_aspect_ratio)
        return np.concatenate([corner, part], axis=2), is_valid


def _overlaps(boxes: Float64s, regions: Int64s) -> Float64s:
    """Compute the most that each region, (regions, 4), overlaps a box whose center lies in it; -1 where none does."""
    top, left, height, width = (column[None] for column in regions.T)
    both = (np.minimum(boxes[:, 2, None], top + height) - np.maximum(boxes[:, 0, None], top)).clip(0) * (
        np.minimum(boxes[:, 3, None], left + width) - np.maximum(boxes[:, 1, None], left)
    ).clip(0)
    areas = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        overlaps = both / (areas + height * width - both)
    most: Float64s = np.where(_centers_inside(boxes, regions.T[None]), overlaps, -1.0).max(0, initial=-1.0)
    return most


def _centers_inside(boxes: Float64s, regions: Int64s) -> Bools:
    """Say which centers of boxes, (total, 4), lie in which regions, (total or 1, 4, regions): (total, regions)."""
    top, left, height, width = (regions[:, place] for place in range(4))
    row, column = ((boxes[:, side] + boxes[:, side + 2])[:, None] / 2 for side in (0, 1))
    inside: Bools = (top < row) & (row < top + height) & (left < column) & (column < left + width)
    return inside
