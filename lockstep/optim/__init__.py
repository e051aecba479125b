"""Optimizers, schedules, gradient transforms and averages, as values."""

from lockstep.optim.averages import MovingAverage
from lockstep.optim.by_name import ByName
from lockstep.optim.clipping import AdaptiveClip, ClipGlobalNorm, ClipNorm, ClipValue
from lockstep.optim.scaling import ScaleGradients
from lockstep.optim.schedules import Constant, Cosine
from lockstep.optim.sgd import SGD

__all__ = [
    "SGD",
    "AdaptiveClip",
    "ByName",
    "ClipGlobalNorm",
    "ClipNorm",
    "ClipValue",
    "Constant",
    "Cosine",
    "MovingAverage",
    "ScaleGradients",
]
