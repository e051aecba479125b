"""Training data by links to the user's files: a file that is to be damaged is a copy, and theirs are never touched."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from lockstep.readers.mnist import mnist_folder
from lockstep.recipes.data import MnistData
from lockstep.recipes.recipe import Recipe
from lockstep.records.shards import expand_braces, find_shards
from lockstep.storage.remote_path import is_url

_MOST_FILES, _MOST_BYTES = 100, 1 << 24
"""The most files that are damaged at a time, and the most bytes of each copy."""


class LinkedData:
    """The files of some training data, as links in a folder of their own, which is made.

    The path of the data is a folder, a file, or a pattern of files in one folder.
    """

    def __init__(self, path: str, folder: Path) -> None:
        self._damaged: dict[Path, Path] = {}
        """For each copy, the file of which it is the beginning."""
        given = Path(path)
        files = sorted(given.rglob("*")) if given.is_dir() else map(Path, map(str, find_shards(expand_braces(path))))
        above = given if given.is_dir() else given.parent
        self._links = [folder / file.relative_to(above) for file in files if file.is_file()]
        for link in self._links:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to((above / link.relative_to(folder)).absolute())
        self.path = str(folder if given.is_dir() else folder / given.name)
        """What a recipe names in place of the path given."""

    def damage(self, rng: random.Random) -> str:
        """Cut some files short, and say which."""
        chosen = rng.sample(self._links, min(len(self._links), _MOST_FILES))
        for link in chosen:
            file = link.readlink()
            with file.open("rb") as whole:
                begins = whole.read(min(file.stat().st_size // 2, _MOST_BYTES))
            link.unlink()
            link.write_bytes(begins)
            self._damaged[link] = file
        return f"{chosen[0].name} and {len(chosen) - 1} more files of the training data cut short"

    def mend(self) -> None:
        """Put links in the place of copies again."""
        for link, file in self._damaged.items():
            link.unlink()
            link.symlink_to(file)
        self._damaged.clear()


def linked(recipe: Recipe, folder: Path) -> tuple[Recipe, LinkedData | None]:
    """Return the recipe with links in place of its training data; None where these are not files that can be linked.

    Annotations of COCO find their images by where they lie, so they cannot.
    """
    data = recipe.data
    data.prepare()
    path = str(mnist_folder(data.folder, data.cache)) if isinstance(data, MnistData) else data.path_of(data.split)
    if path is None or ".json" in path or is_url(path):
        return recipe, None
    found = LinkedData(path, folder / "data")
    there = data.at(data.split, found.path)
    # Indices of links are of no use to anybody later.
    return replace(
        recipe, data=there if isinstance(there, MnistData) else replace(there, cache=str(folder / "cache"))
    ), found
