"""Metrics: scores of single examples, shape (batch,), and what needs all examples; for `lockstep.evaluate`."""

from lockstep.metrics.confusion import ConfusionMatrix
from lockstep.metrics.metric import Metric
from lockstep.metrics.top_k import in_top_k
from lockstep.metrics.worst_mistakes import Mistake, WorstMistakes

__all__ = ["ConfusionMatrix", "Metric", "Mistake", "WorstMistakes", "in_top_k"]
