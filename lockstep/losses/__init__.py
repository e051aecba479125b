"""Loss functions."""

from lockstep.losses.classification import softmax_cross_entropy

__all__ = ["softmax_cross_entropy"]
