"""Options of TensorFlow's object detection API that change objects alone, and leave the images as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from lockstep.checks import Checked, FiniteFloat, PositiveFloat, Range
from lockstep.errors import InputError
from lockstep.images.fields import describe_field, images_of, sides_of
from lockstep.images.objects import as_ragged, object_fields, object_numbers, select_objects
from lockstep.ragged import Ragged
from lockstep.randomness import Draws

_EDGES = ("top", "left", "bottom", "right")
_SCORES = "multiclass_scores"


@dataclass(frozen=True)
class RandomJitterBoxes(Checked):
    """Move each edge of each box by a random share of the box's height or width: random_jitter_boxes.

    Masks, keypoints and areas stay as they are.
    """

    ratio: Annotated[float, Range(ge=0, le=0.5)] = 0.05
    """The largest share; boxes are clipped to the image."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with other boxes."""
        if "boxes" not in object_fields(batch):
            return batch
        boxes = as_ragged(batch["boxes"])
        shares = torch.stack(
            [object_numbers(boxes, draws, f"RandomJitterBoxes boxes {edge}") for edge in _EDGES], dim=1
        )
        sides = (boxes.values[:, 2:] - boxes.values[:, :2]).repeat(1, 2)
        jitter = ((2 * shares - 1) * self.ratio).to(sides.dtype)
        return {**batch, "boxes": boxes.replaced((boxes.values + sides * jitter).clamp(0, 1))}


@dataclass(frozen=True)
class RetainBoxesAboveThreshold(Checked):
    """Drop objects of a low score: retain_boxes_above_threshold. Objects whose score is NaN stay."""

    threshold: FiniteFloat = 0.0
    """Objects of this score, or of a lower one, are dropped."""
    field: str = "weights"
    """The scores: "weights", or "label_scores"."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch without these objects; nothing is drawn."""
        scores = batch.get(self.field)
        if not isinstance(scores, Ragged | list | tuple):
            raise InputError(
                f"RetainBoxesAboveThreshold finds no scores in the field {self.field!r}.",
                given=describe_field(batch, self.field),
                expected="a score for each object",
                hint="name the field of the scores: RetainBoxesAboveThreshold(..., field=...)",
            )
        values = as_ragged(scores).values
        return select_objects(batch, (values > self.threshold) | values.isnan())


@dataclass(frozen=True)
class ScaleBoxesToPixelCoordinates:
    """Give boxes and keypoints in pixels, not as shares of height and width: scale_boxes_to_pixel_coordinates.

    For models that ask for it; let it be the last one: all other augmentations take shares.
    """

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with scaled boxes and keypoints; nothing is drawn."""
        sides = torch.from_numpy(sides_of(images_of(batch, "image", self)))
        scaled = dict(batch)
        for name in {"boxes", "keypoints"}.intersection(object_fields(batch)):
            values = as_ragged(batch[name])
            factors = sides[values.owner].to(values.values.dtype)
            factors = factors.repeat(1, 2) if name == "boxes" else factors[:, None]
            scaled[name] = values.replaced(values.values * factors)
        return scaled


@dataclass(frozen=True)
class ConvertClassLogitsToSoftmax(Checked):
    """Turn the scores of an object's classes from logits into probabilities: convert_class_logits_to_softmax."""

    temperature: PositiveFloat = 1.0
    """Logits are divided by it first: the larger, the more alike the probabilities."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with "multiclass_scores" (n, classes) that add up to 1; nothing is drawn."""
        if _SCORES not in batch:
            raise InputError(
                "There are no scores of classes to convert.",
                given=describe_field(batch, _SCORES),
                expected=f"{_SCORES!r} of shape (objects, classes)",
                hint="leave ConvertClassLogitsToSoftmax out, or read records that hold such scores",
            )
        logits = as_ragged(batch[_SCORES])
        return {**batch, _SCORES: logits.replaced((logits.values / self.temperature).softmax(-1))}
