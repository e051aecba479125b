"""Copy-paste: objects are cut out of one image along their masks, and pasted onto another one.

Ghiasi et al., Simple copy-paste is a strong data augmentation method for instance segmentation, 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from lockstep.augmentations.augment import drawn_corners
from lockstep.augmentations.joining import WithPartners, dtype_of, images_and_objects, join_objects
from lockstep.checks import Probability
from lockstep.errors import InputError
from lockstep.images.fields import decoded, describe_field, sides_of
from lockstep.images.masks import DenseMasks
from lockstep.images.moves import Bools, Region, move
from lockstep.images.objects import Fields, as_ragged, move_objects, object_numbers, select_objects
from lockstep.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.images.fields import Image
    from lockstep.images.moves import Masks
    from lockstep.randomness import Draws


@dataclass(frozen=True)
class CopyPaste(WithPartners):
    """Paste some of the objects of another image onto each, along their masks.

    The other image lies on this one at its own size, at a random place: over it exactly where both are of one size, as
    `ScaleJitter` and `FixedSizeCrop` make them. What a pasted object covers, is taken off the masks, boxes and areas of
    the objects below; their covered keypoints are labelled and not visible any more, which is visibility 1.
    """

    share: Probability = 0.5
    """The probability that an object of the other image is pasted; crowds never are."""
    min_visible: Probability = 0.1
    """Objects of whose masks a smaller share is left are dropped, and so are those of which nothing is."""
    p: Probability = 1.0
    """The probability that objects are pasted onto an image; else it stays as it is."""
    field: str = "image"

    num_partners: ClassVar[int] = 1

    def __call__(self, batch: Fields, draws: Draws, partners: Sequence[Fields] = ()) -> Fields:
        """Return the batch with objects pasted onto its images, as a list of images."""
        rows = np.flatnonzero(self.needs_partners(draws))
        images = [*images_and_objects(batch, self.field, self)]
        if "masks" not in batch:
            raise InputError(
                "CopyPaste finds no masks along which objects could be cut out.",
                given=describe_field(batch, "masks"),
                expected='masks of objects in the field "masks"',
                hint="read them, too (of a recipe: data.masks=true); for data without masks there are Mosaic and MixUp",
            )
        if not len(rows):
            return batch
        self.check_partners(partners)
        draws = draws.of_rows(rows)
        chosen = self._chosen(partners[0], draws)
        sides, their_sides = sides_of(images)[rows], sides_of(chosen[self.field])
        room = their_sides - sides
        # Where this image has its upper left corner on the other one.
        corners = np.minimum(room, 0) + drawn_corners(draws, f"CopyPaste {self.field}", np.abs(room))
        parts = [Region(*part) for part in np.concatenate([corners, sides], axis=1).tolist()]
        onto = map(move, their_sides.tolist(), parts)
        pasted = move_objects(chosen, onto, min_overlap=self.min_visible)
        shown = [_pixels(masks) for masks in pasted["masks"]]
        pasted = select_objects(pasted, torch.from_numpy(np.concatenate([each.any((1, 2)) for each in shown])))
        covers: list[Bools] = [np.logical_or.reduce(each) for each in shown]
        for row, other, cover, corner in zip(rows.tolist(), chosen[self.field], covers, corners.tolist(), strict=True):
            images[row] = _pasted(images[row], other, cover, corner)
        below = _covered(batch, dict(zip(rows.tolist(), covers, strict=True)), self.min_visible)
        return {**join_objects(below, [pasted], torch.from_numpy(rows)), self.field: images}

    def _chosen(self, partner: Fields, draws: Draws) -> Fields:
        keep = object_numbers(as_ragged(partner["boxes"]), draws, f"CopyPaste {self.field} object") < self.share
        if "is_crowd" in partner:
            keep &= ~as_ragged(partner["is_crowd"]).values
        images = images_and_objects(partner, self.field, self)
        return {**select_objects(partner, keep), self.field: images}


@dataclass(frozen=True, slots=True, eq=False)
class CoveredMasks:
    """Masks of objects of which a part is covered, not decoded yet."""

    stored: Masks
    """As they were before."""
    cover: DenseMasks
    """A mask of the part of the image that is covered."""

    @property
    def height(self) -> int:
        """Height of each mask, in pixels."""
        return self.cover.height

    @property
    def width(self) -> int:
        """Width of each mask, in pixels."""
        return self.cover.width

    def __len__(self) -> int:
        return len(self.stored)

    def decode(self) -> Tensor:
        """Decode to uint8 of shape (masks, height, width), 0 or 1."""
        return self.stored.decode() * (1 - self.cover.decode())

    def selected(self, places: Sequence[int]) -> CoveredMasks:
        """Keep the masks at these places alone."""
        return replace(self, stored=self.stored.selected(places))


def _pasted(image: Image, other: Image, cover: Bools, corner: Sequence[int]) -> Tensor:
    """Copy the covered pixels from another image, on which this one has its corner at this place."""
    pixels = decoded(image)
    if not cover.any():
        return pixels
    (first, last), (left, right) = _spans(cover)
    region = Region(corner[0] + first, corner[1] + left, last - first, right - left)
    result = pixels.to(dtype_of((image, other)), copy=True)
    part = result.numpy()[:, first:last, left:right]
    np.copyto(part, decoded(other, region).numpy(), where=cover[first:last, left:right])
    return result


def _covered(batch: Fields, covers: dict[int, Bools], min_visible: float) -> Fields:
    """Take what is covered off the objects of some rows."""
    boxes = as_ragged(batch["boxes"])
    shares, values = torch.ones(len(boxes.values)), boxes.values.clone()
    masks = [*batch["masks"]]
    # Views of the values of each image: what is written to them is written to all.
    for row, (share, box) in enumerate(zip(boxes.replaced(shares), boxes.replaced(values), strict=True)):
        if row in covers and _hide(masks[row], covers[row], share, box):
            masks[row] = _under(masks[row], covers[row])
    below = {**batch, "boxes": boxes.replaced(values), "masks": masks}
    if "area" in batch:
        areas = as_ragged(batch["area"])
        below["area"] = areas.replaced(areas.values * shares)
    if {"keypoints", "keypoint_visibility"} <= batch.keys():
        below["keypoint_visibility"] = _seen_keypoints(batch, covers)
    return select_objects(below, (shares > 0) & (shares >= min_visible))


def _hide(masks: Masks | Tensor, cover: Bools, shares: Tensor, boxes: Tensor) -> bool:
    """Find what is left of the objects of an image: the shares of their masks, and their boxes, are written to these.

    Masks are decoded only where a box meets one around the cover. Returns whether anything is covered.
    """
    if not cover.any():
        return False
    (first, last), (left, right) = _spans(cover)
    sides = torch.tensor(cover.shape * 2)
    # A mask may reach out of its box by a pixel.
    outer = torch.tensor([first - 1, left - 1, last + 1, right + 1]) / sides
    meet = ((boxes[:, :2] < outer[2:]) & (boxes[:, 2:] > outer[:2])).all(1).nonzero()[:, 0].tolist()
    is_changed = False
    for place, whole in zip(meet, _pixels(_selected(masks, meet)), strict=True):
        hidden = np.count_nonzero(whole[first:last, left:right] & cover[first:last, left:right])
        if not hidden:
            continue
        is_changed, count = True, np.count_nonzero(whole)
        shares[place] = (count - hidden) / count
        if hidden < count:
            rows, columns = _spans(whole & ~cover)
            boxes[place] = torch.tensor([rows[0], columns[0], rows[1], columns[1]]) / sides
    return is_changed


def _seen_keypoints(batch: Fields, covers: dict[int, Bools]) -> Ragged:
    """Return the visibility of keypoints, of which those that are covered are labelled only."""
    points, visibility = as_ragged(batch["keypoints"]), as_ragged(batch["keypoint_visibility"])
    values = visibility.values.clone()
    for row, (places, seen) in enumerate(zip(points, visibility.replaced(values), strict=True)):
        if row in covers and len(places):
            sides = torch.tensor(covers[row].shape)
            at = (places.nan_to_num(-1) * sides).floor().long()
            is_inside = ((at >= 0) & (at < sides)).all(-1)
            y, x = at.clamp(min=0).minimum(sides - 1).unbind(-1)
            seen.masked_fill_(is_inside & torch.from_numpy(covers[row])[y, x] & (seen > 1), 1)
    return visibility.replaced(values)


def _under(masks: Masks | Tensor, cover: Bools) -> Masks | Tensor:
    if isinstance(masks, torch.Tensor):
        return masks * ~torch.from_numpy(cover)
    return CoveredMasks(masks, DenseMasks(np.packbits(cover).tobytes(), 1, *cover.shape))


def _pixels(masks: Masks | Tensor) -> Bools:
    """Decode masks to bool of shape (masks, height, width): NumPy looks for any true ones many times as fast."""
    pixels: Bools = (masks if isinstance(masks, torch.Tensor) else masks.decode()).numpy().view(np.bool_)
    return pixels


def _selected(masks: Masks | Tensor, places: list[int]) -> Masks | Tensor:
    return masks[places] if isinstance(masks, torch.Tensor) else masks.selected(places)


def _spans(mask: Bools) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the first row with a true pixel and the one after the last, and the columns likewise."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return (int(rows[0]), int(rows[-1]) + 1), (int(columns[0]), int(columns[-1]) + 1)
