"""Anchors and regions of detectors in two stages: proposals, which of them a tower draws to learn from, their masks.

Proposals of a batch stand in blocks of one size, so that the host need not know how many there are, or as regions, one
image after the other. In a traced graph regions are a block, too: none of its shapes depends on what was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lockstep.detection.anchor_matching import (
    BACKGROUND,
    IGNORED,
    AnyMatcher,
    after_none,
    balanced_sample,
    kinds,
    match_images,
    places_of,
    rows_of_all,
    rows_of_objects,
)
from lockstep.detection.blocks import IouSimilarity
from lockstep.detection.box_coders import AnyBoxCoder, encode
from lockstep.detection.boxes import Shape
from lockstep.detection.detector import Detections, Targets
from lockstep.detection.roi_align import roi_align_masks
from lockstep.errors import DataError
from lockstep.tensors import tensor_on

ROUNDS = 32
"""Rounds of NMS between reads; proposals around objects need up to 20."""


class AssignedAnchors(NamedTuple):
    """Anchors matched to objects, before sampling."""

    targets: Targets
    matches: Tensor
    """int64 (batch, anchors): as `anchor_matching.match` gives them."""


class DrawnAnchors(NamedTuple):
    """What the first stage learns from."""

    places: Tensor
    """int64 (drawn,): of the anchors, counted over all images."""
    is_object: Tensor
    """float (drawn,): 1 where an anchor learns an object, else 0."""
    codes: Tensor
    """(drawn, 4): of the object's box; of no use where there is none."""


class Proposals(NamedTuple):
    """Boxes of each image, in blocks of one size: what is in them the host need not know."""

    boxes: Tensor
    """(batch, most, 4)."""
    is_there: Tensor
    """bool (batch, most): False for what is no box, whatever its numbers."""
    is_settled: Tensor
    """bool (): False where NMS has not made enough rounds."""


class Regions(NamedTuple):
    """Proposals of all images, one image after the other."""

    boxes: Tensor
    """(regions, 4)."""
    image_of: Tensor
    """int64 (regions,)."""
    object_of: Tensor
    """int64 (regions,): what each learns, the place of an object on its image; `BACKGROUND` where it learns none."""
    lengths: list[int]
    num_learning: list[int]
    """How many on each image learn an object."""
    largest: Shape | None = None
    """Height and width that no box exceeds; None: unknown."""


def in_blocks(boxes: Sequence[Tensor]) -> Proposals:
    """Join boxes (n, 4) of each image."""
    lengths = tensor_on(boxes[0].device, [len(each) for each in boxes], torch.int64)
    block = pad_sequence(list(boxes), batch_first=True)
    is_there = torch.arange(block.shape[1], device=block.device) < lengths[:, None]
    return Proposals(block, is_there, is_there.new_ones(()))


def with_objects(proposals: Proposals, targets: Targets) -> Proposals:
    """Return the proposals of each image, and after them the boxes of its objects that are learned."""
    rows = rows_of_all(targets.boxes, proposals.boxes.device)
    boxes = torch.cat([proposals.boxes, after_none(targets.boxes)[rows]], 1)
    is_there = torch.cat([proposals.is_there, F.pad(_are_learned(targets), (1, 0))[rows]], 1)
    return Proposals(torch.where(is_there[..., None], boxes, 0), is_there, proposals.is_settled)


def region_matches(matcher: AnyMatcher, proposals: Proposals, targets: Targets) -> Tensor:
    """Match proposals to the objects of their images: int64 (batch, most)."""
    matches = match_images(matcher, IouSimilarity(), targets.boxes, proposals.boxes)
    return torch.where(proposals.is_there, ignoring(matches, targets), IGNORED)


