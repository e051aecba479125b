"""The largest batch of a run of a detector, computed before step 1: a run lacks memory in its first minute or never."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lockstep.augmentations.colours import ColourOption
from lockstep.data.shared_memory import map_leaves
from lockstep.images.augment import HorizontalFlip, num_partners
from lockstep.parallel.served import towers_of
from lockstep.ragged import Ragged
from lockstep.readers.object_survey import ObjectSurvey
from lockstep.recipes.detection import DetectionData
from lockstep.recipes.recipe import Recipe
from lockstep.screen import log
from lockstep.training.memory import describe_batch, lack_of_memory_told, probe_memory
from lockstep.types import Batch
from lockstep.workers.rank import Worker

if TYPE_CHECKING:
    from lockstep.runs.build import Parts

_AT_ONCE = 3
"""Batches that an accelerator holds: of the step before, which is read late, of this step, and the one read ahead."""
_KEEP_THE_ASPECT = (ColourOption, HorizontalFlip)
_HINT = (
    "lower batch_size, raise num_towers, make the images smaller (data.resizer), or take fewer objects of an image "
    "(data.max_number_of_boxes); --set watch.probe_memory=false begins without this check"
)


class Largest(NamedTuple):
    """The most that an image of a stream can be, and can have on it."""

    height: int
    """Of the images of a batch, in pixels."""
    width: int
    num_objects: int


def largest(data: DetectionData, known: ObjectSurvey) -> Largest:
    """Find the largest images that the network can see together, and the most objects on one of them.

    The sizes of the images count where all are known and no augmentation changes their aspect; else what the resizer
    allows. Where the objects of all images are not known, it is as many as may be, or the most on those that are known.
    """
    resizer, most = data.resizer, known.most_objects
    keeps_aspect = all(isinstance(each, _KEEP_THE_ASPECT) for each in data.augment)
    height, width = resizer.largest_shape
    if known.is_complete and keeps_aspect and not resizer.has_one_shape:
        sizes = [resizer.size_of(*size) for size in np.unique(known.sizes, axis=0).tolist()]
        height, width = (max(sides) for sides in zip(*sizes, strict=True))
    if not known.is_complete and data.max_number_of_boxes is not None:
        most = data.max_number_of_boxes
    return Largest(height, width, most * math.prod(1 + num_partners(each) for each in data.augment))


def largest_batch(data: DetectionData, most: Largest, num_images: int, num_classes: int) -> dict[str, Any]:
    """Make black images with boxes all over them, and the fields that `DetectionTargets` makes."""
    height, width, count = most
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(num_images * count, 2, 2, generator=generator).sort(1).values
    labels = torch.randint(num_classes, (len(corners),), generator=generator)
    no_flags = torch.zeros(len(corners), dtype=torch.bool)
    columns = {
        "boxes": corners.flatten(1),
        "labels": labels + 1,
        "classes": torch.nn.functional.one_hot(labels, num_classes).float(),
        "weights": torch.ones(len(corners)),
        **dict.fromkeys(("is_crowd", "difficult", "group_of"), no_flags),
    }
    if data.num_keypoints:
        columns["keypoints"] = torch.zeros(len(corners), data.num_keypoints, 2)
        columns["keypoint_weights"] = torch.ones(len(corners), data.num_keypoints)
    lengths = torch.full((num_images,), count)
    masks = {"masks": [torch.ones(count, height, width, dtype=torch.uint8) for _ in range(num_images)]}
    return {
        "image": torch.zeros(num_images, 3, height, width, dtype=torch.uint8),
        "original_size": torch.tensor([[height, width]] * num_images),
        **{name: Ragged(values, lengths) for name, values in columns.items()},
        **(masks if data.masks else {}),
    }


def _copied(fields: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    copies: dict[str, Any] = map_leaves(fields, (torch.Tensor, Ragged), lambda value: value.to(device))
    return copies


def probe_largest_batch(recipe: Recipe, parts: Parts, known: ObjectSurvey | None, worker: Worker) -> None:
    """Compute the largest batch that the run can meet, and forget it; all workers call it together.

    Args:
        recipe: of the run, or of its stage with the largest images.
        parts: of the run, in the state that it begins with.
        known: the objects to train on, which the chief knows.
        worker: this worker.

    Raises:
        InputError: the memory is not enough.
    """
    data, towers = recipe.data, parts.towers
    if not (isinstance(data, DetectionData) and recipe.watch.probe_memory):
        return
    most = Largest(*worker.group.broadcast(list(largest(data, known)) if known else None))
    mine = towers_of(recipe.exchange, worker.rank, worker.num_workers, towers.count)
    num_images = recipe.batch_size // towers.count * len(mine)
    with lack_of_memory_told(f"{num_images} images of {most.height} x {most.width} pixels", _HINT):
        fields: Mapping[str, Any] = largest_batch(data, most, num_images, recipe.model.num_classes)
        at_once = [fields] if worker.device.type == "cpu" else [_copied(fields, worker.device) for _ in range(_AT_ONCE)]
    batch = Batch(at_once[0], position=0, batch_size=recipe.batch_size, towers=mine)
    what = describe_batch(batch, towers)
    counts = parts.task.counts(parts.state.model)
    peak = probe_memory(parts.state, parts.task.losses, batch, towers, recipe.exchange, counts=counts, hint=_HINT)
    if worker.is_chief:
        log.info("the largest batch fits into memory: %s; %.2f GB in use at most", what, peak / 1e9)
