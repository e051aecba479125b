"""Loss functions.

All take predictions or logits, labels, then by name their own parameters, `weights` and `reduction`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.losses.regularization import L1 as L1
    from lockstep.losses.regularization import L2 as L2
    from lockstep.losses.weighted import absolute_difference as absolute_difference
    from lockstep.losses.weighted import cosine_distance as cosine_distance
    from lockstep.losses.weighted import hinge_loss as hinge_loss
    from lockstep.losses.weighted import sigmoid_cross_entropy as sigmoid_cross_entropy
    from lockstep.losses.weighted import softmax_cross_entropy as softmax_cross_entropy
    from lockstep.losses.weighted import squared_error as squared_error
    from lockstep.losses.weighted import weighted_loss as weighted_loss
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
