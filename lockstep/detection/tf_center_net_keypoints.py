"""The keypoints of a CenterNet: peaks of heat maps of their own, taken near where an object's middle says they are.

After meta_architectures/center_net_meta_arch.py and core/target_assigner.py of tensorflow/models (Apache 2.0). Places
are y and x in cells. A keypoint that is not labelled teaches nothing, and within the box of its object no cell learns
that it is not there; so it is within the boxes of other classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from lockstep.detection.anchor_matching import after_none, rows_of_all
from lockstep.detection.boxes import Shape
from lockstep.detection.detector import Targets
from lockstep.detection.keypoint_rcnn import keypoints_of
from lockstep.detection.losses import classification_loss, localization_loss
from lockstep.detection.targets import FIRST_LABEL
from lockstep.detection.tf_center_net_configs import KeypointEstimation, PredictionHeadParams
from lockstep.detection.tf_center_net_features import STRIDE
from lockstep.detection.tf_center_net_heat_maps import gaussian_maps, is_peak, spread_of
from lockstep.tensors import tensor_on

_LEAST_IOU = 0.7  # of the reference's spreads of keypoints, whatever that of the middles is
_FAR = 1e5  # cells, to a peak whose score is too low


class NearCells(NamedTuple):
    """What the cells around some points learn of keypoints."""

    places: Tensor
    """int64 (points, near): each cell, among those of all images."""
    keypoints: Tensor
    """int64 (points, 1): which keypoint it is."""
    wanted: Tensor
    """(points, near, 2): from the cell's corner to the keypoint."""
    weights: Tensor
    """(points, near): 0 where the cell is on no image."""


class KeypointTargets(NamedTuple):
    """What the cells of a batch learn of the keypoints of one class."""

    heat_map: Tensor
    """(batch, cells, keypoints): 1 where a keypoint is."""
    counted: Tensor
    """bool (batch, cells, keypoints): False within a box whose object lacks the keypoint."""
    number: Tensor
    """How many keypoints there are."""
    offsets: NearCells
    """The cells around keypoints."""
    regressions: NearCells
    """The cells around the middles of objects."""


def keypoint_heads(task: KeypointEstimation) -> Mapping[str, tuple[PredictionHeadParams, int, float | None]]:
    """Return the heads of a task by name: their layers, their outputs, and the bias to begin with, if they have one."""
    number = len(task.keypoint_labels)
    return {
        f"{task.name}_heat_maps": (task.heatmap_head_params, number, task.heatmap_bias_init),
        f"{task.name}_offsets": (task.offset_head_params, 2 * (number if task.per_keypoint_offset else 1), None),
        f"{task.name}_regressions": (task.regress_head_params, 2 * number, None),
    }


@torch.no_grad()
def assign_keypoints(task: KeypointEstimation, num_keypoints: int, targets: Targets, shape: Shape) -> KeypointTargets:
    """Draw the heat maps of a task's keypoints, and find the cells that learn where they are.

    Args:
        task: the task.
        num_keypoints: that objects have in all.
        targets: the objects.
        shape: height and width of the maps, in cells.

    Raises:
        DataError: the objects have no keypoints, or another number of them.
    """
    edges, own = torch.cat([*targets.boxes]) / STRIDE, torch.cat([*targets.weights])
    device, (batch, number) = edges.device, (len(targets), len(task.ids))
    points = torch.cat([*keypoints_of(targets, num_keypoints)])[:, tensor_on(device, task.ids, torch.int64)]
    own = own * torch.cat([*targets.classes])[:, task.label - FIRST_LABEL]
    weights = points[..., 2] * own[:, None]
    lengths = [len(each) for each in targets.boxes]
    image_of = torch.repeat_interleave(tensor_on(device, lengths, torch.int64), output_size=len(edges))
    objects, kinds = weights.nonzero().unbind(1)  # how many keypoints are labelled is read
    at, weighted, images = points[objects, kinds, :2] / STRIDE, weights[objects, kinds], image_of[objects]
    spreads = spread_of(edges[:, 2:] - edges[:, :2], _LEAST_IOU)[objects]
    spreads = spreads * tensor_on(device, task.spreads, torch.float32)[kinds]
    maps = gaussian_maps(
        at.floor().long(), spreads, weighted, images * number + kinds, (batch * number, shape[0], shape[1])
    )
    middles = ((edges[:, :2] + edges[:, 2:]) / 2)[objects]
    lacking = torch.split((weights < 1e-3).float(), lengths)
    of_images = torch.zeros(batch, number, device=device).index_add(0, image_of, weights)
    return KeypointTargets(
        maps.view(batch, number, -1).transpose(1, 2),
        ~_covered(targets.boxes, lacking, shape),
        of_images.trunc().sum(),
        *(_near(task, each, at, images, kinds, weighted, shape) for each in (at, middles)),
    )


