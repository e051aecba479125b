"""Optimizers, schedules, gradient transforms and averages, as values."""

from lockstep.optim.adam import Adam, AdamW
from lockstep.optim.adaptive import Adadelta, Adagrad
from lockstep.optim.averages import MovingAverage
from lockstep.optim.by_name import ByName
from lockstep.optim.clipping import AdaptiveClip, ClipGlobalNorm, ClipNorm, ClipValue
from lockstep.optim.decays import Cosine, Exponential, Polynomial
from lockstep.optim.from_torch import FromTorch
from lockstep.optim.ftrl import FTRL
from lockstep.optim.layerwise import LAMB, LARS
from lockstep.optim.piecewise import OneCycle, PiecewiseConstant
from lockstep.optim.rmsprop import RMSProp
from lockstep.optim.scaling import ScaleGradients
from lockstep.optim.schedules import Constant, ScaledByBatch, Warmup
from lockstep.optim.sgd import SGD

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
