"""Optimizers, schedules, gradient transforms and averages, as values."""

from lockstep.optim.averages import MovingAverage
from lockstep.optim.optimizers import SGD
from lockstep.optim.schedules import Constant, Cosine
from lockstep.optim.transforms import ClipGlobalNorm

__all__ = ["SGD", "ClipGlobalNorm", "Constant", "Cosine", "MovingAverage"]
