"""Where the files of a data set in PASCAL VOC's format are: as in the challenge, or as other tools lay them out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lockstep.checks import check_type
from lockstep.errors import DataError
from lockstep.listing import shorten

_ANNOTATIONS = ("Annotations", "annotations")
_IMAGES = ("JPEGImages", "images")


def folder_of_year(root: Path, year: int | None) -> Path:
    """VOC<year> in a folder; without a year the folder itself.

    Raises:
        InputError: the year is none.
        DataError: there is no such folder; the error names those that there are.
    """
    if year is None:
        return root
    check_type("year", year, int, expected="a year, such as 2012", hint="write year=2012, or leave it out")
    folder = root / f"VOC{year}"
    if not folder.is_dir():
        raise DataError(
            f"There is no folder {folder}.",
            given=f"year={year}; in {root} there is {shorten(_years(root)) or 'no folder VOC*'}",
            expected="the folder above those of the years, VOCdevkit",
            hint="name another year, or without one the folder that holds the annotations",
        )
    return folder


def image_folder(root: Path) -> Path:
    """Where the images are: in JPEGImages, in images, or in the folder itself."""
    return _existing(root, _IMAGES)


def annotation_files(root: Path) -> list[Path]:
    """The annotations by name: in Annotations, in annotations, or in the folder itself.

    Raises:
        DataError: there are none.
    """
    folder = _existing(root, _ANNOTATIONS)
    there = sorted(folder.glob("*.xml"))
    if not there:
        years = _years(root)
        raise DataError(
            f"There are no annotations in {folder}.",
            given=f"no *.xml, but {shorten(years)}" if years else "no *.xml",
            expected=f"a folder with {' or '.join(_ANNOTATIONS)} in it, or the files themselves",
            hint=f"give the year, such as year={years[0].removeprefix('VOC')}" if years else "check the path",
        )
    return there


def split_files(root: Path, split: str, there: Sequence[Path]) -> list[Path]:
    """The annotations that the list of a split names, in its order, of those that are there.

    Raises:
        DataError: there is no such list, it is empty, or names one twice or one that is not there.
    """
    names = _listed(root, split)
    paths = {path.stem: path for path in there}
    if missing := [name for name in names if name not in paths]:
        raise DataError(
            f"The split {split!r} lists images without annotations.",
            given=f"no {shorten([f'{name}.xml' for name in missing])} in {there[0].parent}",
            expected=f"one for each of {len(names)} images",
            hint="copy them there, or take the images out of the list",
        )
    return [paths[name] for name in names]


def _listed(root: Path, split: str) -> list[str]:
    """The names in the list of a split: the first word of each line."""
    folder = root / "ImageSets" / "Main"
    path = folder / f"{split}.txt"
    try:
        names = [line.split()[0] for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:  # the second where it is no text, or the split no name
        # Those of single classes, such as cat_train, come last.
        splits = sorted((each.stem for each in folder.glob("*.txt")), key=lambda name: ("_" in name, name))
        raise DataError(
            f"The split {split!r} cannot be read.",
            given=str(error),
            expected=f"in {folder}: {shorten(splits)}" if splits else f"a list of names; there is none in {folder}",
            hint="name one of these" if splits else "read all annotations with split=None",
        ) from error
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice or not names:
        raise DataError(
            f"{path} is no list of images.",
            given=f"{shorten(twice)} more than once" if twice else "no names",
            expected="one name or more, each on a line of its own and once",
            hint="repair the list",
        )
    return names


def _existing(root: Path, names: Sequence[str]) -> Path:
    """The first of these folders that is there, or the root itself."""
    return next((root / name for name in names if os.path.isdir(root / name)), root)  # noqa: PTH112 (may raise)


def _years(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("VOC*") if path.is_dir())
