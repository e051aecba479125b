"""Checks of a detector before step 1: its anchors and classes fit the objects, and its largest batch fits into memory.

A run lacks memory in its first minute or never: its largest batch is computed once, and forgotten.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.augmentations.augment import num_partners
from lockstep.augmentations.colours import ColourOption
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.data.shared_memory import map_leaves
from lockstep.detection.boxes import iou
from lockstep.detection.detector import DetectionModel
from lockstep.detection.values import FasterRcnnFpn, SqueezeSsd
from lockstep.errors import DataError
from lockstep.inline_toml import inline_toml
from lockstep.listing import shorten
from lockstep.ragged import Ragged
from lockstep.readers.detection import DetectionReader
from lockstep.readers.object_survey import ObjectSurvey, survey_objects
from lockstep.recipes.data import DetectionData
from lockstep.recipes.recipe import Recipe
from lockstep.runs.build import SCORED, Parts
from lockstep.screen import log
from lockstep.served.exchanges import towers_of
from lockstep.training.loop import probe_memory
from lockstep.training.memory import describe_batch, lack_of_memory_told
from lockstep.types import Batch
from lockstep.workers.random_streams import RandomStreams
from lockstep.workers.rank import Worker

_MOST_OBJECTS = 200
"""Number of objects that are compared with the anchors."""
_MATCHED, _TOUCHED = 0.5, 0.05
"""IoU with an anchor from which on it usually learns an object, and below which it cannot, even if it is made to. The
anchors of a good detector may match few of the small objects of COCO, and so more than half of all of them."""
_MOST_UNTOUCHED = 0.5
_MANY_UNMATCHED = 0.1  # other anchors are proposed


def check_objects(recipe: Recipe, parts: Parts) -> ObjectSurvey | None:
    """Look at the objects to train on, and log what is odd about them; None where no detector is trained.

    Raises:
        DataError: there are none, to train on or to score; the detector's anchors match next to none of them; or an
            example cannot be read.
    """
    data, model, reader = recipe.data, parts.state.model, parts.loader.reader
    if not (isinstance(data, DetectionData) and isinstance(model, DetectionModel)):
        return None
    assert isinstance(reader, DetectionReader), "DetectionData makes one"
    streams = RandomStreams(torch.device("cpu"))  # some readers draw from the caller's
    streams.set_aside()
    try:
        found = survey_objects(reader, skip_bad=recipe.feed.bad_examples != "raise")
    finally:
        streams.put_back()
    _check_there_are_some(reader, found)
    _check_scored(recipe, parts)
    if found.num_left_out:
        log.info(
            "%d objects on the first %d images are left out: without an area, bad, or more than max_number_of_boxes",
            found.num_left_out,
            len(found.boxes),
        )
    if unseen := [name for label, name in reader.classes.items() if label not in found.labels and found.is_complete]:
        log.warning("no object to train on is of these classes, which the detector cannot learn: %s", shorten(unseen))
    _check_anchors(recipe, model, data, found)
    return found


def _check_there_are_some(reader: DetectionReader, found: ObjectSurvey) -> None:
    """Refuse data without objects; where only its first images are known, and have none, warn."""
    if found.labels and len(found.boxes.values):
        return
    if not found.is_complete or (found.labels and len(found.boxes) < len(reader)):
        log.warning("no object to train on is on the first %d of %d images", len(found.boxes), len(reader))
        return
    left_out = f", {found.num_left_out} objects left out" if found.num_left_out else ""
    raise DataError(
        "There are no objects to train on.",
        given=f"{len(reader)} images, and no object on any of them{left_out}",
        expected="images with objects of the classes of the detector",
        hint="check that data.train names the annotations of these images, and what data.crowd, data.difficult and "
        "data.bad_objects leave out",
    )


def _check_scored(recipe: Recipe, parts: Parts) -> None:
    """Refuse examples to score that are known to be without objects, as nothing that is found there could be right."""
    how = recipe.evaluate.detection
    for split in SCORED if how is None or not how.ignore_ground_truth else ():
        reader = parts.examples.reader(split) if parts.examples.has(split) else None
        known = reader.known_objects() if isinstance(reader, DetectionReader) else None
        if known is not None and not len(known.labels):
            raise DataError(
                f"There are no objects on the {split} images to score the detector by.",
                given=f"{len(known.sizes)} images, and no object on any of them",
                expected="images with objects of the classes of the detector",
                hint=f"check that data.{split} names the annotations of these images; to write detections alone, set "
                "evaluate.detection.ignore_ground_truth=true and export_path",
            )


class AnchorFit(NamedTuple):
    """How well the anchors of a detector fit objects."""

    num_objects: int
    unmatched: float
    """Share of the objects that overlap no anchor by an IoU of 0.5."""
    untouched: float
    """Share of those that overlap none by 0.05."""

    def __str__(self) -> str:
        shares = (
            f"{100 * self.unmatched:.1f} % of {self.num_objects} objects overlap no anchor by an IoU of {_MATCHED:g}"
        )
        return f"{shares}, {100 * self.untouched:.1f} % none by {_TOUCHED:g}"


BoxesOnInputs = Sequence[tuple[tuple[int, int], Tensor]]
"""For images, the shape of the network's input, and the boxes on it in its pixels: top, left, bottom and right."""


