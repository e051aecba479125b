"""Reads data sets in YOLO's format: for each image a text with a line for each object."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.checks import check_value
from lockstep.errors import DataError
from lockstep.images.decode import AS_STORED, Decoding
from lockstep.images.masks import packed_outline
from lockstep.listing import shorten
from lockstep.readers.boxed_images import MOST_PIXELS, BoxedImage, BoxedImages, BoxedObject
from lockstep.readers.fingerprint import tells_options
from lockstep.readers.image_files import upright_sizes
from lockstep.readers.image_folder import images_below
from lockstep.readers.label_map import Label, LabelMap
from lockstep.readers.object_table import check_label_map
from lockstep.readers.paths import is_folder, mirrored
from lockstep.readers.yolo_sets import YoloSets, find_yolo_sets
from lockstep.records.index_cache import Cache
from lockstep.records.open_files import content_of, fetched
from lockstep.storage.remote_path import AnyPath

_TOLERANCE = 0.01
"""How far numbers may be outside of 0 to 1, as rounded ones are."""
_NO_LABELS = frozenset(
    ("classes", "notes", "readme", "readme.roboflow", "readme.dataset", "train", "val", "valid", "test")
)
"""Texts that tools put beside labels, without their ending."""
_BOX, _LEAST_OF_POLYGON = 4, 6  # numbers of a line after the class
_WITH_VISIBILITY = 3  # numbers of a keypoint


@tells_options
class Yolo(BoxedImages):
    """The images of a set by their paths, and the objects on them.

    A line of an image's text is the number of a class, from 0 on, and as shares of the image's width and height x and y
    of a box's centre, its width and height; or x and y of three corners of a polygon or more, around which the box is.
    With `kpt_shape` in `data.yaml`, x and y of each keypoint follow behind a box, and its visibility (0, 1 or 2) where
    the shape says 3; without it, a keypoint is visible unless a number is negative. An image without a text has no
    objects.
    The text of `images/train/1.jpg` is `labels/train/1.txt`, or without such a folder it is beside the image.

    A batch has an entry for each image, of n objects: "image", "source_id", "boxes", "labels" and "class_text", with
    `truth` "truth_boxes", "truth_labels" and "truth_difficult": all as those of `Voc`, with no object difficult. The
    label of a class is its number + 1. With `masks` and `keypoints` it has "masks", "keypoints" and
    "keypoint_visibility", and "truth_masks" and "truth_keypoints", as those of `Coco`; the mask of a box is empty.

    Boxes are clipped to their image, and those without area left out, as the log tells. The header of each image is
    read as the data is opened: its size is written nowhere else.

    Args:
        path: a `data.yaml`, the folder with one, one with the folders images and labels, or a folder of images. Without
            a `data.yaml` there, the names of the classes are in one above, or in a classes.txt.
        split: a set of `data.yaml`: "train", "val" or "test"; None for all images.
        label_map, decoding, truth, cache: as of `Voc`.
        masks: read the polygons of objects as their masks.
    """

    def __init__(
        self,
        path: str | AnyPath,
        split: str | None = None,
        *,
        label_map: LabelMap | None = None,
        decoding: Decoding = AS_STORED,
        truth: bool = False,
        cache: Cache = None,
        masks: bool = False,
        keypoints: bool = False,
    ) -> None:
        check_label_map(label_map)
        check_value("masks", masks, bool)
        check_value("keypoints", keypoints, bool)
        sets = find_yolo_sets(path)
        if keypoints and not sets.num_keypoints:
            raise _without(
                path, "keypoints", f"no kpt_shape in {sets.names_in}", "kpt_shape: [17, 3] for 17 of each object"
            )
        files = _files_of(sets, split, path)
        folder, names = _common_folder([file.image for file in files])
        sizes = upright_sizes(folder, names, decoding, cache)
        texts = [file.text for file in files if file.text is not None]
        contents = dict(zip(texts, fetched(texts), strict=True))
        images = []
        for file, name, (height, width) in zip(files, names, sizes.tolist(), strict=True):
            text = None if file.text is None else contents[file.text]
            read = () if file.text is None else _objects(file.text, text, sets, height, width, masks, keypoints)
            images.append(BoxedImage(name, height, width, tuple(read)))
        found = [each for image in images for each in image.objects]
        if masks and found and not any(each.outline for each in found):
            raise _without(path, "masks", "boxes alone", "the corners of a polygon in place of a box")
        label_map = label_map or LabelMap(tuple(Label(label, name) for label, name in enumerate(sets.names, 1)))
        asked: dict[str, Any] = {"truth": truth, "masks": masks, "num_keypoints": keypoints * sets.num_keypoints}
        super().__init__(folder, images, label_map, source=str(path), decoding=decoding, cache=cache, **asked)


class _File(NamedTuple):
    image: AnyPath
    text: AnyPath | None
    """None where it has no objects."""


def _files_of(sets: YoloSets, split: str | None, path: str | AnyPath) -> list[_File]:
    """List the images of a set, or of all sets, with their texts; images that are not there are refused by name."""
    if split is not None and split not in sets.images:
        raise DataError(
            f"{path} has no set {split!r}.",
            given=f"{', '.join(sets.images) or 'no sets'} in {sets.names_in}",
            expected="the set that is asked for",
            hint='name it in data.yaml, or hold a share out: --set data.validation="10 %"',
        )
    wanted = sets.images.values() if split is None else [sets.images[split]]
    places = [*dict.fromkeys(place for places in wanted for place in places)]
    images = {str(image): image for place in places for image in _images_at(place)}
    listed = {str(place) for place in places if place.is_dir()}
    texts: dict[str, dict[str, AnyPath]] = {}
    files = []
    for image in (images[name] for name in sorted(images)):
        folder = str(image.parent)
        if folder not in texts:
            texts[folder] = _texts_in(mirrored(image.parent) or image.parent)
        files.append(_File(image, texts[folder].get(image.stem)))
    if not any(file.text for file in files):
        there = f"{len(files)} images, and no text that is named like one of them" if files else "no images"
        raise DataError(
            f"There are no images with labels in {shorten([str(place) for place in places], 2)}.",
            given=there,
            expected="images, and a text for each with objects: labels/1.txt for images/1.jpg, or 1.txt beside 1.jpg",
            hint="copy the labels there; without objects there is nothing to learn or to score",
        )
    named = {(str(file.image.parent), file.image.stem) for file in files}
    lost = [
        str(text)
        for folder, found in texts.items()
        if any(folder == place or folder.startswith(f"{place}/") for place in listed)
        for stem, text in found.items()
        if (folder, stem) not in named and stem.lower() not in _NO_LABELS
    ]
    if lost:
        raise DataError(
            "There are labels of images that are not there.",
            given=shorten(lost, 3),
            expected="an image of the same name for each text",
            hint="copy the images there, or take these texts away",
        )
    return files


def _images_at(place: AnyPath) -> list[AnyPath]:
    """List the images in a folder and below, or in a text, whose paths are those from its folder on."""
    try:
        if place.is_dir():
            return [place / name for name in images_below(place).names]
        lines = [line.strip() for line in content_of(place).decode().splitlines() if line.strip()]
        # Darknet's are from the folder above on.
        is_below = not lines or is_folder((place.parent / os.path.normpath(lines[0])).parent)
        above = "" if is_below else "data/"
        return [place.parent / os.path.normpath(line.removeprefix(above)) for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{place} is no list of images.",
            given=str(error),
            expected="a folder of images, or a text with a path on each line",
            hint="correct it, or the data.yaml that names it",
        ) from error


def _texts_in(folder: AnyPath) -> dict[str, AnyPath]:
    """Return the texts of labels in a folder by their names, without the ending; none where it is not there."""
    if not is_folder(folder):
        return {}
    return {entry.stem: entry for entry in folder.iterdir() if entry.suffix == ".txt" and entry.name[0] != "."}


def _common_folder(paths: Sequence[AnyPath]) -> tuple[AnyPath, list[str]]:
    """Return the folder that all images are in or below, and their paths within it."""
    parents = {path.parent for path in paths}
    folder = paths[0].parent
    while not all(str(parent) == str(folder) or f"{parent}/".startswith(_prefix(folder)) for parent in parents):
        folder = folder.parent
    return folder, [str(path).removeprefix(_prefix(folder)) for path in paths]


def _prefix(folder: AnyPath) -> str:
    return "" if str(folder) == "." else f"{str(folder).rstrip('/')}/"


def _objects(
    path: AnyPath, data: bytes | None, sets: YoloSets, height: int, width: int, masks: bool, keypoints: bool
) -> Iterator[BoxedObject]:
    """Read the lines of a text, with boxes in pixels of an image of this size."""
    try:
        lines = (content_of(path) if data is None else data).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, str(error), sets) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            label, *numbers = [float(word) for word in line.split()]
            name = sets.names[int(label)] if label.is_integer() and 0 <= label < len(sets.names) else None
            is_box = len(numbers) in (_BOX, _BOX + sets.num_keypoints * sets.numbers_of_keypoint)
            edges = _edges(numbers, is_box)
            outline = _outline(numbers, height, width) if masks and not is_box else b""
            points = _keypoints(numbers[_BOX:] if is_box else [], sets, height, width) if keypoints else b""
        except ValueError:
            raise _unusable(path, f"line {number}: {line.strip():.60}", sets) from None
        if name is None:
            raise DataError(
                f"{path} has a class beyond the names.",
                given=f"line {number}: the class {label:g}; {len(sets.names)} names in {sets.names_in}",
                expected=f"0 to {len(sets.names) - 1}: {shorten(sets.names)}",
                hint="add the name of the class, or correct the number",
            )
        box = tuple(edge * side for edge, side in zip(edges, (height, width) * 2, strict=True))
        yield BoxedObject(name, box, outline=outline, keypoints=points)


def _edges(numbers: Sequence[float], is_box: bool) -> tuple[float, ...]:
    """Return top, left, bottom and right of a box or a polygon, as shares; a ValueError says that it is neither."""
    shares = numbers[:_BOX] if is_box else numbers
    if not all(math.isfinite(each) and -_TOLERANCE <= each <= 1 + _TOLERANCE for each in shares):
        raise ValueError
    if is_box:
        x, y, width, height = shares
        return y - height / 2, x - width / 2, y + height / 2, x + width / 2
    if len(shares) < _LEAST_OF_POLYGON or len(shares) % 2:
        raise ValueError
    return min(shares[1::2]), min(shares[::2]), max(shares[1::2]), max(shares[::2])


def _outline(shares: Sequence[float], height: int, width: int) -> bytes:
    sides = itertools.cycle((width, height))
    return packed_outline([[share * side for share, side in zip(shares, sides, strict=False)]]).tobytes()


def _keypoints(numbers: Sequence[float], sets: YoloSets, height: int, width: int) -> bytes:
    """Pack x, y and visibility of each keypoint; a ValueError says that a number is none of these."""
    if not numbers:
        return bytes(3 * 8 * sets.num_keypoints)
    points = np.array(numbers).reshape(-1, sets.numbers_of_keypoint)
    x, y = points.T[:2]
    visibility = points[:, 2] if sets.numbers_of_keypoint == _WITH_VISIBILITY else np.where((x < 0) | (y < 0), 0.0, 2.0)
    # Of what is not there COCO has zeros, whatever the line says.
    found = np.where(visibility[:, None] > 0, np.stack([x * width, y * height, visibility], axis=1), 0.0)
    if not (np.isin(visibility, (0, 1, 2)).all() and (np.abs(found) < MOST_PIXELS).all()):
        raise ValueError
    return found.tobytes()


def _without(path: str | AnyPath, asked: str, given: str, expected: str) -> DataError:
    return DataError(
        f"{path} has no {asked} of objects.",
        given=given,
        expected=expected,
        hint=f"export it with {asked}, or leave them out",
    )


def _unusable(path: AnyPath, given: str, sets: YoloSets) -> DataError:
    keypoints = (
        f", and {sets.numbers_of_keypoint} numbers of each of {sets.num_keypoints} keypoints"
        if sets.num_keypoints
        else ""
    )
    return DataError(
        f"{path} cannot be used as labels in YOLO's format.",
        given=given,
        expected=f"a class, and x, y, width and height of a box{keypoints}; or x and y of three corners or more: all "
        "from 0 to 1, as shares of the image's width and height",
        hint="export the labels again, or repair this line",
    )
