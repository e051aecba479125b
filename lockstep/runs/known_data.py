"""What a run knows of its data, for the commands that come after it: `data.json` in the workdir."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.runs.workdir import Workdir

if TYPE_CHECKING:
    from lockstep.readers.reader import Reader
    from lockstep.recipes.recipe import Recipe

DATA = "data.json"


@dataclass(frozen=True)
class KnownData:
    """Where a run reads its data, and what its classes are called."""

    folder: Path | None = None
    """The folder in which relative paths of the recipe are read; None where the run is older than this file."""
    class_names: Mapping[int, str] = field(default_factory=dict)
    """By label, as the model numbers the classes; none where the data does not name them."""

    @classmethod
    def of(cls, workdir: Workdir) -> KnownData:
        """Read what the run has written down; nothing is known of a run that has no such file."""
        known = workdir.read_json(
            DATA,
            _read,
            expected='JSON such as {"folder": "/home/me", "classes": {"0": "daisy"}}',
            hint="restore the file; or move it away, and classes are called by their numbers",
        )
        return known or cls()

    def write(self, workdir: Workdir) -> None:
        """Write it down in the workdir."""
        facts = {"folder": str(self.folder), "classes": {str(label): name for label, name in self.class_names.items()}}
        workdir.write(DATA, json.dumps(facts, indent=1) + "\n")


def class_names(reader: Reader) -> dict[int, str]:
    """Return the names of the classes by the model's numbers; none if the reader knows none."""
    classes, offset = getattr(reader, "classes", ()), getattr(reader, "offset", 0)
    named = classes.items() if isinstance(classes, Mapping) else enumerate(classes)
    return {label - offset: str(name) for label, name in named if label >= offset}


def located(recipe: Recipe, path: Path | None) -> Recipe:
    """Find the data of a run from another folder than the one in which it was started.

    A relative path is read in the current folder; where it leads nowhere, in the folder that the run has written down.

    Args:
        recipe: of the run.
        path: the workdir; None for a run without one.
    """
    folder = KnownData.of(Workdir(path)).folder if path else None
    data = recipe.data if folder is None else recipe.data.found_from(folder)
    return recipe if data == recipe.data else replace(recipe, data=data)


def _read(facts: Any) -> KnownData:
    folder, classes = (facts.get(name) if isinstance(facts, dict) else None for name in ("folder", "classes"))
    if not isinstance(folder, str) or not isinstance(classes, dict):
        raise ValueError("no folder, or no classes by their numbers")
    return KnownData(Path(folder), {int(label): str(name) for label, name in classes.items()})