def keypoint_losses(
    task: KeypointEstimation, predictions: Mapping[str, Sequence[Tensor]], assigned: KeypointTargets
) -> dict[str, Tensor]:
    """Compute a task's losses by name, each a sum over cells or keypoints, and its mean over the backbone's maps."""
    maps = [
        classification_loss(task.loss.classification_loss, each.float(), assigned.heat_map, assigned.counted.float())
        for each in predictions[f"{task.name}_heat_maps"]
    ]

    def of_places(name: str, near: NearCells) -> Tensor:
        found = []
        for each in predictions[f"{task.name}_{name}"]:
            vectors = each.float().reshape(each.shape[0] * each.shape[1], -1, 2)
            kinds = near.keypoints if vectors.shape[1] > 1 else torch.zeros_like(near.keypoints)
            ones = torch.ones_like(near.weights)
            losses = localization_loss(task.loss.localization_loss, vectors[near.places, kinds], near.wanted, ones)
            found.append((losses * near.weights).sum())
        return torch.stack(found).mean()

    heat_map = torch.stack([each.sum() for each in maps]).mean()
    losses = {
        "heat_map": task.keypoint_heatmap_loss_weight * heat_map,
        "offset": task.keypoint_offset_loss_weight * of_places("offsets", assigned.offsets),
        "regression": task.keypoint_regression_loss_weight * of_places("regressions", assigned.regressions),
    }
    return {f"{task.name}_{name}": loss * task.task_loss_weight for name, loss in losses.items()}


def keypoint_counts(task: KeypointEstimation, assigned: KeypointTargets) -> dict[str, Tensor]:
    """Count what the sums of a task's losses are over, by their names."""
    counts = {
        "heat_map": assigned.number,
        "offset": assigned.offsets.weights.sum(),
        "regression": assigned.regressions.weights.sum(),
    }
    return {f"{task.name}_{name}": count for name, count in counts.items()}


