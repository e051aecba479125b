"""`lockstep inspect RECIPE --anchors`: how well a detector's anchors fit the objects that it trains on, and others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch

from lockstep.cli.source import is_recipe
from lockstep.detection.detector import DetectionModel
from lockstep.errors import InputError
from lockstep.readers.detection import DetectionReader
from lockstep.readers.object_survey import survey_objects
from lockstep.recipes.data import DetectionData
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.run_files import RECIPE
from lockstep.runs.build import Examples
from lockstep.runs.objects import AnchorFit, BoxesOnInputs, anchor_fit, boxes_on_inputs, middle_sizes, proposed_anchors
from lockstep.screen import write_json, write_lines

_MOST_OBJECTS = 5000
"""Number of objects that are compared with the anchors."""


class AnchorComparison(NamedTuple):
    """The anchors of a recipe beside those that are proposed. The names of the fields are those of the JSON."""

    num_objects: int
    half_from_pixels: float
    """Half of the objects are of this size to the next on the network's input, the square root of their area."""
    half_to_pixels: float
    unmatched: float
    untouched: float
    proposal: str
    settings: list[str]
    """The proposal as settings of the recipe; none where its model has no such fields."""
    proposed_unmatched: float | None
    proposed_untouched: float | None


def inspect_anchors(arguments: argparse.Namespace) -> int:
    """Compare the anchors of a recipe, or of a run's, with the objects to train on, and propose others."""
    told = compare_anchors(_recipe_at(arguments.path), arguments.path)
    if arguments.json:
        write_json(told._asdict())
        return 0
    fits = [AnchorFit(told.num_objects, told.unmatched, told.untouched)]
    lines = [
        f"half of the objects are of {told.half_from_pixels:.0f} to {told.half_to_pixels:.0f} pixels on the network's "
        "input (the square root of their area)",
        f"its own anchors: {fits[0]}",
        told.proposal,
    ]
    if told.proposed_unmatched is not None and told.proposed_untouched is not None:
        lines.append(f"with these: {AnchorFit(told.num_objects, told.proposed_unmatched, told.proposed_untouched)}")
    write_lines(lines)
    return 0


def compare_anchors(recipe: Recipe, source: str) -> AnchorComparison:
    """Compare the anchors of a recipe's detector with the objects on its first images, and with those of a proposal.

    Raises:
        InputError: the recipe trains no detector, or one whose anchors need not fit objects.
        DataError: the data cannot be read, or has no objects.
    """
    data = recipe.data
    if not isinstance(data, DetectionData):
        raise _without_anchors(source, "a recipe that trains no detector")
    data.prepare()
    reader = Examples(recipe).reader("train", to_train=True)
    assert isinstance(reader, DetectionReader), "DetectionData makes one"
    boxes = boxes_on_inputs(data, survey_objects(reader, skip_bad=recipe.feed.bad_examples != "raise"), _MOST_OBJECTS)
    own = _fit_of(recipe, boxes)
    if own is None:
        raise _without_anchors(source, "a detector whose anchors are none that objects should fit, or without objects")
    sides = torch.cat([each[:, 2:] - each[:, :2] for _, each in boxes])
    proposal, settings = proposed_anchors(recipe.model, sides)
    fit = _fit_of(with_settings(recipe, settings), boxes) if settings else None
    shares = (None, None) if fit is None else fit[1:]
    return AnchorComparison(own.num_objects, *middle_sizes(sides), *own[1:], proposal, settings, *shares)


def _fit_of(recipe: Recipe, boxes: BoxesOnInputs) -> AnchorFit | None:
    model = recipe.model.build(recipe.seed)
    return anchor_fit(model, boxes) if isinstance(model, DetectionModel) else None


def _recipe_at(path: str) -> Recipe:
    if not is_recipe(path):
        is_run = (Path(path) / RECIPE).is_file()
        raise InputError(
            "Anchors are those of a recipe, and are compared with the objects that it trains on.",
            given=f"{path} --anchors",
            expected="a recipe that `lockstep recipes` lists, or a file.toml",
            hint=f"name the recipe of the run: {Path(path) / RECIPE}"
            if is_run
            else f"lockstep train {path} --print-recipe > mine.toml makes one of data of your own, then name mine.toml",
        )
    return find(path)


def _without_anchors(source: str, given: str) -> InputError:
    return InputError(
        f"There are no anchors to compare in {source}.",
        given=given,
        expected="a detector with anchors, such as those of the recipes bccd and raccoon",
        hint="leave --anchors out",
    )
