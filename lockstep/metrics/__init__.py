"""Metrics: scores of single examples, shape (batch,), for the score function of `lockstep.evaluate`."""

from lockstep.metrics.top_k import in_top_k

__all__ = ["in_top_k"]
