"""Optimizers, schedules, gradient transforms and averages, as values.

Rarely used: Adadelta and FTRL in `optim.optimizers`; `optim.schedules.Constant`, which a number says as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.optim.averages import MovingAverage as MovingAverage
    from lockstep.optim.by_name import ByName as ByName
    from lockstep.optim.by_name import LayerDecay as LayerDecay
    from lockstep.optim.from_torch import FromTorch as FromTorch
    from lockstep.optim.optimizers import LAMB as LAMB
    from lockstep.optim.optimizers import LARS as LARS
    from lockstep.optim.optimizers import SGD as SGD
    from lockstep.optim.optimizers import Adagrad as Adagrad
    from lockstep.optim.optimizers import Adam as Adam
    from lockstep.optim.optimizers import AdamW as AdamW
    from lockstep.optim.optimizers import RMSProp as RMSProp
    from lockstep.optim.schedules import Cosine as Cosine
    from lockstep.optim.schedules import Exponential as Exponential
    from lockstep.optim.schedules import OneCycle as OneCycle
    from lockstep.optim.schedules import PiecewiseConstant as PiecewiseConstant
    from lockstep.optim.schedules import Polynomial as Polynomial
    from lockstep.optim.schedules import ScaledByBatch as ScaledByBatch
    from lockstep.optim.schedules import Warmup as Warmup
    from lockstep.optim.transforms import AdaptiveClip as AdaptiveClip
    from lockstep.optim.transforms import ClipGlobalNorm as ClipGlobalNorm
    from lockstep.optim.transforms import ClipNorm as ClipNorm
    from lockstep.optim.transforms import ClipValue as ClipValue
    from lockstep.optim.transforms import ScaleGradients as ScaleGradients
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
