"""Scores of all classes that come with each object, in place of one label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.checks import Checked, PositiveFloat
from lockstep.errors import InputError
from lockstep.images.augment import describe_field
from lockstep.images.objects import as_ragged

if TYPE_CHECKING:
    from lockstep.randomness import Draws

_SCORES = "multiclass_scores"


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
