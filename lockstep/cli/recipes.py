"""`lockstep recipes`: the recipes that come with Lockstep; and the JSON schema of recipes, for editors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.cli.shared import Command, add_json_argument, write_found
from lockstep.screen import write_json

if TYPE_CHECKING:
    from lockstep.recipes.recipe import Recipe


def _add_arguments(recipes: argparse.ArgumentParser) -> None:
    written = recipes.add_mutually_exclusive_group()
    add_json_argument(written)
    written.add_argument(
        "--schema", action="store_true", help="write the JSON schema of recipes, by which editors complete TOML"
    )


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from lockstep.recipes.shipped import find, names, summary_of

    if arguments.schema:
        from lockstep.recipes.schema import recipe_schema

        write_json(recipe_schema())
        return 0
    listed = [{"name": name, "trains": summary_of(name), **_needs(find(name))} for name in names()]
    lines = [
        line
        for recipe in listed
        for line in (recipe["name"], *(f"  {key}:{' ' * (8 - len(key))}{recipe[key]}" for key in [*recipe][1:]))
    ]
    write_found(arguments, {"recipes": listed}, lines)
    return 0


def _needs(recipe: Recipe) -> dict[str, str]:
    from lockstep.recipes.data import ImageData, MnistData

    data = recipe.data
    if isinstance(data, MnistData):
        examples = "MNIST, fetched where it is not there"
    elif train := getattr(data, "train", None):
        examples = f"{train}, with the project"
    else:
        what = "images with a class each" if isinstance(data, ImageData) else "images with objects"
        examples = f"{what}, --set data.train=PATH"
    weights = recipe.warm_start and (recipe.warm_start.path or "those that --set warm_start.path=FILE names")
    ends = [str(recipe.end)] if recipe.end else [str(stage.length) for stage in recipe.stages]
    return {
        "data": examples,
        "weights": weights or "none",
        "length": f"{' and '.join(ends)}, {recipe.batch_size} images an update",
    }


COMMAND = Command("list the recipes that come with Lockstep", _add_arguments, _run)
