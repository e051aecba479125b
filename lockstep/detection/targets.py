"""Makes of the objects of a batch what the losses of a detector take: class vectors, weights, masks and keypoints.

Labels count from 1, since 0 is the background; class vectors have no place for it, so label 1 is at place 0. Targets
belong to their image: where one image has no masks, say, those of the others stay, while the reference systems drop the
masks of the whole batch then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import torch

from lockstep.checks import Checked, NonNegativeInt, PositiveInt, Range, check_value
from lockstep.errors import DataError, InputError
from lockstep.images.objects import as_ragged, select_objects
from lockstep.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.randomness import Draws

FIRST_LABEL = 1
"""The label of the first class; subtracted where labels become places in a vector, and nowhere else."""

FLAGS = ("is_crowd", "difficult", "group_of")
_OF_OBJECTS = ("boxes", "labels", "weights", "area", "truncated", *FLAGS, "multiclass_scores")


@dataclass(frozen=True)
class DetectionTargets(Checked):
    """Makes the targets of losses, as the last augmentation of a loader: its processes do what has to be searched.

    It adds to a batch, or replaces there:

    - "classes": `Ragged` float32 (n, num_classes), 1 at the place of each object's label
    - "weights": `Ragged` float32 (n,), 1 where the batch has none
    - "is_crowd", "difficult", "group_of": `Ragged` bool (n,), False where the batch does not say
    - "masks", if there are some: for each image uint8 (n, height, width), decoded at the size that it has now; (0,
      height, width) for an image that has no masks of its objects
    - "keypoints", if there are some: zeros where they were NaN; and "keypoint_weights": `Ragged` float32
      (n, keypoints), 1 where a keypoint is labelled, else 0

    Raises:
        DataError: a label is no class; boxes, weights or scores are not finite; or there are no masks for each object.
    """

    num_classes: PositiveInt
    """Number of classes, without the background: labels are 1 to `num_classes`."""
    merge_multiple_label_boxes: bool = False
    """Make one object of all with the same box, with a 1 for each of their labels; not with masks or keypoints."""
    quantization_bins: Annotated[int, Range(ge=2, lt=2**31)] | None = None
    """How boxes are the same to be merged: None, bit for bit, as in 2017; 10,000, nearly, as in 2018."""
    use_multiclass_scores: bool = False
    """"classes" are the scores in "multiclass_scores", (n, num_classes), not 1 at one place."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge_multiple_label_boxes and self.use_multiclass_scores:
            raise InputError(
                "Boxes that carry a score for each class have no labels to be merged.",
                given="merge_multiple_label_boxes=True and use_multiclass_scores=True",
                expected="one of them at most",
                hint="leave one of them out",
            )

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its targets; nothing is drawn."""
        columns = {name: as_ragged(batch[name]) for name in _OF_OBJECTS if name in batch}
        boxes, labels = columns["boxes"], columns["labels"]
        self._check_labels(labels)
        columns.setdefault("weights", boxes.replaced(torch.ones(len(boxes.values))))
        for flag in FLAGS:
            columns.setdefault(flag, boxes.replaced(torch.zeros(len(boxes.values), dtype=torch.bool)))
        made = {**batch, **columns}
        if self.merge_multiple_label_boxes:
            made = self._merged(made)
        elif self.use_multiclass_scores:
            made["classes"] = self._scores(columns)
        else:
            made["classes"] = labels.replaced(_one_hot(labels.values, self.num_classes))
        for name in ("boxes", "weights", "classes"):
            _check_finite(name, made[name])
        return {**made, **_masks(batch), **_keypoints(batch)}

    def _merged(self, batch: dict[str, Any]) -> dict[str, Any]:
        refuse_merging(batch)
        boxes = batch["boxes"]
        found = merge_multiple_label_boxes(
            boxes, batch["labels"], self.num_classes, quantization_bins=self.quantization_bins
        )
        is_first = torch.zeros(len(boxes.values), dtype=torch.bool).index_fill(0, found.places, True)
        return {**select_objects(batch, is_first), "classes": found.classes}

    def _scores(self, columns: dict[str, Ragged]) -> Ragged:
        scores = columns.get("multiclass_scores")
        if scores is None or scores.values.shape[1:] != (self.num_classes,):
            raise DataError(
                "There are no scores of all classes to train on.",
                given="no field 'multiclass_scores'" if scores is None else f"shape {tuple(scores.values.shape)}",
                expected=f"'multiclass_scores' of shape (objects, {self.num_classes})",
                hint="leave use_multiclass_scores out, or read records that hold such scores",
            )
        return scores

    def _check_labels(self, labels: Ragged) -> None:
        wrong = (labels.values < FIRST_LABEL) | (labels.values >= FIRST_LABEL + self.num_classes)
        if wrong.any():
            raise DataError(
                "A label is none of the detector's classes.",
                given=f"label {int(labels.values[wrong][0])}",
                expected=f"{FIRST_LABEL} to {self.num_classes}",
                hint="read the objects by a DetectionReader, which checks and numbers them",
            )


class Merged(NamedTuple):
    """The objects of a batch once those with the same box are one, in the order of the first of each."""

    boxes: Ragged
    """float32 (n, 4): the first of those that are the same."""
    classes: Ragged
    """float32 (n, num_classes): 1 for each label of the box."""
    confidences: Ragged | None
    """float32 (n, num_classes): for each label its confidence, 0 elsewhere."""
    places: Tensor
    """int64 (total,): where in the values given each of them was first."""


def merge_multiple_label_boxes(
    boxes: Ragged,
    labels: Ragged,
    num_classes: int,
    *,
    quantization_bins: int | None = None,
    confidences: Ragged | None = None,
) -> Merged:
    """Make one object of all on an image with the same box.

    Boxes are float32 (n, 4), shares of height and width; labels int64 (n,), from 1 to `num_classes`. Boxes are the same
    if each edge, times the bins less 1, has the same whole part; without bins, if they are equal. Of the confidences,
    float32 (n,), the last one counts where a box has a label twice.
    """
    values, places = boxes.values.numpy(), labels.values.numpy() - FIRST_LABEL
    keys = values + np.float32(0) if quantization_bins is None else _bins(boxes, quantization_bins)
    owned = np.column_stack([boxes.owner.numpy(), keys.view(np.int32) if quantization_bins is None else keys])
    _, first, group = np.unique(owned, axis=0, return_index=True, return_inverse=True)
    order = first.argsort()
    rows = order.argsort()[group.ravel()]
    kept = torch.from_numpy(first[order])
    lengths = boxes.owner[kept].bincount(minlength=len(boxes))

    def spread(given: Any) -> Ragged:
        vectors = np.zeros((len(first), num_classes), np.float32)
        vectors[rows, places] = given
        return Ragged(torch.from_numpy(vectors), lengths)

    of_labels = None if confidences is None else spread(confidences.values.numpy())
    return Merged(Ragged(boxes.values[kept], lengths), spread(1), of_labels, kept)


def _bins(boxes: Ragged, number: int) -> Any:
    edges = boxes.values
    if not ((edges >= 0) & (edges <= 1)).all():
        raise InputError(
            "Only boxes within their image can be compared by bins.",
            given=f"an edge at {float(edges[~((edges >= 0) & (edges <= 1))][0]):g}",
            expected="shares of height and width from 0 to 1",
            hint="clip the boxes, or leave quantization_bins out",
        )
    return (edges * (number - 1)).to(torch.int64).numpy()


def refuse_merging(fields: Any) -> None:
    """Refuse to merge the objects of a batch, or of data, that has masks or keypoints: each belongs to one object."""
    if there := [name for name in ("masks", "keypoints") if name in fields]:
        raise InputError(
            "Boxes of several labels can be merged for boxes alone.",
            given=f"merge_multiple_label_boxes=True, and {' and '.join(there)}",
            expected="neither masks nor keypoints, which belong to one object each",
            hint="leave merge_multiple_label_boxes out, or read no masks and keypoints",
        )


def padded_one_hot_encoding(indices: Tensor, depth: int, left_pad: int = 0) -> Tensor | None:
    """Encode class indices as rows with a single 1, with zeros before the classes: float32 (n, left_pad + depth).

    Indices are whole numbers of shape (n,); one that is none of 0 to depth - 1 gives a row of zeros. With a depth of 0
    there is no encoding, but None. The zeros at the left are for what has no index, such as the background.
    """
    check_value("depth", depth, NonNegativeInt)
    check_value("left_pad", left_pad, NonNegativeInt)
    if indices.ndim != 1:
        raise InputError(
            "Only a list of indices can be encoded.",
            given=f"indices of shape {tuple(indices.shape)}",
            expected="shape (n,)",
            hint="flatten them: indices.flatten()",
        )
    if depth == 0:
        return None
    places = torch.arange(-left_pad, depth, device=indices.device)
    return ((indices[:, None] == places) & (places >= 0)).to(torch.float32)


def _one_hot(labels: Tensor, num_classes: int) -> Tensor:
    encoded = padded_one_hot_encoding(labels - FIRST_LABEL, num_classes)
    assert encoded is not None, "there is a class"
    return encoded


def _check_finite(name: str, column: Ragged) -> None:
    if not torch.isfinite(column.values).all():
        raise DataError(
            f"The {name} of an object are no finite numbers.",
            given=f"{float(column.values[~torch.isfinite(column.values)][0])} in the field {name!r}",
            expected="finite numbers",
            hint="repair the data; if it has none, look for the augmentation that makes them",
        )


def _masks(batch: dict[str, Any]) -> dict[str, Any]:
    return {"masks": [masks.decode() for masks in batch["masks"]]} if "masks" in batch else {}


def _keypoints(batch: dict[str, Any]) -> dict[str, Any]:
    """Return keypoints without NaN, and which of them count."""
    if "keypoints" not in batch:
        return {}
    points = as_ragged(batch["keypoints"])
    labelled = torch.isfinite(points.values).all(dim=-1)
    if "keypoint_visibility" in batch:
        labelled &= as_ragged(batch["keypoint_visibility"]).values > 0
    return {
        "keypoints": points.replaced(torch.where(labelled[..., None], points.values, 0)),
        "keypoint_weights": points.replaced(labelled.to(torch.float32)),
    }