def read_with_kinds(
    numbers: Tensor, of_anchors: Tensor, of_regions: Tensor
) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Read whole numbers, (n,), and the `kinds` of the matches of anchors and of regions: all of them at once."""
    of_both = [kinds(of_anchors), kinds(of_regions)]
    read = torch.cat([numbers.long(), *(each.flatten() for each in of_both)]).cpu()
    first, rest = read[: len(numbers)].tolist(), read[len(numbers) :].view(2, 2, -1).tolist()
    return first, rest[0], rest[1]


@torch.no_grad()
def drawn_anchors(
    assigned: AssignedAnchors,
    anchors: Tensor,
    coder: AnyBoxCoder,
    number: int,
    positive_fraction: float,
    numbers: Sequence[list[int]] | None = None,
) -> DrawnAnchors:
    """Draw the anchors, of all (anchors, 4), that the first stage learns from.

    They are at most `number` of an image, and of these at most `positive_fraction` learn an object. `numbers` are those
    of `kinds`, if the host has read them already.
    """
    targets, matches = assigned
    places = balanced_sample(matches, number, positive_fraction, numbers).places
    image_of, object_of = places // len(anchors), matches.flatten()[places]
    codes = encode(coder, object_boxes(targets, image_of, object_of), anchors[places % len(anchors)])
    return DrawnAnchors(places, (object_of >= 0).to(codes.dtype), codes)


@torch.no_grad()
def drawn_regions(
    proposals: Proposals,
    matches: Tensor,
    number: int,
    positive_fraction: float,
    numbers: Sequence[list[int]] | None = None,
) -> Regions:
    """Draw the regions that the second stage learns from, of proposals with their `region_matches`.

    They are at most `number` of an image, and of these at most `positive_fraction` learn an object. `numbers` are those
    of `kinds`, if the host has read them already.
    """
    places, lengths, num_learning = balanced_sample(matches, number, positive_fraction, numbers)
    image_of, object_of = places // matches.shape[1], matches.flatten()[places]
    return Regions(proposals.boxes.flatten(0, 1)[places], image_of, object_of, lengths, num_learning)


def all_regions(boxes: Sequence[Tensor]) -> Regions:
    """Join the boxes of each image, (n, 4), to regions that learn nothing."""
    joined, lengths = torch.cat(list(boxes)), [len(each) for each in boxes]
    repeats = tensor_on(joined.device, lengths, torch.int64)
    image_of = torch.repeat_interleave(repeats, output_size=len(joined))
    return Regions(joined, image_of, torch.full_like(image_of, BACKGROUND), lengths, [0] * len(boxes))


def fixed_regions(proposals: Proposals) -> Regions:
    """Join the blocks of all images, for graphs: what is no box is `IGNORED`, and the one length is that of a block."""
    number, size = proposals.is_there.shape
    image_of = torch.arange(number, device=proposals.boxes.device)[:, None].expand(number, size).flatten()
    object_of = torch.where(proposals.is_there, BACKGROUND, IGNORED).flatten()
    return Regions(proposals.boxes.flatten(0, 1), image_of, object_of, [size], [0])


def found_regions(detections: Sequence[Detections]) -> tuple[Regions, Tensor]:
    """Join the boxes and the labels of the detections of all images, for masks to be drawn."""
    if torch.compiler.is_exporting():
        (block,) = detections
        is_there = block.labels > 0
        return fixed_regions(Proposals(block.boxes, is_there, is_there.new_ones(()))), block.labels.flatten()
    return all_regions([each.boxes for each in detections]), torch.cat([each.labels for each in detections])


def by_image(values: Tensor, regions: Regions) -> list[Tensor]:
    """Split values of regions, (regions, ...), into blocks (1, regions, ...) of each image.

    In a traced graph one block holds all images: (batch, regions, ...).
    """
    if torch.compiler.is_exporting():
        return [values.reshape(-1, regions.lengths[0], *values.shape[1:])]
    return [each[None] for each in torch.split(values, regions.lengths)]


def with_masks(detections: Sequence[Detections], masks: Tensor, regions: Regions) -> list[Detections]:
    """Add their masks, (regions, height, width), to the detections of all images."""
    if torch.compiler.is_exporting():
        return [detections[0]._replace(masks=by_image(masks, regions)[0])]
    of_images = torch.split(masks, regions.lengths)
    return [each._replace(masks=mask) for each, mask in zip(detections, of_images, strict=True)]


def places_that_learn(regions: Regions) -> Tensor:
    """Return the places of the regions that learn objects, int64 (n,)."""
    return places_of(regions.object_of >= 0, sum(regions.num_learning))


def learning_regions(regions: Regions) -> Regions:
    """Return the regions that learn objects."""
    places = places_that_learn(regions)
    boxes, image_of, object_of = (part[places] for part in regions[:3])
    return regions._replace(boxes=boxes, image_of=image_of, object_of=object_of, lengths=regions.num_learning)


def _are_learned(targets: Targets) -> Tensor:
    """Say which objects of all images are learned, bool (objects,): no crowds, and none of weight 0."""
    return (torch.cat(list(targets.weights)) > 0) & ~torch.cat(list(targets.is_crowd))


def ignoring(matches: Tensor, targets: Targets) -> Tensor:
    """Return matches (images, n) with those to objects that are not learned as `IGNORED`."""
    images = torch.arange(len(targets), device=matches.device)[:, None]
    are_ignored = F.pad(~_are_learned(targets), (1, 0))  # the first is read by what is matched to none
    return matches.masked_fill(are_ignored[rows_of_objects(targets.boxes, images, matches)], IGNORED)


def labels_of(targets: Targets, regions: Regions) -> Tensor:
    """Return the label of the object that each region learns, int64 (regions,); 0 where it learns none."""
    return after_none(targets.labels)[rows_of_objects(targets.boxes, regions.image_of, regions.object_of)]


def object_boxes(targets: Targets, image_of: Tensor, object_of: Tensor) -> Tensor:
    """Return the box of each object, (n, 4), and an empty one where there is none."""
    return after_none(targets.boxes)[rows_of_objects(targets.boxes, image_of, object_of)]


@torch.no_grad()
def mask_targets(targets: Targets, regions: Regions, size: tuple[int, int]) -> Tensor:
    """Return how much of each cell of a grid over each region its object covers: float32 (regions, *size).

    Raises:
        DataError: the objects have no masks.
    """
    boxes, object_of = (torch.split(part, regions.lengths) for part in (regions.boxes, regions.object_of))
    of_images = zip(masks_of(targets), boxes, object_of, strict=True)
    return torch.cat([roi_align_masks(*of_image, size, regions.largest) for of_image in of_images])


def masks_of(targets: Targets) -> Sequence[Tensor]:
    """Return the masks of the objects on each image.

    Raises:
        DataError: the objects have none.
    """
    if targets.masks is None:
        raise DataError(
            "There are no masks to train on.",
            given="objects with boxes alone",
            expected="a mask of each object",
            hint="read them (data.masks=true), or train a detector of boxes",
        )
    return targets.masks