def anchor_fit(model: DetectionModel, boxes: BoxesOnInputs) -> AnchorFit | None:
    """Compare the anchors with objects; None where there are none to compare, or where objects need not fit them."""
    best = [_best_overlaps(model, shape, each) for shape, each in boxes] if model.anchors_fit_objects else []
    overlaps = [each for each in best if each is not None]
    if not overlaps or len(overlaps) < len(best):
        return None
    joined = torch.cat(overlaps)
    return AnchorFit(len(joined), *((joined < least).float().mean().item() for least in (_MATCHED, _TOUCHED)))


def _check_anchors(recipe: Recipe, model: DetectionModel, data: DetectionData, found: ObjectSurvey) -> None:
    """Compare the anchors with the first objects, as large as they are without augmentation."""
    boxes = boxes_on_inputs(data, found, _MOST_OBJECTS)
    fit = anchor_fit(model, boxes)
    if fit is None:
        return
    log.log(logging.WARNING if fit.unmatched > _MOST_UNTOUCHED else logging.INFO, "%s", fit)
    sides = torch.cat([each[:, 2:] - each[:, :2] for _, each in boxes])
    proposed, _ = proposed_anchors(recipe.model, sides)
    if fit.untouched > _MOST_UNTOUCHED:
        low, high = middle_sizes(sides)
        raise DataError(
            "The anchors of the detector match next to none of the objects of the data.",
            given=f"{100 * fit.untouched:.0f} % of {fit.num_objects} objects overlap no anchor by {_TOUCHED:g} (IoU)",
            expected=f"at most {100 * _MOST_UNTOUCHED:.0f} % of them",
            hint=f"half of the objects are boxes of {low:.0f} to {high:.0f} pixels on the network's input: "
            f"choose anchors of such sizes, or another data.resizer; {proposed}",
        )
    if fit.unmatched > _MANY_UNMATCHED:
        log.info("%s", proposed)


def middle_sizes(sides: Tensor) -> tuple[float, float]:
    """Return the sizes between which half of the objects are: the square roots of their areas."""
    low, high = sides.prod(1).sqrt().quantile(torch.tensor([0.25, 0.75])).tolist()
    return low, high


def proposed_anchors(model: Any, sides: Tensor) -> tuple[str, list[str]]:
    """Say the anchors that objects fit, and return them as settings of a recipe where the model has such, else none.

    `sides` are height and width of each object in pixels of the network's input, (objects, 2).
    """
    from lockstep.runs.chosen_recipe import choose_anchors

    is_pyramid = isinstance(model, FasterRcnnFpn)
    anchors = choose_anchors(sides.numpy(), len(model.anchor_sizes) if is_pyramid else None)
    settings: dict[str, Any] = {"anchor_ratios": anchors.ratios}
    if isinstance(model, SqueezeSsd) and not model.extra_maps:
        settings["layers"], settings["anchor_sizes"] = anchors.of_squeeze_ssd()
    elif is_pyramid:
        settings["anchor_sizes"] = [max(1, round(each)) for each in anchors.sizes]
    else:
        sizes, ratios = (", ".join(f"{each:g}" for each in values) for values in anchors)
        return f"anchors that the objects fit: {sizes} pixels, of {ratios} (height over width)", []
    given = [f"model.{name}={inline_toml(value)}" for name, value in settings.items()]
    return f"anchors that the objects fit: {' '.join(f'--set {shlex.quote(each)}' for each in given)}", given


