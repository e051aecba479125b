"""What was meant by a command that cannot be run: for whoever has not learned the commands yet."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from lockstep.lazy import import_lazily
from lockstep.listing import closest_path, did_you_mean
from lockstep.run_files import RECIPE

_NOT_COMMANDS = {"help": "lockstep --help", "version": "lockstep --version", "list": "lockstep recipes"}


def command_meant(argv: Sequence[str], commands: Collection[str], recipes: Collection[str]) -> str:
    """Say which command was meant by a command line whose first word is none, of these commands and recipes."""
    word, rest = argv[0], argv[1:]
    if word in _NOT_COMMANDS:
        return _NOT_COMMANDS[word]
    if os.path.exists(word) or word in recipes:  # noqa: PTH110 (that of pathlib raises)
        return shlex.join(["lockstep", "run" if word.endswith(".py") else "train", word, *rest])
    meant = re.search('"(.+)"', did_you_mean(word, commands))
    return shlex.join(["lockstep", meant[1], *rest]) if meant else "lockstep --help"


def rest_meant(command: str, named: str, rest: Sequence[str], flags: Collection[str]) -> str:
    """Say what was meant by words that a command with these flags does not take; "" if unknown.

    `named` is the data, recipe or run that the command names.
    """
    if command == "train":
        words = [named, *rest]
        if os.path.exists(whole := " ".join(words)):  # noqa: PTH110 (likewise)
            return f"a name with spaces is quoted: lockstep train {shlex.quote(whole)}"
        above = {Path(word).parent for word in words}
        if len(above) == 1 and all(map(os.path.exists, words)):
            return f"one folder is trained on, that with the classes: lockstep train {shlex.quote(str(above.pop()))}"
    name = rest[0].partition("=")[0].lstrip("-").replace("-", "_")
    if command == "train" and rest[0].startswith("--") and (field := _field(name)):
        value = rest[0].partition("=")[2] or (rest[1] if len(rest) > 1 else "VALUE")
        return f"a field of the recipe: lockstep train {shlex.quote(named)} --set {field}={value}"
    return did_you_mean(rest[0].partition("=")[0], flags)


def _field(name: str) -> str | None:
    """Return the path of the field that is meant by the name of a flag."""
    import_lazily("torch", "numpy")
    from lockstep.recipes.fields import all_fields

    name = {"learning_rate": "lr", "image_size": "data.image_size"}.get(name, name)
    return next((field for field in all_fields() if field == name or field.endswith(f".{name}")), None)


def run_meant(path: Path) -> str:
    """Say what was meant by a path that leads to no run: another path, or data, which is trained on first."""
    from lockstep.cli.own_data import name_of_run, names_data

    below = sorted(found.parent for found in path.glob(f"*/{RECIPE}"))
    above = [each for each in path.parents if (each / RECIPE).is_file()]
    trained = Path("runs") / name_of_run(str(path))
    named = [trained] if (trained / RECIPE).is_file() else []
    if runs := [*above, *below, *named]:
        return f"did you mean {runs[0]}?"
    if path.exists() and names_data(str(path)):
        return f"train on it first: lockstep train {shlex.quote(str(path))}"
    if not path.exists() and (meant := closest_path(path)):
        return f"did you mean {meant}?"
    return f"check the path, or train first: lockstep train mnist --workdir {path}"
