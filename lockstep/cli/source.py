"""The source of examples that a command line names, a recipe or a path, and what augments them."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.augmentations.crops import RandomResizedCrop
from lockstep.augmentations.slim_presets import SLIM_PRESETS, inception_preset
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.data.order import Order
from lockstep.data.rows import Rows
from lockstep.errors import DataError, InputError
from lockstep.images.objects import object_fields
from lockstep.listing import did_you_mean, hint_for_path
from lockstep.readers.split_folders import find_split
from lockstep.recipes.data import DetectionData, MnistData
from lockstep.recipes.python_parts import PythonData
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find, names
from lockstep.run_files import RECIPE

if TYPE_CHECKING:
    from lockstep.readers.reader import Reader
    from lockstep.runs.showing import Pipeline

_CROP, _CROP_PIXELS = "crop", 224
_IMAGE, _BOXES, _KEYPOINT = "image", "boxes", "keypoint"
_PATTERN = re.compile(r"[*?\[{:]")
_MOST_TRIED = 10


@dataclass(frozen=True)
class ExampleStream:
    """Examples in an order, and the augmentations that they go through."""

    reader: Reader
    order: Order | str
    seed: int
    pipeline: Pipeline


def example_stream(
    source: str,
    augment: str | None,
    size: int | None = None,
    order: str | None = None,
    seed: int | None = None,
    *,
    truth: bool = False,
) -> ExampleStream:
    """Open the source that a command line names, which `check_source` has seen, with an augmentation.

    Args:
        source: a recipe, a file.toml, or a path to data.
        augment: a preset, or a recipe whose augmentation is taken; by default the source's, if it is a recipe.
        size: height and width of the images of a preset; by default the preset's own.
        order: "shuffled" or "sequential"; by default the recipe's, else "shuffled".
        seed: by default the recipe's, else 0.
        truth: of a path, also read what detections are scored against.
    """
    recipe = find(source) if is_recipe(source) else None
    if recipe:
        recipe.data.prepare()
        whole = stream_of_recipe(recipe)
        reader, usual_order, usual_seed = whole.reader, whole.order, whole.seed
    else:
        from lockstep.readers.open import open_source

        reader, usual_order, usual_seed = open_source(source, everything=True, truth=truth), "shuffled", 0
    pipeline = _pipeline(augment, size, recipe, reader)
    return ExampleStream(reader, order or usual_order, usual_seed if seed is None else seed, pipeline)


def stream_of_recipe(recipe: Recipe) -> ExampleStream:
    """Open the examples that a recipe trains on, with its augmentation; its data has to be there."""
    from lockstep.runs.build import Examples

    reader = Examples(recipe).reader(recipe.data.split, to_train=True)
    return ExampleStream(reader, recipe.feed.order, recipe.seed, _pipeline_of_recipe(recipe))


def is_recipe(word: str) -> bool:
    """Whether a word names a recipe: a shipped one, or a file.toml."""
    return word in names() or word.endswith(".toml")


def check_source(source: str) -> None:
    """Refuse a recipe that cannot be read, and a word that is neither a path nor a recipe; torch is not loaded."""
    if is_recipe(source):
        find(source)
    elif (Path(source) / RECIPE).is_file():
        raise InputError(
            f"{source} is the folder of a run.",
            given=source,
            expected="data, or a recipe",
            hint=f"name the recipe of the run: {Path(source) / RECIPE}",
        )
    elif not _PATTERN.search(source) and not Path(source).exists() and not find_split(source):
        raise InputError(
            f"There is neither a recipe nor data called {source}.",
            given=source,
            expected="a recipe that `lockstep recipes` lists, a file.toml, or a path to data",
            hint=did_you_mean(source, names()) or hint_for_path(source),
        )


def _pipeline(augment: str | None, size: int | None, recipe: Recipe | None, reader: Reader) -> Pipeline:
    from lockstep.runs.showing import NOTHING

    if augment in (_CROP, *SLIM_PRESETS):
        return _pipeline_of_preset(augment, size, reader)
    if size is not None:
        raise InputError(
            "Only a preset has a size to choose.",
            given=f"--size {size} " + (f"with --augment {augment}" if augment else "without --augment"),
            expected=f"--augment {', '.join((_CROP, *SLIM_PRESETS))}",
            hint="leave --size out, or name a preset",
        )
    if augment is None:
        return _pipeline_of_recipe(recipe) if recipe else NOTHING
    if is_recipe(augment):
        return _pipeline_of_recipe(find(augment))
    choices = (_CROP, *SLIM_PRESETS, *names())
    raise InputError(
        f"There is no augmentation called {augment!r}.",
        given=f"--augment {augment}",
        expected=f"{', '.join(choices)}, or a recipe's file.toml",
        hint=did_you_mean(augment, choices) or "give one of these",
    )


def _pipeline_of_recipe(recipe: Recipe) -> Pipeline:
    from lockstep.runs.showing import Pipeline

    data = recipe.data
    if isinstance(data, MnistData):
        return Pipeline(data.augment)
    if isinstance(data, DetectionData):
        return Pipeline(data.training(), data.inputs)
    if isinstance(data, PythonData):
        return Pipeline((*data.training(),))
    data = replace(data, preprocess_on="host")  # the same pixels, step by step
    boxes = (_BOXES,) if data.crops_by_boxes else ()  # as the run reads them
    return Pipeline((*data.training(),), data.inputs, (_IMAGE, *boxes))


def _pipeline_of_preset(name: str, size: int | None, reader: Reader) -> Pipeline:
    """Return the pipeline of a preset for images of one class; Inception's crops by boxes where there are some."""
    from lockstep.runs.showing import Pipeline

    objects = _object_fields(reader)
    if name == _CROP:
        crop = RandomResizedCrop(_CROP_PIXELS if size is None else size)
        return Pipeline((crop, HorizontalFlip()), fields=(_IMAGE, *objects))
    options: dict[str, Any] = {} if size is None else {"size": size}
    if name == "inception" and _BOXES in objects:
        # After this crop a batch has no boxes, so nothing else of the objects either.
        preset, objects = inception_preset(**options, boxes_field=_BOXES), (_BOXES,)
    else:
        preset = SLIM_PRESETS[name](**options)
    return Pipeline(preset.train, preset.inputs, (_IMAGE, *objects))


def _object_fields(reader: Reader) -> tuple[str, ...]:
    """Name the fields of objects of the first readable example, but keypoints: flips do not know left from right."""
    from lockstep.data.batch_reader import read_examples

    for index in range(min(_MOST_TRIED, len(reader))):
        with suppress(DataError):
            fields = read_examples(reader, Rows(np.array([index]), np.array([index])), seed=0)
            return tuple(name for name in object_fields(fields) if not name.startswith(_KEYPOINT))
    return ()
