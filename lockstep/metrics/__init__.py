"""Metrics: scores of single examples, shape (batch,), and of all examples together; for `lockstep.evaluate`."""

from lockstep.metrics.classification import ConfusionMatrix, in_top_k
from lockstep.metrics.worst_mistakes import WorstMistakes

__all__ = ["ConfusionMatrix", "WorstMistakes", "in_top_k"]