def boxes_on_inputs(data: DetectionData, found: ObjectSurvey, most: int) -> BoxesOnInputs:
    """Return the boxes as large as the network sees them without augmentation, up to so many of all."""
    boxes, left = [], most
    for shares, (height, width) in zip(found.boxes, found.box_sizes.tolist(), strict=True):
        rows, columns = size = data.resizer.size_of(height, width)
        if len(shares) and left > 0:
            shape = data.resizer.shape if data.resizer.has_one_shape else size
            boxes.append((shape, shares[:left] * torch.tensor([rows, columns, rows, columns])))
            left -= len(shares)
    return boxes


@torch.no_grad()
def _best_overlaps(model: DetectionModel, shape: tuple[int, int], boxes: Tensor) -> Tensor | None:
    """Return for each object the IoU of the anchor that overlaps it most; None where there are no anchors."""
    device: Any = next(model.parameters()).device
    step = model.size_divisibility
    height, width = (-(-side // step) * step for side in shape)
    anchors = model.anchors((height, width), device)
    return None if anchors is None else iou(boxes.to(device), anchors).amax(1).cpu()


BATCHES_AT_ONCE = 3
"""Batches that an accelerator holds: of the step before, which is read late, of this step, and the one read ahead."""
_KEEP_THE_ASPECT = (ColourOption, HorizontalFlip)
_HINT = (
    "lower batch_size, raise num_towers, make the images smaller (data.resizer), or take fewer objects of an image "
    "(data.max_number_of_boxes); --set watch.probe_memory=false begins without this check"
)


class Largest(NamedTuple):
    """The most that an image of a stream can be, and can have on it."""

    height: int
    """Height of the images of a batch, in pixels."""
    width: int
    num_objects: int


def largest(data: DetectionData, known: ObjectSurvey) -> Largest:
    """Find the largest images that the network can see together, and the most objects on one of them.

    The sizes of the images count where all are known and no augmentation changes their aspect; else what the resizer
    allows. Where the objects of all images are not known, it is as many as may be, or the most on those that are known.
    """
    resizer, most = data.resizer, known.most_objects
    keeps_aspect = all(isinstance(each, _KEEP_THE_ASPECT) for each in data.augment)
    height, width = resizer.largest
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


def copied_to(fields: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy the tensors of a batch to a device."""
    copies: dict[str, Any] = map_leaves(fields, (torch.Tensor, Ragged), lambda value: value.to(device))
    return copies


def probe_largest_batch(recipe: Recipe, parts: Parts, known: ObjectSurvey | None, worker: Worker) -> None:
    """Compute the largest batch that the run can meet, and forget it; all workers call it together.

    The recipe is that of the stage with the largest images; the chief alone has to know the objects to train on.

    Raises:
        InputError: the memory is not enough.
    """
    data, towers = recipe.data, parts.towers
    if not (isinstance(data, DetectionData) and recipe.watch.probe_memory):
        return
    most = Largest(*worker.group.broadcast(list(largest(data, known)) if known else None))
    mine = towers_of(recipe.exchange, worker.rank, worker.num_workers, towers.num_towers)
    num_images = recipe.batch_size // towers.num_towers * len(mine)
    with lack_of_memory_told(f"{num_images} images of {most.height} x {most.width} pixels", _HINT):
        fields = largest_batch(data, most, num_images, recipe.num_classes)
        device, number = worker.device, 1 if worker.device.type == "cpu" else BATCHES_AT_ONCE
        at_once = [copied_to(fields, device) for _ in range(number)]
    batch = Batch(at_once[0], position=0, batch_size=recipe.batch_size, towers=mine)
    what = describe_batch(batch, towers)
    counts = parts.task.counts(parts.state.model)
    peak = probe_memory(parts.state, parts.task.losses, batch, towers, recipe.exchange, counts=counts, hint=_HINT)
    if worker.is_chief:
        log.info("the largest batch fits into memory: %s; %.2f GB in use at most", what, peak / 1e9)
