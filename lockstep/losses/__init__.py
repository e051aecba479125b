"""Loss functions.

All take predictions or logits, labels, then by name their own parameters, `weights` and `reduction`.
"""

from lockstep.losses.classification import hinge_loss, sigmoid_cross_entropy, softmax_cross_entropy
from lockstep.losses.regression import absolute_difference, cosine_distance, squared_error
from lockstep.losses.regularization import L1, L2
from lockstep.losses.weighting import weighted_loss

__all__ = [
    "L1",
    "L2",
    "absolute_difference",
    "cosine_distance",
    "hinge_loss",
    "sigmoid_cross_entropy",
    "softmax_cross_entropy",
    "squared_error",
    "weighted_loss",
]
