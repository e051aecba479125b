"""Weights from anywhere: files of other systems as named tensors, and which tensor becomes which parameter."""

from lockstep.weights import initializers
from lockstep.weights.layouts import Layout
from lockstep.weights.name_maps import NameMap
from lockstep.weights.names import Rename
from lockstep.weights.warm_start import WarmStart

__all__ = ["Layout", "NameMap", "Rename", "WarmStart", "initializers"]
