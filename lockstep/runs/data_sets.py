"""The sets of examples in somebody's own data: which are trained on, which are scored; what is no data is refused."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import DataError
from lockstep.listing import shorten
from lockstep.readers.label_tables import is_table_of_boxes, label_table_among
from lockstep.readers.paths import (
    annotations_among,
    annotations_at,
    check_no_sets,
    class_folders,
    coco_sets_among,
    entries_of,
    shards_among,
    words_in,
)
from lockstep.readers.split_folders import ENDINGS, find_split, split_names
from lockstep.readers.yolo_sets import find_yolo_sets
from lockstep.storage.remote_path import is_url

LEAST_IMAGES = 10
_ZIPPED = (".zip", ".rar", ".7z", ".tgz", ".tar.gz", ".tar.xz", ".tar.bz2")
_VIDEOS = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg")
_WEIGHTS = (".pt", ".pth", ".ckpt", ".safetensors", ".h5", ".keras", ".onnx", ".npz", ".pkl")
_TEXTS = (".txt", ".md", ".pdf", ".doc", ".docx", ".xls", ".xlsx", ".xml", ".html", ".ipynb")
_UNREAD = (".heic", ".heif", ".avif", ".cr2", ".nef", ".arw", ".dng", ".raw")
_OF_PROJECTS = frozenset(("pyproject.toml", "setup.py"))
_NAMES = {"train": ("train", "training"), "validation": ("validation", "valid", "val"), "test": ("test", "testing")}
"""The names that a set may have, of folders, of lists and at the start of the names of shards."""


class DataSets(NamedTuple):
    """Where the examples to train on are, and those to score, by names alone."""

    train: str
    validation: str | None = None
    test: str | None = None
    train_split: str | None = None
    """The list of VOC's folder, or the set of YOLO's `data.yaml`, to train on."""
    lists: bool = False
    """Whether the sets are such lists."""
    labels: tuple[str, ...] | None = None
    """The classes to train on, where some folders are empty, or another set lacks one; None: all sets have the same."""
    label_map: str | None = None
    """The file beside records with the name of each class of objects."""


def find_data_sets(path: str) -> DataSets:
    """Find the sets of examples at a path, and refuse what cannot be trained on, by names alone.

    Raises:
        DataError: there is no data, or none that can be learned from: no classes, one, or next to no images.
    """
    place = Path(path)
    if is_url(path):
        return DataSets(path)
    if named := _by_name({name: f"{path.rstrip('/')}/{name}" for name in split_names(path)}):
        return DataSets(named["train"], named.get("validation"), named.get("test"))
    if find_split(path):
        return DataSets(path)
    if place.is_file():
        if (found := annotations_at(path)) and found.kind == "yolo":
            return _sets_of_yolo(path)
        if not (place.suffix == ".csv" and is_table_of_boxes(place)):
            _check_file(place)
    return _sets_in(place) if place.is_dir() else DataSets(path)


def _check_file(file: Path) -> None:
    """Refuse a file that is no data by the ending of its name, with the command that was meant."""
    name, word, folder = file.name.lower(), _word(file), _word(file.parent)
    unpacked = file.name[: file.name.find(".", 1)]
    unpack = f"unzip {word} -d {_word(unpacked)}" if name.endswith(".zip") else "unpack it"
    weights = f"to start from them: lockstep train photos --set warm_start.path={word}"
    kinds = {
        _ZIPPED: ("an archive, and images are read from folders", f"{unpack}; then lockstep train {_word(unpacked)}"),
        (".csv",): ("a table; what is trained on is the folder that it is in", f"lockstep train {folder}"),
        ENDINGS + _UNREAD: ("one image", f"lockstep train {_word(_folder_of_image(file))}"),
        _VIDEOS: ("a video, and images are read", _frames_of(file)),
        (".py",): ("a script", f"lockstep run {word}"),
        _WEIGHTS: ("a file of weights", f"{weights}; what is in it: lockstep inspect {word}"),
        _TEXTS: ("no data, by its name", f"name the folder of your images, such as lockstep train {folder}"),
    }
    for endings, (what, hint) in kinds.items():
        if name.endswith(endings):
            raise DataError(
                f"{file} is {what}.",
                given=file.name,
                expected="a folder with a folder of images for each class",
                hint=hint,
            )


def _folder_of_image(file: Path) -> Path:
    """Return the folder above that of an image, if it has folders of images, else that of the image."""
    return above if _is_above_classes(above := file.parent.parent) else file.parent


def _is_above_classes(folder: Path) -> bool:
    """Whether there are two folders of images or more in a folder."""
    inside = (entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return sum(1 for _ in islice(filter(_has_image, inside), 2)) == 2


def _frames_of(video: Path) -> str:
    return (
        f"take images out of it first: mkdir -p photos/CLASS; ffmpeg -i {_word(video)} -vf fps=1 photos/CLASS/%06d.jpg"
    )


def _sets_in(folder: Path) -> DataSets:
    entries = [entry for entry in entries_of(folder) if isinstance(entry, Path)]
    folders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    _check_no_project(folder, entries, folders)
    if shards := shards_among(entries):
        return _sets_of_shards(folder, shards)
    if annotations := annotations_among(entries):
        files = sorted(str(file) for file in annotations.glob("*.json") if "captions" not in file.name)
        return _sets_of_files(files) if files else _sets_of_voc(folder)
    if listed := coco_sets_among(entries):
        return _sets_of_files([*map(str, listed)])
    if found := annotations_at(folder):
        return _sets_of_yolo(str(folder)) if found.kind == "yolo" else DataSets(str(found.place))
    if named := _by_name({entry.name: str(entry) for entry in folders}):
        annotated = {split: str(found.place) for split, place in named.items() if (found := annotations_at(place))}
        if "train" in annotated:
            return DataSets(**annotated)  # type: ignore[arg-type]  # of the names of sets alone
        has_classes = {split: _has_classes(Path(place)) for split, place in named.items()}
        names = {name for each in _NAMES.values() for name in each}
        if has_classes["train"] or names.issuperset(entry.name.lower() for entry in folders):
            # Images of a test without classes, as contests have them, cannot be scored.
            named = {split: place for split, place in named.items() if split == "train" or has_classes[split]}
            labels = _common_labels(folder, named)
            return DataSets(named["train"], named.get("validation"), named.get("test"), labels=labels)
    return DataSets(str(folder), labels=_common_labels(folder, {"train": str(folder)}))


def _check_no_project(folder: Path, entries: Sequence[Path], folders: Sequence[Path]) -> None:
    """Refuse a project, whose folders are no classes though there may be images in some."""
    if made := [entry.name for entry in entries if entry.name in _OF_PROJECTS]:
        below = next((entry for entry in folders if _has_image(entry)), folder / "photos")
        raise DataError(
            f"{_told(folder)} is a project of Python, whose folders are no classes of images.",
            given=f"{made[0]} beside {shorten([entry.name for entry in folders], 3) or 'no folders'}",
            expected="a folder with a folder of images for each class",
            hint=f"name the folder of your images in it, such as lockstep train {_word(below)}",
        )


def _common_labels(folder: Path, named: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the classes to train on, if the folders of the sets are not all the same and have images; else None."""
    trained, is_same = _check_classes(Path(named["train"]), is_set=named["train"] != str(folder)), True
    for split, place in named.items():
        there = class_folders(place)
        classes = _with_images(Path(place), there)
        if unknown := sorted({*classes} - {*trained}):
            raise DataError(
                f"The {split} images are of classes that none is trained on.",
                given=f"{shorten(unknown)} in {place}",
                expected=f"the classes in {named['train']}: {shorten(trained)}",
                hint=f"move {shorten(unknown)} out of {place}, or add images to {Path(named['train'], unknown[0])}",
            )
        is_same &= there == trained == classes
    return None if is_same else trained