def find_keypoints(
    task: KeypointEstimation, predictions: Mapping[str, Sequence[Tensor]], cells: Tensor, boxes: Tensor, shape: Shape
) -> Tensor:
    """Find the keypoints of a task, as if all detections were of its class.

    Args:
        task: the task.
        predictions: of the network.
        cells: int64 (batch, detections): the cells of their middles.
        boxes: (batch, detections, 4), in cells.
        shape: height and width of the maps, in cells.

    Returns:
        (batch, detections, keypoints, 3): y and x in cells, and a score from 0 to 1.
    """
    maps, offsets, regressions = (
        predictions[f"{task.name}_{name}"][-1].float() for name in ("heat_maps", "offsets", "regressions")
    )
    scores, peaks = _peaks(task, maps.sigmoid(), offsets.reshape(*offsets.shape[:2], -1, 2), shape)
    of_cells = regressions.gather(1, cells[..., None].expand(-1, -1, regressions.shape[2]))
    of_cells = of_cells.view(*cells.shape, -1, 2)
    said = of_cells + torch.stack([cells // shape[1], cells % shape[1]], -1)[:, :, None]
    distances = (said[:, :, :, None] - peaks[:, None]).square().sum(-1).sqrt()
    distances = torch.where(scores[:, None] >= task.keypoint_candidate_score_threshold, distances, _FAR)
    best, chosen = _ranks(task, scores[:, None], distances, boxes).max(-1, keepdim=True)
    taken = scores[:, None].expand_as(distances).gather(3, chosen)[..., 0]
    if task.candidate_ranking_mode == "gaussian_weighted":
        taken = best[..., 0]
    of_peaks = peaks[:, None].expand(-1, distances.shape[1], -1, -1, -1)
    at = of_peaks.gather(3, chosen[..., None].expand(-1, -1, -1, -1, 2))[..., 0, :]
    middles, halves = (boxes[..., :2] + boxes[..., 2:]) / 2, (boxes[..., 2:] - boxes[..., :2]) / 2 * task.box_scale
    radius = 2 * halves.amax(-1, keepdim=True) * task.candidate_search_scale
    is_inside = ((at - middles[:, :, None]).abs() <= halves[:, :, None]).all(-1)
    is_near = is_inside & (taken >= task.keypoint_candidate_score_threshold) & (distances.amin(-1) <= radius)
    places = torch.where(is_near[..., None], at, said)
    return torch.cat([places, torch.where(is_near, taken, task.unmatched_keypoint_score)[..., None]], -1)


def _peaks(task: KeypointEstimation, scores: Tensor, offsets: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return the best peaks of each keypoint: scores (batch, keypoints, peaks), and places (..., 2)."""
    high = scores * is_peak(scores.reshape(-1, *shape, scores.shape[2]), task.peak_max_pool_kernel_size).flatten(1, 2)
    top, cells = high.transpose(1, 2).topk(min(task.num_candidates_per_keypoint, high.shape[1]))
    places = torch.stack([cells // shape[1], cells % shape[1]], -1)
    own = offsets.transpose(1, 2).expand(-1, scores.shape[2], -1, -1)
    return top, places + own.gather(2, cells[..., None].expand(-1, -1, -1, 2))


def _ranks(task: KeypointEstimation, scores: Tensor, distances: Tensor, boxes: Tensor) -> Tensor:
    """Rank the peaks for each detection, the best highest: (batch, detections, keypoints, peaks)."""
    sides = boxes[..., 2:] - boxes[..., :2]
    match task.candidate_ranking_mode:
        case "min_distance":
            return -distances
        case "score_distance_ratio":
            return scores / (distances + task.score_distance_offset)
        case "score_scaled_distance_ratio":
            return scores / (distances + (sides.amax(-1) * task.score_distance_multiplier)[..., None, None])
        case "gaussian_weighted":
            widths = tensor_on(boxes.device, task.spreads, torch.float32) * task.std_dev_multiplier
            spreads = spread_of(sides.flatten(0, 1), _LEAST_IOU).view(*sides.shape[:2], 1) * widths
            return scores * torch.exp(-distances.square() / (2 * spreads.square())[..., None])
    assert_never(task.candidate_ranking_mode)


def _near(
    task: KeypointEstimation,
    centres: Tensor,
    at: Tensor,
    images: Tensor,
    kinds: Tensor,
    weights: Tensor,
    shape: Shape,
) -> NearCells:
    """Find the cells within the task's radius of centres, (points, 2), and where the keypoints `at` are from them."""
    radius, (height, width) = task.offset_peak_radius, shape
    steps = range(-radius, radius + 1)
    around = [(y, x) for y in steps for x in steps if y * y + x * x <= radius * radius]
    cells = centres.floor()[:, None] + tensor_on(centres.device, around, torch.float32)
    row, column = cells.unbind(-1)
    is_there = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    places = (images[:, None] * height + row.long()) * width + column.long()
    places = torch.where(is_there, places, 0)
    return NearCells(places, kinds[:, None], at[:, None] - cells, weights[:, None] * is_there)


def _covered(boxes: Sequence[Tensor], lacking: Sequence[Tensor], shape: Shape) -> Tensor:
    """Tell which cells are in a box whose object lacks a keypoint: bool (batch, cells, keypoints).

    Args:
        boxes: (objects, 4) in pixels, of each image.
        lacking: (objects, keypoints): 1 where it is lacking, of each image.
        shape: height and width of the maps, in cells.
    """
    rows = rows_of_all(boxes, boxes[0].device)
    edges = after_none(boxes)[rows] / STRIDE
    sides = [torch.arange(side, device=rows.device) for side in shape]
    down, across = (
        (side >= edges[..., axis, None]) & (side < edges[..., 2 + axis, None]) for axis, side in enumerate(sides)
    )
    inside = (down[..., :, None] & across[..., None, :]).flatten(2).float()
    return torch.bmm(inside.transpose(1, 2), after_none(lacking)[rows]) > 0
