"""A recipe as TOML, and back."""

from __future__ import annotations

import tomllib
from pathlib import Path

import tomli_w

from lockstep.errors import RecipeError
from lockstep.recipes.fields import read, write
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.wording import Place


def to_toml(recipe: Recipe) -> str:
    """The whole recipe, defaults included.

    Raises:
        RecipeError: it holds what a recipe cannot say, such as a schedule of one's own.
    """
    text = tomli_w.dumps(write(Recipe, recipe, Place(f"recipe {recipe.name}")))
    # TOML leaves some characters as they are that a terminal would obey; escaped, they are the same.
    return "".join(sign if sign.isprintable() or sign in "\n\t" else f"\\U{ord(sign):08x}" for sign in text)


def from_toml(text: str, source: str) -> Recipe:
    """The recipe that a text describes; fields that it leaves out take their defaults.

    Args:
        text: TOML.
        source: where it comes from, for messages.

    Raises:
        RecipeError: it is not TOML, or describes no recipe; the message names the field.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(
            f"{source}: this is not TOML.",
            given=error,
            expected="lines such as batch_size = 128 below headings such as [optimizer]",
            hint="correct it there; `lockstep train mnist --print-recipe` prints a recipe to start from",
        ) from error
    recipe: Recipe = read(Recipe, tables, Place(source))
    return recipe


def load(path: Path) -> Recipe:
    """The recipe in a file.

    Raises:
        RecipeError: it cannot be read, or describes no recipe.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise RecipeError(
            f"{path}: the recipe cannot be read.",
            given=f"{path} ({reason})",
            expected="a TOML file",
            hint="check the path; `lockstep train mnist --print-recipe` prints a recipe to start from",
        ) from error
    return from_toml(text, str(path))
