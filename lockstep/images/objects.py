"""The objects on the images of a batch: one value an object in each of several fields, which stay in step.

What is dropped is dropped from all of them, and what an image goes through goes all of them through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.errors import DataError
from lockstep.images.moves import Masks, Move, moved_boxes, moved_masks, moved_points
from lockstep.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.randomness import Draws

OBJECT_FIELDS = (
    "boxes",
    "labels",
    "class_text",
    "weights",
    "area",
    "is_crowd",
    "difficult",
    "group_of",
    "truncated",
    "view",
    "masks",
    "keypoints",
    "keypoint_visibility",
    "multiclass_scores",
    "label_scores",
)
"""The fields that have a value for each object, and any whose name begins with "object_"."""

LOCATION_FIELDS = ("boxes", "masks", "keypoints", "keypoint_visibility", "area")
"""The fields that say where an object is on its image, or its area."""

_LEAST_SEEN = 0.01  # of the height and the width of a box, in pixels: what is less may be made of rounding alone

Fields = dict[str, Any]


def object_fields(batch: Mapping[str, Any]) -> list[str]:
    """Name the fields of a batch that have a value for each object on its images."""
    return [
        name for name in batch if (name in OBJECT_FIELDS or name.startswith("object_")) and not _one_each(batch[name])
    ]


def as_ragged(values: Ragged | Sequence[Tensor]) -> Ragged:
    """Return a field of objects as `Ragged`; a list has a tensor for each image."""
    return values if isinstance(values, Ragged) else Ragged.of(values)


def object_numbers(boxes: Ragged, draws: Draws, column: str) -> Tensor:
    """Draw a number in [0, 1) for each object, by its place among those of its image: float64 of shape (total,)."""
    most = int(boxes.lengths.max()) if len(boxes) else 0
    is_there = np.arange(most) < boxes.lengths.numpy()[:, None]
    return torch.from_numpy(draws.uniforms(column, most)[is_there])


def select_objects(batch: Fields, keep: Tensor) -> Fields:
    """Drop objects from all fields that have a value for each: `keep`, bool (total,), says which of all images stay.

    Raises:
        DataError: a field has another number of values than boxes for an image.
    """
    if bool(keep.all()):
        return batch
    boxes = as_ragged(batch["boxes"])
    lengths = boxes.owner[keep].bincount(minlength=len(boxes)).cpu()
    keeps = [*boxes.replaced(keep)]
    selected = dict(batch)
    for name in object_fields(batch):
        values = batch[name]
        _check_in_step(name, values, boxes.lengths)
        is_ragged = isinstance(values, Ragged)
        selected[name] = Ragged(values.values[keep], lengths) if is_ragged else _selected(values, name, keeps)
    return selected


def move_objects(
    batch: Fields,
    moves: Iterable[Move],
    *,
    min_overlap: float | Tensor = 0.0,
    is_cut: Tensor | None = None,
    keypoint_order: Sequence[int] = (),
) -> Fields:
    """Move boxes, masks and keypoints as their images were moved, and scale areas.

    Of an image that has lost a part, objects of which less than 1/100 of a pixel's height or width is seen are dropped,
    boxes are clipped, and keypoints outside become NaN, of visibility 0.

    Args:
        batch: whose images were moved, or will be.
        moves: of the images, one for each; they are not asked for where there are no objects.
        min_overlap: the share of a box that has to be seen still, 0 to 1, or one for each image, shape (batch,).
        is_cut: from which images objects may be dropped, bool of shape (batch,); None: those that have lost a part.
        keypoint_order: for each keypoint of an object the one to put in its place, in the images that `moves` mirror.
    """
    names = object_fields(batch)
    if not names:
        return batch
    moved, moves = dict(batch), [*moves]
    if "boxes" in names:
        boxes = as_ragged(batch["boxes"])
        moved["boxes"] = boxes.replaced(moved_boxes(boxes.values, boxes.owner, moves))
    if "keypoints" in names:
        points = as_ragged(batch["keypoints"])
        if points.values.ndim != 3:
            raise DataError(
                "Keypoints are not those of objects.",
                given=f"a field 'keypoints' of shape {tuple(points.values.shape)} for all images",
                expected="floats of shape (objects, keypoints, 2) for each image",
                hint="make points of the image itself those of one object: points[:, None], (batch, 1, keypoints, 2)",
            )
        moved["keypoints"] = points.replaced(moved_points(points.values, points.owner, moves))
    if keypoint_order:
        mirrored = torch.tensor([by.turn.mirrors for by in moves], dtype=torch.bool)
        for name in ("keypoints", "keypoint_visibility"):
            if name in names:
                moved[name] = _reordered(as_ragged(moved[name]), mirrored, keypoint_order)
    if "masks" in names:
        moved["masks"] = [moved_masks(each, by) for each, by in zip(batch["masks"], moves, strict=True)]
    if "area" in names:
        areas = as_ragged(batch["area"])
        moved["area"] = areas.replaced(areas.values * torch.tensor([by.zoom for by in moves])[areas.owner])
    if is_cut is None:
        is_cut = torch.tensor([not by.stays_whole for by in moves], dtype=torch.bool)
    return _cut(moved, batch, moves, is_cut, min_overlap) if is_cut.any() else moved


def _cut(batch: Fields, before: Fields, moves: Sequence[Move], is_cut: Tensor, min_overlap: float | Tensor) -> Fields:
    """Drop what is not seen any more, and clip the rest."""
    if "keypoints" in batch:
        batch = _without_outer_keypoints(batch, is_cut)
    if "boxes" not in batch:
        return batch
    boxes = as_ragged(batch["boxes"])
    clipped = boxes.values.clamp(0, 1)
    sizes = torch.tensor([(by.to_height, by.to_width) for by in moves])[boxes.owner]
    is_seen = ((clipped[:, 2:] - clipped[:, :2]) * sizes >= _LEAST_SEEN).all(1)
    # Of the boxes before: one that ends where its part does is all in it, however the moved one is rounded.
    seen = shares_seen(as_ragged(before["boxes"]).values, _parts(moves)[boxes.owner])
    least = torch.as_tensor(min_overlap, dtype=seen.dtype).expand(len(is_cut))[boxes.owner]
    is_whole = ~is_cut[boxes.owner]
    batch = {**batch, "boxes": boxes.replaced(torch.where(is_whole[:, None], boxes.values, clipped))}
    if "area" in batch:
        areas = as_ragged(batch["area"])
        batch["area"] = areas.replaced(torch.where(is_whole, areas.values, areas.values * seen))
    return select_objects(batch, is_whole | (is_seen & (seen >= least)))


def _parts(moves: Sequence[Move]) -> Tensor:
    """Return what is cut out of each image as a box: float32 (batch, 4)."""
    sides = torch.tensor([by[:2] * 2 for by in moves])
    top, left, height, width = torch.tensor([by.region for by in moves]).unbind(1)
    return torch.stack([top, left, top + height, left + width], dim=1) / sides


def shares_seen(boxes: Tensor, parts: Tensor) -> Tensor:
    """Compute the share of each box, (total, 4), that lies within its part, (total, 4); 0 for a box without area."""
    inside = torch.cat([boxes[:, :2].maximum(parts[:, :2]), boxes[:, 2:].minimum(parts[:, 2:])], dim=1)
    whole = areas_of(boxes)
    return torch.where(whole > 0, areas_of(inside) / whole, 0)


def areas_of(boxes: Tensor) -> Tensor:
    """Compute the areas of boxes, (total, 4) of top, left, bottom and right; 0 for one that is upside down."""
    sides = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0)
    return sides[:, 0] * sides[:, 1]


def _reordered(points: Ragged, rows: Tensor, order: Sequence[int]) -> Ragged:
    chosen = rows[points.owner].view(-1, *[1] * (points.values.ndim - 1))
    return points.replaced(torch.where(chosen, points.values[:, [*order]], points.values))


def _without_outer_keypoints(batch: Fields, is_cut: Tensor) -> Fields:
    points = as_ragged(batch["keypoints"])
    is_outside = ((points.values < 0) | (points.values > 1)).any(-1) & is_cut[points.owner][:, None]
    batch = {**batch, "keypoints": points.replaced(points.values.masked_fill(is_outside[..., None], torch.nan))}
    if "keypoint_visibility" in batch:
        visibility = as_ragged(batch["keypoint_visibility"])
        batch["keypoint_visibility"] = visibility.replaced(visibility.values.masked_fill(is_outside, 0))
    return batch


def _check_in_step(name: str, values: Ragged | Sequence[Any], lengths: Tensor) -> None:
    """Refuse a field that has not one value for each box."""
    own = values.lengths if isinstance(values, Ragged) else torch.tensor([len(each) for each in values])
    # Of some images there may be boxes and no masks at all.
    wrong = (own != lengths) & ((own > 0) | (name != "masks"))
    if wrong.any():
        row = int(wrong.int().argmax())
        raise DataError(
            f"The field {name!r} has not one value for each object.",
            given=f"{own[row]} values for {lengths[row]} boxes, on image {row} of a batch",
            expected="as many values as boxes on each image",
            hint="mend what the reader gives; a field of the image itself needs another name, not one of "
            f'{", ".join(OBJECT_FIELDS)} or "object_..."',
        )


def _selected(values: Any, name: str, keeps: Sequence[Tensor]) -> Any:
    rows = zip(values, keeps, strict=True)
    if name == "masks":
        return [_selected_masks(each, kept) for each, kept in rows]
    return [each[kept] if isinstance(each, torch.Tensor) else [*compress(each, kept.tolist())] for each, kept in rows]


def _selected_masks(masks: Masks | Tensor, keep: Tensor) -> Masks | Tensor:
    if bool(keep.all()) or not len(masks):
        return masks
    return masks[keep] if isinstance(masks, torch.Tensor) else masks.selected(keep.nonzero()[:, 0].tolist())


def _one_each(values: object) -> bool:
    """Whether a field has one number for each image, not for each object."""
    return isinstance(values, torch.Tensor) and values.ndim == 1
