"""Weights from anywhere: files of other systems as named tensors, and which of them go where."""

from lockstep.weights.initializers import Constant, TruncatedNormal, VarianceScaling, Xavier, Zeros
from lockstep.weights.layouts import Layout
from lockstep.weights.memory import MemorySource
from lockstep.weights.name_maps import NameMap
from lockstep.weights.names import Rename
from lockstep.weights.plan import Plan, plan
from lockstep.weights.report import Report
from lockstep.weights.source import TensorInfo, WeightSource
from lockstep.weights.warm_start import Target, WarmStart

__all__ = [
    "Constant",
    "Layout",
    "MemorySource",
    "NameMap",
    "Plan",
    "Rename",
    "Report",
    "Target",
    "TensorInfo",
    "TruncatedNormal",
    "VarianceScaling",
    "WarmStart",
    "WeightSource",
    "Xavier",
    "Zeros",
    "plan",
]
