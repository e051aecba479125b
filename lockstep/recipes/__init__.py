"""Recipes: the complete description of a run as a value, and as TOML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.checkpoints.retention import Retention as Retention
    from lockstep.recipes import preprocessing as preprocessing
    from lockstep.recipes.code import Function as Function
    from lockstep.recipes.data import DetectionData as DetectionData
    from lockstep.recipes.data import ImageData as ImageData
    from lockstep.recipes.parts import Checkpoints as Checkpoints
    from lockstep.recipes.parts import CrossEntropy as CrossEntropy
    from lockstep.recipes.parts import DataLoading as DataLoading
    from lockstep.recipes.parts import Evaluate as Evaluate
    from lockstep.recipes.parts import InitialWeights as InitialWeights
    from lockstep.recipes.parts import Monitoring as Monitoring
    from lockstep.recipes.parts import Stage as Stage
    from lockstep.recipes.python_parts import PythonData as PythonData
    from lockstep.recipes.python_parts import PythonHook as PythonHook
    from lockstep.recipes.python_parts import PythonModel as PythonModel
    from lockstep.recipes.python_parts import PythonOptimizer as PythonOptimizer
    from lockstep.recipes.python_parts import PythonTask as PythonTask
    from lockstep.recipes.recipe import Recipe as Recipe
    from lockstep.recipes.shipped import find as find
    from lockstep.recipes.tasks import Classification as Classification
    from lockstep.recipes.tasks import Detection as Detection
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
