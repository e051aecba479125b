"""Recipes: the complete description of a run as a value, and as TOML.

The names for scripts are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.checkpoints.retention import Retention
    from lockstep.recipes.data import ImageData, MnistData
    from lockstep.recipes.parts import Checkpoints, CrossEntropy, Evaluate, Feed, InitialWeights, Stage, Watch
    from lockstep.recipes.preprocessing import Cifarnet, Inception, Lenet, ResizedCrop, Vgg
    from lockstep.recipes.recipe import Recipe
    from lockstep.recipes.shipped import find, names

_HOMES = {
    "lockstep.checkpoints.retention": ["Retention"],
    "lockstep.recipes.data": ["ImageData", "MnistData"],
    "lockstep.recipes.parts": ["Checkpoints", "CrossEntropy", "Evaluate", "Feed", "InitialWeights", "Stage", "Watch"],
    "lockstep.recipes.preprocessing": ["Cifarnet", "Inception", "Lenet", "ResizedCrop", "Vgg"],
    "lockstep.recipes.recipe": ["Recipe"],
    "lockstep.recipes.shipped": ["find", "names"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Checkpoints",
    "Cifarnet",
    "CrossEntropy",
    "Evaluate",
    "Feed",
    "ImageData",
    "Inception",
    "InitialWeights",
    "Lenet",
    "MnistData",
    "Recipe",
    "ResizedCrop",
    "Retention",
    "Stage",
    "Vgg",
    "Watch",
    "find",
    "names",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'lockstep.recipes' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
