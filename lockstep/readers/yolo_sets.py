"""Where the images and labels of a data set in YOLO's format are, and the names of its classes.

A `data.yaml` names both, or Darknet's obj.data.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lockstep.errors import DataError
from lockstep.listing import shorten
from lockstep.readers.paths import DARKNET, MIRRORED, has_images, is_folder, mirrored, yaml_among
from lockstep.records.open_files import content_of
from lockstep.records.shards import data_path
from lockstep.storage.remote_path import AnyPath

SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
"""The sets that a `data.yaml` may name, and how."""
CLASS_FILES = ("classes.txt", "obj.names", "_darknet.labels")
"""Files with a class on each line, as labelImg, Darknet and Roboflow write them."""

_KEYS = ("path", "names", "nc", "kpt_shape", *(name for names in SPLITS.values() for name in names))
_MOST_BYTES = 1 << 20


class YoloSets(NamedTuple):
    """A data set: the names of its classes by number, from 0 on, and its sets of images."""

    names: tuple[str, ...]
    names_in: AnyPath
    """The file that says them."""
    images: Mapping[str, tuple[AnyPath, ...]]
    """The folders of images of each set, and the texts that list some; of a set without a name under ""."""
    num_keypoints: int = 0
    """Keypoints that a line may have after the box."""
    numbers_of_keypoint: int = 0
    """2, x and y; or 3, with the visibility."""


def find_yolo_sets(path: str | AnyPath) -> YoloSets:
    """Find the sets at a path: a `data.yaml`, the folder with one, a folder with images and labels, or one of images.

    Raises:
        DataError: nothing says the names of the classes, or the file that should cannot be used.
    """
    place = data_path(path)
    if not place.is_dir():
        return _sets_of_yaml(place)
    if yaml := yaml_among([*place.iterdir()]):
        return _sets_of_yaml(yaml)
    folder = place / MIRRORED[0] if (place / MIRRORED[0]).is_dir() else place
    images: dict[str, tuple[AnyPath, ...]] = {"": (folder,)}
    if not has_images(folder):
        inside = {entry.name.lower(): entry for entry in folder.iterdir() if entry.is_dir()}
        named = {split: tuple(inside[name] for name in names if name in inside) for split, names in SPLITS.items()}
        images = {split: folders for split, folders in named.items() if folders} or images
    return _named_as(place, folder)._replace(images=images)


def _named_as(place: AnyPath, images: AnyPath) -> YoloSets:
    """Find the file that names the classes: beside the labels, the images, or in one of the folders above."""
    above = place.parent, place.parent.parent, place.parent.parent.parent
    folders = dict.fromkeys([mirrored(images) or images, images, place, *above])
    for folder in folders:
        for name in CLASS_FILES:
            if (file := folder / name).is_file():
                lines = [line.strip() for line in _text_of(file).splitlines() if line.strip()]
                return YoloSets(_checked_names(lines, None, file), file, {})
        if folder.is_dir() and (yaml := yaml_among([*folder.iterdir()])):
            return _sets_of_yaml(yaml)
    raise DataError(
        f"Nothing says what the classes in {place} are: their labels are numbers.",
        given=f"no data.yaml with names and no {CLASS_FILES[0]} in {shorten([str(folder) for folder in folders], 3)}",
        expected="a data.yaml with names, or a text with a class on each line, the first that of the number 0",
        hint=f"write the names of the classes into {place / CLASS_FILES[0]}",
    )


def _sets_of_yaml(file: AnyPath) -> YoloSets:
    found = _parse_darknet(file) if file.name == DARKNET else parse_data_yaml(_text_of(file), file)
    given = found.get("names", ())
    if isinstance(given, dict):
        if [*given] != [str(number) for number in range(len(given))]:
            raise _unusable(file, f"names with the numbers {shorten([*given])}")
        given = [*given.values()]
    if isinstance(given, str):
        raise _unusable(file, f"names: {given:.40}")
    names = _checked_names(given, found.get("nc"), file)
    base, path = file.parent, found.get("path")
    # What is written for another machine, or for the folder of all data sets, is most often the file's own folder.
    root = base / path if isinstance(path, str) and is_folder(base / path) else base
    images = {}
    for split, keys in SPLITS.items():
        places = next((found[key] for key in keys if found.get(key)), ())
        if isinstance(places, dict):
            raise _unusable(file, f"{split} with keys")
        if places:
            images[split] = tuple(
                _place(root, each, file) for each in ([places] if isinstance(places, str) else places)
            )
    return YoloSets(names, file, images, *_shape_of_keypoints(found.get("kpt_shape"), file))


def _parse_darknet(file: AnyPath) -> dict[str, str | list[str] | dict[str, str]]:
    """Read a line for each key of an obj.data, as those of a `data.yaml`."""
    pairs = (line.partition("=") for line in _text_of(file).splitlines())
    given = {key.strip(): value.strip() for key, is_said, value in pairs if is_said and value.strip()}
    if "names" not in given:
        raise _unusable(file, "no names of classes")
    found: dict[str, str | list[str] | dict[str, str]] = {name: value for name, value in given.items() if name in _KEYS}
    lines = _text_of(_place(file.parent, given["names"], file)).splitlines()
    found["names"] = [line.strip() for line in lines if line.strip()]
    return found | ({"nc": given["classes"]} if "classes" in given else {})


def _place(root: AnyPath, path: str, file: AnyPath) -> AnyPath:
    """Find a folder of images, or a text; as exports have it, `../train/images` may mean `train/images`.

    What is written from the folder above on, as Darknet has it, begins with data/.
    """
    tried = [root / path.removeprefix("../"), root / path, root / path.removeprefix("data/")]
    found = next(filter(_is_there, tried), None)
    if found is None:
        raise DataError(
            f"{file} names images that are not there.",
            given=f"{path}: neither {' nor '.join(map(str, dict.fromkeys(tried)))}",
            expected="a folder of images, or a text that lists some, beside this file or below its path",
            hint="correct the path in this file, or take its line out",
        )
    inside = found / MIRRORED[0]
    return inside if found.is_dir() and inside.is_dir() and not has_images(found) else found


def _is_there(place: AnyPath) -> bool:
    try:
        return place.is_dir() or place.is_file()
    except OSError:  # a name that is too long
        return False


def _shape_of_keypoints(shape: object, file: AnyPath) -> tuple[int, int]:
    """Return how many keypoints there are, and how many numbers each has."""
    if not shape:
        return 0, 0
    is_shape = isinstance(shape, list) and len(shape) == 2 and shape[0].isdecimal() and len(shape[0]) < 6
    if not (is_shape and isinstance(shape, list) and shape[1] in ("2", "3")):
        raise _unusable(file, f"kpt_shape: {shape!s:.40}, which is not the number of keypoints and 2 or 3")
    return int(shape[0]), int(shape[1])


def _checked_names(names: Sequence[str], count: object, file: AnyPath) -> tuple[str, ...]:
    if not names:
        raise _unusable(file, "no names of classes")
    if twice := next((name for name, times in Counter(names).items() if times > 1), None):
        raise _unusable(file, f"the name {twice!r} twice")
    if count is not None and count != str(len(names)):
        raise _unusable(file, f"nc: {count}, and {len(names)} names")
    return tuple(names)


def parse_data_yaml(text: str, file: object) -> dict[str, str | list[str] | dict[str, str]]:
    """Read the keys that say where images are, and what classes: a text, a list of texts, or a map of texts for each.

    Raises:
        DataError: it is no YAML, or one of these keys has another value.
    """
    import yaml

    try:
        whole = yaml.load(text, Loader=yaml.BaseLoader)  # makes nothing but texts, lists and maps
    except (yaml.YAMLError, RecursionError) as error:
        raise _unusable(file, " ".join(str(error).split())) from error
    found: dict[str, str | list[str] | dict[str, str]] = {}
    for key in _KEYS:
        value = whole.get(key) if isinstance(whole, dict) else None
        if value in (None, "~", "null"):
            continue
        items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        if odd := [item for item in items if not isinstance(item, str)]:
            raise _unusable(file, f"{key}: {reprlib.repr(odd[0]):.40} is no single value")
        found[key] = value
    return found


def _text_of(file: AnyPath) -> str:
    try:
        if (size := file.stat().st_size) > _MOST_BYTES:
            raise ValueError(f"{size} bytes")
        return content_of(file).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise _unusable(file, str(error)) from error


def _unusable(file: object, given: str) -> DataError:
    return DataError(
        f"{file} does not say what the classes are, and where their images.",
        given=given,
        expected=f"names of classes, each once, as many as nc says if it is there; {', '.join(SPLITS)} with folders",
        hint="write names: [cat, dog], or a line for each below names:, such as 0: cat; train: images/train",
    )
