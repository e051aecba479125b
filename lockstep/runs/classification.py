"""The task of classification: its loss and its scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.evaluation.evaluate import example_indices
from lockstep.losses import softmax_cross_entropy
from lockstep.metrics import in_top_k
from lockstep.recipes.parts import CrossEntropy
from lockstep.types import Batch

CONFUSION, MISTAKES = "confusion", "mistakes"
"""Outputs of `score_in_detail`: the inputs of a confusion matrix, and of a list of the worst mistakes."""


@dataclass(frozen=True)
class Classification:
    """The loss and the scores of a classifier."""

    inputs: Callable[[Mapping[str, Any]], Tensor]
    """Makes the input of the model from a batch."""
    loss: CrossEntropy
    top: Sequence[int] = (1,)
    """The k of each top-k score."""
    flip: bool = False
    """Whether an example is scored by the mean of the logits of its image and the mirror image."""

    @property
    def score_names(self) -> list[str]:
        """Names of the scores: "top1", and the others."""
        return [f"top{k}" for k in self.top]

    def losses(self, model: nn.Module, batch: Batch) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Compute the cross entropy of each head, and as a metric the share of examples that the model gets right."""
        outputs, labels = model(self.inputs(batch)), batch["label"]
        smoothing = self.loss.label_smoothing
        logits, auxiliary = _heads(outputs)
        losses = {"cross_entropy": softmax_cross_entropy(logits, labels, label_smoothing=smoothing)}
        if auxiliary:
            each = [softmax_cross_entropy(head, labels, label_smoothing=smoothing) for head in auxiliary]
            losses["auxiliary_cross_entropy"] = self.loss.auxiliary_weight * torch.stack(each).sum()
        return losses, {"top1": in_top_k(logits.detach(), labels).mean()}

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Score each example: whether its class is among the k with the highest logits."""
        return self._scores(self._logits(model, batch), batch["label"])

    def score_in_detail(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Score each example, and return the inputs of a confusion matrix and of a list of the worst mistakes, too."""
        logits, labels = self._logits(model, batch), batch["label"]
        predicted = logits.argmax(1)
        loss = softmax_cross_entropy(logits, labels, reduction="none")
        more = {CONFUSION: (predicted, labels), MISTAKES: (loss, predicted, labels, example_indices(batch))}
        return {**self._scores(logits, labels), **more}

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        images = self.inputs(batch)
        logits, _ = _heads(model(images))
        if not self.flip:
            return logits
        mirrored, _ = _heads(model(images.flip(3)))
        return (logits + mirrored) / 2

    def _scores(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {name: in_top_k(logits, labels, k) for name, k in zip(self.score_names, self.top, strict=True)}


def _heads(outputs: Any) -> tuple[Tensor, list[Tensor]]:
    """Split the outputs into the logits of the last layer and those of the auxiliary heads, which only training has."""
    if isinstance(outputs, Tensor):
        return outputs, []
    logits, *auxiliary = outputs
    return logits, [head for head in auxiliary if head is not None]
