"""Weights from anywhere: files of other systems as named tensors, and which tensor becomes which parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.weights import initializers as initializers
    from lockstep.weights.layouts import Layout as Layout
    from lockstep.weights.names import NameMap as NameMap
    from lockstep.weights.names import Rename as Rename
    from lockstep.weights.warm_start import WarmStart as WarmStart
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
