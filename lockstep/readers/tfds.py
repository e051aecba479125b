"""Reads data sets of TFDS, as it has prepared them, without its library: a class for each image, or objects on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.errors import DataError
from lockstep.images.decode import AS_STORED, Decoding
from lockstep.images.objects import areas_of, select_objects
from lockstep.listing import shorten
from lockstep.ragged import Ragged
from lockstep.readers.fingerprint import tells_options
from lockstep.readers.image_files import check_not_turned
from lockstep.readers.image_records import ImageRecords, ParsedExample, are_edges
from lockstep.readers.label_map import LabelMap
from lockstep.readers.object_table import labels_of_names
from lockstep.readers.reader import Int64s, ReaderWrapper
from lockstep.readers.schemas import truth_of_records
from lockstep.readers.split_folders import FEATURES, NamedSplit, find_split, read_json
from lockstep.records.index_cache import Cache

_IMAGE, _LABEL, _BOX = "Image", "ClassLabel", "BBoxFeature"
_FLAGS = {"is_crowd": "is_crowd", "is_difficult": "difficult"}
"""Fields of objects in TFDS, and what they are called here."""
_FORMAT = "REL_YXYX"
_EDGES = "the top before the bottom and the left before the right, as shares of height and width from 0 to 1"


@tells_options
class TfdsRecords(ReaderWrapper):
    """A split of a data set that TFDS has prepared, as TFRecord files; its library is not needed.

    What its records hold is read from features.json: an image; and either a class (`ClassLabel`) or a sequence of
    objects, each with a box (`BBoxFeature`) and a class. A batch is {"image": a list of `EncodedImage`, "label": int64
    (batch,)}, or has the fields of a `DetectionTable`, in which labels are from 1 on: the number in TFDS + 1.

    Args:
        path: "tfds:mnist/3.0.1/train", or the path of a version's folder with the split after a slash.
        objects: read objects; by default if no image has a class of its own.
        label_map: the label of each class of objects by its name.
        check_boxes: as for `DetectionTable`.
        truth: also give what detections are scored against.
        decoding: how images are decoded when they are asked for; they are not turned if there are boxes.
        cache: the folder where the files' indices are kept; by default in the user's cache.

    Raises:
        DataError: no such data set, split or file; features that are neither; another number of records than it says.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        objects: bool | None = None,
        label_map: LabelMap | None = None,
        check_boxes: bool = True,
        truth: bool = False,
        decoding: Decoding = AS_STORED,
        cache: Cache = None,
    ) -> None:
        split = find_split(path)
        if split is None or split.kind != "tfds":
            raise DataError(
                f"{path} is no data set of TFDS.",
                given=f"a path without {FEATURES}",
                expected="tfds:NAME/VERSION/SPLIT, or the folder of a version",
                hint="check the path, or read its files by `open_source`",
            )
        features = _fields_of(read_json(split.folder / FEATURES))
        image = _only(split, features, _IMAGE)
        _check_pixels(split.folder, image, features[image])
        labels = [name for name, feature in features.items() if _kind(feature) == _LABEL]
        found = _objects(features)
        self.classes: Sequence[str] | Mapping[int, str]
        """The name of each class by its label."""
        if found and (objects or (objects is None and not labels)):
            check_not_turned(decoding)
            names = _class_names(split.folder, f"{found}-label")
            self.classes = dict(enumerate(names, 1)) if label_map is None else label_map.names
            fields = _fields_of(features[found])
            _check_edges(split.folder, fields["bbox"])
            flags = tuple(name for name in _FLAGS if name in fields)
            new_labels = None if label_map is None else tuple(labels_of_names(names, label_map, str(path)).tolist())
            schema: TfdsClasses | TfdsObjects = TfdsObjects(image, found, flags, new_labels, check_boxes, truth)
        else:
            label = _only(split, features, _LABEL)
            self.classes = _class_names(split.folder, label)
            schema = TfdsClasses(image, label)
        records = ImageRecords(split.files, schema, decoding=decoding, cache=cache)
        if len(records) != split.num_examples:
            raise DataError(
                f"The split {split.name!r} in {split.folder} is not whole.",
                given=f"{len(records)} records in {len(split.files)} files",
                expected=f"{split.num_examples}, as its dataset_info.json says",
                hint="copy or prepare it again",
            )
        super().__init__(records)

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the fields of these examples, images not decoded."""
        return self._reader.read_batch(indices)


@dataclass(frozen=True)
class TfdsClasses:
    """Records of TFDS with a class for each image, by the names of its features."""

    image: str
    label: str

    @property
    def features(self) -> frozenset[str]:
        """The names of the features that are read."""
        return frozenset((self.image, self.label))

    def fields(self, examples: Sequence[ParsedExample]) -> dict[str, Any]:
        """Return the fields of a batch of records."""
        labels = [example.integer(self.label) for example in examples]
        return {
            "image": [example.image(self.image) for example in examples],
            "label": torch.tensor(labels, dtype=torch.int64),
        }


@dataclass(frozen=True)
class TfdsObjects:
    """Records of TFDS with objects on each image, by the names of its features."""

    image: str
    objects: str
    flags: tuple[str, ...] = ()
    """The ones of `is_crowd` and `is_difficult` that objects have."""
    labels: tuple[int, ...] | None = None
    """The label of each class by its number; None: the number + 1."""
    check_boxes: bool = True
    """Refuse the boxes that `are_edges` refuses, clip the others, and leave out those without area."""
    truth: bool = False
    """Also give what detections are scored against."""

    @property
    def features(self) -> frozenset[str]:
        """The names of the features that are read."""
        return frozenset((self.image, *(f"{self.objects}/{name}" for name in ("bbox", "label", *self.flags))))

    def fields(self, examples: Sequence[ParsedExample]) -> dict[str, Any]:
        """Return the fields of a batch of records."""
        images = [example.image(self.image) for example in examples]
        stored = Ragged.of([self._boxes(example) for example in examples])
        counts = stored.lengths.tolist()
        labels = [self._labels(*each) for each in zip(examples, counts, strict=True)]
        sizes = torch.tensor([image.size[::-1] for image in images]).view(-1, 2)
        sides = (stored.values[:, 2:] - stored.values[:, :2]) * sizes.float()[stored.owner]
        fields: dict[str, Any] = {
            "image": images,
            "boxes": stored,
            "labels": stored.replaced(torch.cat(labels)),
            "area": stored.replaced(sides.prod(1)),
        }
        for name in self.flags:
            values = [self._numbers(*each, name) for each in zip(examples, counts, strict=True)]
            fields[_FLAGS[name]] = stored.replaced(torch.cat(values) != 0)
        truth: dict[str, Any] = {}
        if self.truth:
            none = stored.replaced(torch.zeros(len(stored.values), dtype=torch.bool))
            truth = truth_of_records(dict.fromkeys(("is_crowd", "difficult", "group_of"), none) | fields, stored, sizes)
        if self.check_boxes:
            fields["boxes"] = stored.replaced(stored.values.clamp(0, 1))
            fields = select_objects(fields, areas_of(fields["boxes"].values) > 0)
        return fields | truth

    def _boxes(self, example: ParsedExample) -> torch.Tensor:
        name = f"{self.objects}/bbox"
        values = example.float32s(name)
        if len(values) % 4:
            raise example.unusable(name, "four values of float32 for each object")
        boxes = values.reshape(-1, 4)
        if self.check_boxes and not (usable := are_edges(boxes).all(1)).all():
            wrong = boxes[int(usable.argmin())]
            raise example.unusable(name, _EDGES, given="the box " + ", ".join(f"{share:g}" for share in wrong))
        return torch.from_numpy(boxes.copy())

    def _labels(self, example: ParsedExample, count: int) -> torch.Tensor:
        numbers = self._numbers(example, count, "label")
        if self.labels is None:
            return numbers + 1
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(self.labels):
            raise example.unusable(f"{self.objects}/label", f"numbers of {len(self.labels)} classes")
        return torch.tensor(self.labels)[numbers]

    def _numbers(self, example: ParsedExample, count: int, name: str) -> torch.Tensor:
        values = example.int64s(f"{self.objects}/{name}", count)
        if len(values) != count:
            raise example.unusable(f"{self.objects}/{name}", f"{count} values of int64, one for each box")
        return torch.from_numpy(np.array(values))


def _fields_of(feature: Any) -> dict[str, Any]:
    """Return the features within a dict, or within a sequence of dicts."""
    for step in ("sequence", "feature"):
        feature = feature.get(step, feature) if isinstance(feature, dict) else {}
    inside = feature.get("featuresDict") if isinstance(feature, dict) else None
    fields = inside.get("features") if isinstance(inside, dict) else None
    return fields if isinstance(fields, dict) else {}


def _kind(feature: Any) -> str:
    return str(feature.get("pythonClassName", "")).rpartition(".")[2] if isinstance(feature, dict) else ""


def _objects(features: Mapping[str, Any]) -> str | None:
    """Return the name of the sequence of objects: those with a box and a label."""
    for name, feature in features.items():
        fields = _fields_of(feature)
        if _kind(feature) == "Sequence" and _kind(fields.get("bbox")) == _BOX and _kind(fields.get("label")) == _LABEL:
            return name
    return None


def _check_pixels(folder: Path, name: str, feature: Any) -> None:
    """Refuse images that are not of whole numbers: the bits of a float are stored as four colours."""
    inside = feature.get("image")
    dtype = inside.get("dtype", "uint8") if isinstance(inside, dict) else "uint8"
    if dtype not in ("uint8", "uint16"):
        raise DataError(
            f"The images in {folder} are not stored in a way that is read.",
            given=f"the feature {name!r} of {dtype}",
            expected="images of uint8 or uint16",
            hint="prepare the data set with such images",
        )


def _check_edges(folder: Path, feature: Any) -> None:
    """Refuse boxes that are not stored as their edges in shares; older data sets do not say, and have these."""
    inside = feature.get("boundingBox")
    form = inside.get("bboxFormat", _FORMAT) if isinstance(inside, dict) else _FORMAT
    if form != _FORMAT:
        raise DataError(
            f"The boxes in {folder} are not stored in a way that is read.",
            given=f"bboxFormat {form}",
            expected=f"{_FORMAT}: top, left, bottom and right as shares",
            hint="prepare the data set with such boxes",
        )


def _only(split: NamedSplit, features: Mapping[str, Any], kind: str) -> str:
    """Return the name of the feature of a kind; "image" or "label" where there are several."""
    names = [name for name, feature in features.items() if _kind(feature) == kind]
    usual = [name for name in names if name in ("image", "label")]
    names = usual or names
    if len(names) == 1:
        return names[0]
    there = [f"{name} ({_kind(feature)})" for name, feature in features.items()]
    raise DataError(
        f"The data set in {split.folder} is not one of images with a class each, nor with objects on them.",
        given=f"the features {shorten(there, 10) or '(none)'}",
        expected=f"one {kind}" + (", or a sequence of objects with bbox and label" if kind == _LABEL else ""),
        hint="read its files by `ImageRecords` with a schema of your own",
    )


def _class_names(folder: Path, feature: str) -> tuple[str, ...]:
    """Read the names of classes that TFDS keeps beside the data; none where it has numbers alone."""
    try:
        return tuple((folder / f"{feature}.labels.txt").read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return ()
