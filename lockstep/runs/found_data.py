"""What somebody's own data is, looked at before a recipe is made of it: its classes, its sizes, what is broken."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from lockstep.errors import DataError
from lockstep.images.objects import as_ragged
from lockstep.listing import shorten
from lockstep.readers.image_folder import ImageFolder
from lockstep.readers.image_records import ImageRecords
from lockstep.readers.image_tables import DetectionTable
from lockstep.readers.label_map import UNKNOWN_LABEL, LabelMap, ZeroBasedError, read_label_map
from lockstep.readers.label_tables import label_table_among
from lockstep.readers.open import open_detection, open_source
from lockstep.readers.paths import class_folders, entries_of
from lockstep.readers.reader import Reader
from lockstep.readers.schemas import DetectionSchema
from lockstep.records.text_format import quoted
from lockstep.runs.data_sets import DataSets, unread_images

SECONDS_TO_LOOK = 10.0
"""How long images are looked at; of more than fit into it those that were seen stand for the others."""
_AT_ONCE = 16
_LABEL_MAP, _MOST_NAMED = "label_map.pbtxt", 1000


@dataclass(frozen=True)
class Found:
    """What was seen of some data; images are those of the set to train on."""

    sets: DataSets
    kind: str
    """What the data is, in words."""
    has_objects: bool
    """Whether images have objects on them; else each has one class."""
    num_images: int
    classes: tuple[str, ...]
    """The names of classes by label: of objects from label 1 on; numbers where they have no names."""
    counts: Mapping[str, int]
    """How many images, or objects, there are of each class among those that were looked at, or of all."""
    num_looked: int
    sizes: Any
    """Width and height of the images that were looked at, (images, 2)."""
    broken: tuple[str, ...] = ()
    """Images that cannot be read, each with the reason."""
    unread: tuple[str, ...] = ()
    """Files of a kind that is not read."""
    empty: tuple[str, ...] = ()
    """Folders without an image, which are no classes."""
    labels_offset: int = 0
    """What the recipe subtracts from labels: -1 where the classes of objects count from 0."""
    box_sides: Any = field(default_factory=lambda: np.zeros((0, 2)))
    """Height and width of the objects, as shares of those of their images, (objects, 2)."""

    @property
    def is_whole(self) -> bool:
        """Whether all images were looked at."""
        return self.num_looked + len(self.broken) >= self.num_images


def look_at(sets: DataSets, seconds: float = SECONDS_TO_LOOK) -> Found:
    """Open the data to train on, and decode its images, evenly spread, for so long at most.

    Raises:
        DataError: the data cannot be opened, none of its images can be read, or there is one class.
    """
    sets, reader, is_zero_based = _opened(sets)
    seen = _Seen.of(reader, seconds)
    _check_boxes(sets, reader, seen)
    if not seen.sizes:
        raise DataError(
            f"None of the images at {sets.train} can be read.",
            given=seen.broken[0] if seen.broken else "no images",
            expected="images that can be decoded, with a class each or with objects on them",
            hint="check that the files are images and were copied whole",
        )
    named = getattr(reader, "classes", ())
    names = dict(enumerate(named)) if not isinstance(named, Mapping) else dict(named)
    names |= read_label_map(sets.label_map).names if sets.label_map else {}
    # Label 0 is that of the background: of objects, and of records whose labels begin at 1.
    least = min((label for label in seen.labels if label >= 0), default=1)
    first = min(1, least) if seen.has_objects else int(not names and least == 1)
    last = max([*names, *seen.labels], default=first)
    classes = tuple(names.get(label) or str(label) for label in range(first, last + 1))
    counts = getattr(reader, "counts", None) or {classes[k - first]: seen.labels[k] for k in range(first, last + 1)}
    if len(classes) < 2 and not seen.has_objects:
        raise DataError(
            f"The images at {sets.train} are all of one class.",
            given=f"the class {shorten(classes)}",
            expected="two classes or more",
            hint="add images that show something else, with a class of their own",
        )
    place = Path(sets.train)
    return Found(
        sets,
        _kind(reader, sets.train, seen.has_objects),
        seen.has_objects,
        len(reader),
        classes,
        counts,
        len(seen.sizes),
        np.array(seen.sizes),
        tuple(seen.broken),
        tuple(str(path.relative_to(place)) for path in unread_images(place)) if place.is_dir() else (),
        tuple(name for name in class_folders(place) if name not in sets.labels) if sets.labels else (),
        first - int(seen.has_objects) - int(is_zero_based),
        np.concatenate(seen.sides) if seen.sides else np.zeros((0, 2)),
    )


def _opened(sets: DataSets) -> tuple[DataSets, Reader, bool]:
    """Open the data to train on, by the label map beside records; say whether what it has of objects counts from 0."""
    detection = partial(open_detection, sets.train, split=sets.train_split or "train", classes_of=sets.train)
    if sets.lists:
        return sets, detection(), False
    try:
        reader = open_source(sets.train, labels=sets.labels, classes_of=sets.train)
    except ZeroBasedError:
        return sets, detection(zero_based=True), True
    if not (isinstance(reader, ImageRecords) and isinstance(reader.schema, DetectionSchema)):
        return sets, reader, False
    if found := _label_map_beside(sets.train):
        return sets._replace(label_map=str(found)), detection(label_map=read_label_map(found)), False
    return sets, reader, False


def _folder_of_shards(path: str) -> Path:
    return place if (place := Path(path)).is_dir() else place.parent


def _label_map_beside(path: str) -> Path | None:
    """Return the label map beside shards: the one of the usual name, or the only one."""
    found = sorted(_folder_of_shards(path).glob("*.pbtxt"))
    usual = [each for each in found if each.name == _LABEL_MAP]
    return next(iter(usual), found[0] if len(found) == 1 else None)


def _check_boxes(sets: DataSets, reader: Reader, seen: _Seen) -> None:
    """Refuse what would be left out image by image, though all of it is written in another way than is read."""
    if isinstance(reader, ImageRecords) and (UNKNOWN_LABEL in seen.labels or not seen.sizes):
        _refuse_names_without_numbers(sets)
    if isinstance(reader, DetectionTable) and 4 * len(seen.broken) > len(seen.broken) + len(seen.sizes):
        raise DataError(
            f"Many rows of {sets.train} cannot be used.",
            given=f"{len(seen.broken)} of {len(seen.broken) + len(seen.sizes)}: {seen.broken[0]}",
            expected="boxes as x, y, width and height in pixels of the image, which can be decoded",
            hint="where boxes are left, top, right and bottom, write right - left and bottom - top in place of these",
        )
    if len(seen.sides) and 0 < seen.largest_px <= 1:
        raise DataError(
            f"The objects at {sets.train} are of one pixel at most.",
            given=f"boxes of {seen.largest_px:.2g} pixels at most",
            expected="boxes in pixels, or in records as shares of the image",
            hint="multiply boxes that are shares by the width and height of their image, and write the data again",
        )


def _refuse_names_without_numbers(sets: DataSets) -> None:
    """Refuse records whose objects have names of classes alone that no label map has, with one that has them all."""
    reader = open_detection(sets.train, split="train", label_map=LabelMap(()))
    names = set[str]()
    for index in range(min(len(reader), _MOST_NAMED)):
        with suppress(DataError):
            (texts,) = reader.read_batch(np.array([index]))["class_text"]
            names |= {*texts} - {""}
    lacking = sorted(names - {*(read_label_map(sets.label_map).ids if sets.label_map else ())})
    if lacking:
        file = Path(sets.label_map or _folder_of_shards(sets.train) / _LABEL_MAP)
        items = [
            f"item {{ id: {label.id} name: {quoted(label.name)} }}" for label in LabelMap.alphabetical(names).labels
        ]
        words = shlex.quote(" ".join(items))
        raise DataError(
            f"Objects at {sets.train} have names of classes, and no numbers.",
            given=f"{shorten(lacking)} in image/object/class/text, "
            + (f"and none of these in {sets.label_map}" if sets.label_map else "and no label map"),
            expected=f"a label map beside the records that has all of them, {file}",
            hint=f"printf '%s\\n' {words} > {shlex.quote(str(file))}; then give the same command again",
        )


def _kind(reader: Reader, path: str, has_objects: bool) -> str:
    words = {
        "ImageFolder": "a folder of images for each class",
        "Voc": "images with annotations of PASCAL VOC",
        "Coco": "images with annotations of COCO",
        "Yolo": "images with annotations of YOLO",
        "BoxTable": "images with annotations in a table",
        "TarShards": "tar shards",
        "ImageRecords": "TFRecord files",
        "ImageTable": "a table of images",
        "DetectionTable": "a table of images",
        "TfdsRecords": "a data set of TFDS",
    }
    kind = words.get(type(reader).__name__, "images")
    if isinstance(reader, ImageFolder) and label_table_among(entries_of(Path(path))):
        kind = "a folder of images with a table of their classes"
    return f"{kind}, with objects on them" if has_objects and "annotations" not in kind else kind


class _Seen:
    """What was read of images so far."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []
        self.labels: Counter[int] = Counter()
        self.sides: list[Any] = []
        self.broken: list[str] = []
        self.has_objects = False
        self.largest_px = 0.0
        """The longest side of a box."""

    @classmethod
    def of(cls, reader: Reader, seconds: float) -> Self:
        """Read and decode images, evenly spread, for so long at most."""
        began, seen = time.monotonic(), cls()
        order = np.argsort(np.arange(len(reader)) * 0.6180339887 % 1, kind="stable")
        for first in range(0, len(order), _AT_ONCE):
            seen.take(reader, order[first : first + _AT_ONCE])
            if time.monotonic() - began > seconds:
                break
        return seen

    def take(self, reader: Reader, indices: Any) -> None:
        """Read and decode some images; those together, of which one cannot be read, one by one."""
        try:
            fields = reader.read_batch(indices)
            images = [image.decode() for image in fields["image"]]
        except (DataError, KeyError) as error:
            if len(indices) > 1:
                for index in indices:
                    self.take(reader, np.array([index]))
            elif isinstance(error, DataError):
                self.broken.append(f"{reader.example_id(int(indices[0]))}: {error.given}")
            else:
                raise _no_images(fields) from None
            return
        self.sizes += [(int(image.shape[2]), int(image.shape[1])) for image in images]
        if "label" in fields:
            self.labels.update(fields["label"].tolist())
        elif "boxes" in fields:
            self.has_objects = True
            boxes = as_ragged(fields["boxes"])
            self.sides.append((boxes.values[:, 2:] - boxes.values[:, :2]).numpy())
            shapes = np.array([image.shape[1:] for image in images])[boxes.owner.numpy()]
            self.largest_px = max(self.largest_px, float((self.sides[-1] * shapes).max(initial=0.0)))
            self.labels.update(as_ragged(fields["labels"]).values.tolist())
        else:
            raise _no_images(fields)


def _no_images(fields: Mapping[str, Any]) -> DataError:
    return DataError(
        "This data has neither classes of images nor objects on them.",
        given=f"the fields {', '.join(fields)}",
        expected="images with a class each, or with boxes and labels: in records image/class/label or image/object/; "
        "in tables a column label, or a column objects of bbox and category",
        hint="name the columns so; for other data write a recipe with a reader of your own",
    )