def _with_images(folder: Path, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the classes that have images; those of a table have."""
    is_table = label_table_among(entries_of(folder)) is not None
    return classes if is_table else tuple(name for name in classes if _has_image(folder / name))


def _has_classes(folder: Path) -> bool:
    entries = entries_of(folder)
    is_table = label_table_among(entries) is not None
    return is_table or any(entry.is_dir() and not entry.name.startswith(".") for entry in entries)


def _by_name(places: Mapping[str, str]) -> dict[str, str]:
    """Return the places of sets by their names; none without one to train on."""
    found = {split: places[name] for split, names in _NAMES.items() for name in places if name.lower() in names}
    return found if "train" in found else {}


def _sets_of_shards(folder: Path, shards: Sequence[str]) -> DataSets:
    train, validation, test = (
        next((f"{folder}/{name}[-_.]*" for name in names if any(_begins(each, name) for each in shards)), None)
        for names in _NAMES.values()
    )
    return DataSets(train, validation, test) if train and (validation or test) else DataSets(str(folder))


def _begins(shard: str, name: str) -> bool:
    return shard.startswith(name) and shard[len(name) : len(name) + 1] in ("-", "_", ".")


def _sets_of_files(files: Sequence[str]) -> DataSets:
    """Choose among COCO's files of annotations; without one to train on, there has to be one file.

    A file without objects, as COCO has of the images of its test, cannot be scored.
    """
    instances = [file for file in files if "instances" in Path(file).name] or [*files]
    others = [file for file in files if file not in instances and all(words_in(Path(file), b'"bbox"'))]
    train, validation, test = (
        next((file for file in (*instances, *others) if any(name in Path(file).name.lower() for name in names)), None)
        for names in _NAMES.values()
    )
    if train:
        return DataSets(train, validation, test)
    if len(instances) == 1:
        return DataSets(instances[0])
    raise DataError(
        "There are several files of annotations, and none is named as that to train on.",
        given=shorten(instances),
        expected="one file, or one with train in its name",
        hint=f"name one: lockstep train {_word(instances[0])}",
    )


def _sets_of_voc(folder: Path) -> DataSets:
    lists = {path.stem for path in (folder / "ImageSets" / "Main").glob("*.txt")}
    path, has_test = str(folder), "test" in lists
    if "trainval" in lists and has_test:
        return DataSets(path, None, path, "trainval", lists=True)
    if "train" in lists:
        return DataSets(path, path if "val" in lists else None, path if has_test else None, lists=True)
    return DataSets(path, train_split=next(iter(sorted(lists)), None), lists=bool(lists))


def _sets_of_yolo(path: str) -> DataSets:
    sets = find_yolo_sets(path).images
    if "train" not in sets:
        return DataSets(path, train_split=next(filter(None, sets), None), lists=any(sets))
    return DataSets(path, path if "val" in sets else None, path if "test" in sets else None, lists=True)


def _check_classes(folder: Path, *, is_set: bool) -> tuple[str, ...]:
    """Return the classes in a folder that have images; refuse it without classes, with one, or next to no images."""
    below = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    if below and not _has_image(folder):
        raise _without_images(folder, below)
    is_named_below = not is_set and folder.parent != Path() and not any(entry.is_dir() for entry in below)
    if is_named_below and label_table_among(below) is None and _is_above_classes(folder.parent):
        raise DataError(
            f"{folder} holds the images of one class.",
            given=f"images, and no folders, in {folder}",
            expected="the folder above it, with a folder of images for each class",
            hint=f"lockstep train {_word(folder.parent)}",
        )
    folders = class_folders(folder)
    classes = _with_images(folder, folders)
    if len(classes) > 1:
        check_no_sets(folder, classes)
    if len(classes) == 1:
        inside, inner = _first_fork(folder / classes[0])
        if inner:
            hint = f"lockstep train {_word(inside)}"
        elif empty := [name for name in folders if name not in classes]:
            hint = f"add images to {folder / empty[0]}, which has none"
        else:
            hint = f"add a folder of images that show something else, such as {folder / 'other'}"
        raise DataError(
            f"There is one class in {folder}, and a classifier tells two or more apart.",
            given=f"the class {classes[0]}" + (f", with the folders {shorten(inner, 3)} in {inside}" if inner else ""),
            expected="a folder of images for each of two or more classes",
            hint=hint,
        )
    count = sum(1 for _ in islice(_images_in(folder), LEAST_IMAGES))
    if count < LEAST_IMAGES:
        raise DataError(
            f"There are too few images in {folder} to learn from and to score.",
            given=f"{count} images of {len(classes)} classes",
            expected=f"{LEAST_IMAGES} or more, and better 30 of each class",
            hint="add images, and give the same command again",
        )
    return classes


def _first_fork(folder: Path) -> tuple[Path, list[str]]:
    """Go down through folders that hold one folder each; return the first with several, and their names, if any."""
    inner = sorted(entry.name for entry in folder.glob("[!.]*") if entry.is_dir())
    while len(inner) == 1:
        folder /= inner[0]
        inner = sorted(entry.name for entry in folder.glob("[!.]*") if entry.is_dir())
    return folder, inner


def _without_images(folder: Path, below: Sequence[Path]) -> DataError:
    if unread := unread_images(folder):
        ending = unread[0].suffix
        return DataError(
            f"The images in {folder} are of a kind that is not read: {ending[1:].upper()}.",
            given=f"{len(unread)} files such as {unread[0].relative_to(folder)}",
            expected=", ".join(ENDINGS),
            hint=f"convert them first, with ImageMagick: mogrify -format jpg {_word(unread[0].parent)}/*{ending}",
        )
    if videos := sorted(path for path in folder.rglob("*") if path.name.lower().endswith(_VIDEOS)):
        return DataError(
            f"There are videos in {folder}, and images are read.",
            given=str(videos[0]),
            expected="a folder of images for each class",
            hint=_frames_of(videos[0]),
        )
    return DataError(
        f"There are no images in {_told(folder)}.",
        given=shorten(sorted(entry.name for entry in below)),
        expected="a folder of images for each class; COCO's or VOC's folder with annotations; shards or tables",
        hint="name the folder that the folders of the classes are in",
    )


def _images_in(folder: Path) -> Iterator[Path]:
    """Yield the images in a folder and below, without what is hidden, as `ImageFolder` reads them."""
    for at, folders, names in os.walk(folder):
        folders[:] = (name for name in folders if name[0] != ".")
        yield from (Path(at, name) for name in names if name.lower().endswith(ENDINGS) and name[0] != ".")


def _has_image(folder: Path) -> bool:
    return any(_images_in(folder))


def unread_images(folder: Path) -> list[Path]:
    """List the images in a folder and below that are of a kind that is not read."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in _UNREAD)


def _told(folder: Path) -> Path:
    return folder if folder.name else folder.resolve()


def _word(path: object) -> str:
    return shlex.quote(str(path))
