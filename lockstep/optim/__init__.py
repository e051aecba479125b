"""Optimizers, schedules, gradient transforms and averages, as values."""

from lockstep.optim.adam import Adam, AdamW
from lockstep.optim.adaptive import FTRL, Adadelta, Adagrad, RMSProp
from lockstep.optim.averages import MovingAverage
from lockstep.optim.by_name import ByName
from lockstep.optim.from_torch import FromTorch
from lockstep.optim.layerwise import LAMB, LARS
from lockstep.optim.resolution import ScaledByBatch
from lockstep.optim.schedules import (
    Constant,
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
    "FTRL",
    "LAMB",
    "LARS",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdaptiveClip",
    "ByName",
    "ClipGlobalNorm",
    "ClipNorm",
    "ClipValue",
    "Constant",
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
