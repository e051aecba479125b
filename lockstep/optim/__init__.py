"""Optimizers, schedules, gradient transforms and averages, as values.

Rarely used: Adadelta and FTRL in `optim.adaptive`; `optim.schedules.Constant`, which a number says as well.
"""

from lockstep.optim.adam import Adam, AdamW
from lockstep.optim.adaptive import Adagrad, RMSProp
from lockstep.optim.averages import MovingAverage
from lockstep.optim.by_name import ByName
from lockstep.optim.from_torch import FromTorch
from lockstep.optim.layerwise import LAMB, LARS
from lockstep.optim.resolution import ScaledByBatch
from lockstep.optim.schedules import (
    Cosine,
    Exponential,
    OneCycle,
    PiecewiseConstant,
    Polynomial,
    Warmup,
)
from lockstep.optim.sgd import SGD
from lockstep.optim.transforms import AdaptiveClip, ClipGlobalNorm, ClipNorm, ClipValue, ScaleGradients

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdaptiveClip",
    "ByName",
    "ClipGlobalNorm",
    "ClipNorm",
    "ClipValue",
    "Cosine",
    "Exponential",
    "FromTorch",
    "MovingAverage",
    "OneCycle",
    "PiecewiseConstant",
    "Polynomial",
    "RMSProp",
    "ScaleGradients",
    "ScaledByBatch",
    "Warmup",
]
