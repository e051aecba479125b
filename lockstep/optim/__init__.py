"""Optimizers, schedules, gradient transforms and averages, as values.

Rarely used: Adadelta and FTRL in `optim.adaptive`; `optim.schedules.Constant`, which a number says as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.optim.adam import Adam as Adam
    from lockstep.optim.adam import AdamW as AdamW
    from lockstep.optim.adaptive import Adagrad as Adagrad
    from lockstep.optim.adaptive import RMSProp as RMSProp
    from lockstep.optim.averages import MovingAverage as MovingAverage
    from lockstep.optim.by_name import ByName as ByName
    from lockstep.optim.from_torch import FromTorch as FromTorch
    from lockstep.optim.layerwise import LAMB as LAMB
    from lockstep.optim.layerwise import LARS as LARS
    from lockstep.optim.resolution import ScaledByBatch as ScaledByBatch
    from lockstep.optim.schedules import Cosine as Cosine
    from lockstep.optim.schedules import Exponential as Exponential
    from lockstep.optim.schedules import OneCycle as OneCycle
    from lockstep.optim.schedules import PiecewiseConstant as PiecewiseConstant
    from lockstep.optim.schedules import Polynomial as Polynomial
    from lockstep.optim.schedules import Warmup as Warmup
    from lockstep.optim.sgd import SGD as SGD
    from lockstep.optim.transforms import AdaptiveClip as AdaptiveClip
    from lockstep.optim.transforms import ClipGlobalNorm as ClipGlobalNorm
    from lockstep.optim.transforms import ClipNorm as ClipNorm
    from lockstep.optim.transforms import ClipValue as ClipValue
    from lockstep.optim.transforms import ScaleGradients as ScaleGradients
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
