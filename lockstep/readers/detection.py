"""Images with objects on them from any reader, as a detector is trained on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.checks import NonNegativeInt, PositiveInt, check_value
from lockstep.errors import DataError
from lockstep.images.decode import EncodedImage
from lockstep.images.objects import areas_of, as_ragged, select_objects
from lockstep.listing import shorten
from lockstep.ragged import Ragged
from lockstep.readers.classification import LabelsOffset
from lockstep.readers.fingerprint import tells_options
from lockstep.readers.image_records import are_edges
from lockstep.readers.label_map import UNKNOWN_LABEL
from lockstep.readers.object_table import KnownObjects
from lockstep.readers.reader import Int64s, Reader, ReaderWrapper

BadObjects = Literal["raise", "drop"]

LEFT_OUT = "objects_left_out"
"""The field that counts them."""


class _Kind(NamedTuple):
    """What a field has for each object."""

    dtype: torch.dtype
    shape: tuple[int | str, ...] = ()
    """A word stands for any number, the same for all objects."""

    def has(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.shape) and all(
            isinstance(wanted, str) or wanted == there for wanted, there in zip(self.shape, shape, strict=True)
        )

    def __str__(self) -> str:
        return f"{self.dtype} of shape ({', '.join(map(str, ('objects', *self.shape)))})"


_COLUMNS: Mapping[str, _Kind] = {
    "boxes": _Kind(torch.float32, (4,)),
    "labels": _Kind(torch.int64),
    "weights": _Kind(torch.float32),
    "area": _Kind(torch.float32),
    "is_crowd": _Kind(torch.bool),
    "difficult": _Kind(torch.bool),
    "group_of": _Kind(torch.bool),
    "truncated": _Kind(torch.bool),
    "keypoints": _Kind(torch.float32, ("keypoints", 2)),
    "keypoint_visibility": _Kind(torch.int64, ("keypoints",)),
    "multiclass_scores": _Kind(torch.float32, ("classes",)),
}
_EXPECTED = {
    "boxes": "top, left, bottom and right as shares from 0 to 1, the top before the bottom, the left before the right",
    "labels": "{first} to {last}: the classes of the detector, as the data numbers them",
    "weights": "a finite number of 0 or more",
}
_IMAGE, _SIZE, _MASKS, _KEYPOINTS, _VISIBILITY = "image", "original_size", "masks", "keypoints", "keypoint_visibility"
_TEXTS, _VISIBLE = "class_text", 2
_TRUTH, _VERIFIED, _FLAGS = "truth_", "truth_verified_labels", ("is_crowd", "difficult", "group_of")


@tells_options
class DetectionReader(ReaderWrapper):
    """A reader's images and their objects, with labels and boxes that are checked to be those of a detector.

    A batch has an entry for each image, of n objects; images without objects are kept:

    - "image" as the reader gives it; "source_id", or the name of the example where the reader gives none
    - "original_size": int64 (batch, 2), height and width of each image as it is stored
    - "boxes": `Ragged` float32 (n, 4) of top, left, bottom and right in [0, 1], each with an area
    - "labels": `Ragged` int64 (n,), from 1 to `num_classes`; 0 is the background
    - "weights", "area", "is_crowd", "difficult", "group_of", "truncated", "masks", "keypoints", "keypoint_visibility",
      "multiclass_scores": those that the reader gives. A keypoint that is NaN or outside its image has visibility 0
    - what detections are scored against, if the reader gives it: "truth_boxes", `Ragged` float64 (m, 4) of x, y, width
      and height in pixels, "truth_labels", "truth_area", "truth_is_crowd", "truth_difficult" and "truth_group_of", of
      which what the reader does not say is the area of the box, or False. Crowds, difficult objects, those without an
      area and those that are too many are among them. "truth_verified_labels": `Ragged` int64, see `DetectionSchema`
    - "objects_left_out": int64 (batch,), how many objects of each image had no area, were bad, or too many. Those that
      `Coco` and `Voc` leave out are known when the data is opened, and told by the log instead

    One policy for what cannot be used: a box that reaches out of its image by up to a tenth is clipped, and an object
    without an area there is left out. A box that is no number, upside down or farther outside, as one in pixels is, a
    weight that is no number of 0 or more, and a label that is none of the classes, are as `bad_objects` says. Fields
    that do not fit each other - another number of values than boxes, masks of another size than the image, another
    number of keypoints - are errors in any case. Errors name the example, the object and the field.

    `Coco` and `Voc` check all annotations as they are opened: ids, names, numbers, sizes. They clip each box to its
    image, however far it reaches out, and leave out what has no area then, as a box upside down. Records are checked as
    they are read, and so is what is drawn later: the outlines of masks, and their files.

    Args:
        reader: with the fields "image", "boxes" and "labels".
        num_classes: of the detector, without the background.
        offset: subtracted from each label of the reader.
        classes: the name of each class by its label in the reader; by default `reader.classes`, if it has them. If
            these labels, less the offset, go beyond `num_classes`, they are numbered from 1 on in their order: 1 to 80
            for COCO's, which go up to 90.
        crowd: keep objects that are crowds.
        difficult: keep objects that are marked as difficult.
        max_number_of_boxes: of an image; the first ones are kept.
        num_keypoints: of each object, if the reader gives keypoints; 0: any number.
        bad_objects: "raise", or "drop" to leave them out.
        label_map_path: of the file that `classes` are from, for errors.
    """

    def __init__(
        self,
        reader: Reader,
        num_classes: int,
        *,
        offset: int = 0,
        classes: Mapping[int, str] | None = None,
        crowd: bool = True,
        difficult: bool = True,
        max_number_of_boxes: int | None = None,
        num_keypoints: int = 0,
        bad_objects: BadObjects = "raise",
        label_map_path: str | None = None,
    ) -> None:
        check_value("num_classes", num_classes, PositiveInt)
        check_value("max_number_of_boxes", max_number_of_boxes, PositiveInt | None)
        check_value("num_keypoints", num_keypoints, NonNegativeInt)
        check_value("bad_objects", bad_objects, BadObjects)
        check_value("offset", offset, LabelsOffset)
        super().__init__(reader)
        known = getattr(reader, "classes", None) if classes is None else classes
        named = {label - offset: name for label, name in known.items()} if isinstance(known, Mapping) else {}
        self._numbers = torch.tensor(_labels_in_order(named, num_classes))
        self.classes = {
            label: named[given] for label, given in enumerate(self._numbers.tolist(), 1) if named.get(given)
        }
        """The name of each class by its label, if it has one."""
        self._offset = offset
        given = [number + offset for number in self._numbers.tolist()]
        of_source = getattr(reader, "category_ids", {})
        self.category_ids = {label: of_source.get(number, number) for label, number in enumerate(given, 1)}
        """What the data calls each class, by its label: of COCO's annotations the id of the category."""
        self._unwanted = [name for name, keep in (("is_crowd", crowd), ("difficult", difficult)) if not keep]
        self._most = max_number_of_boxes
        self._num_keypoints = num_keypoints
        self._raises = bad_objects == "raise"
        self._label_map_path = label_map_path

    def known_objects(self) -> KnownObjects | None:
        """Return what the reader knows of all images without reading one, with its labels numbered; None: nothing."""
        if not hasattr(self._reader, "known_objects"):
            return None
        known: KnownObjects = self._reader.known_objects()
        labels, are_classes = self._numbers_of(torch.from_numpy(known.labels))
        counts = known.counts if self._most is None else known.counts.clip(max=self._most)
        return KnownObjects(known.sizes, counts, labels[are_classes].numpy())

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the fields of these examples; an error names one whose objects cannot be used."""
        fields = self._reader.read_batch(indices)
        batch = self._fitting(fields, indices)
        batch["labels"], are_classes = self._numbered(batch["labels"])
        bad = _bad(batch, are_classes)
        is_bad = torch.stack([*bad.values()]).any(0)
        if self._raises and is_bad.any():
            raise self._bad_object(bad, batch, indices, fields.get(_TEXTS))
        boxes = batch["boxes"] = batch["boxes"].replaced(batch["boxes"].values.clamp(0, 1))
        usable = ~is_bad & (areas_of(boxes.values) > 0)
        chosen = usable.clone()
        for name in self._unwanted:
            chosen &= ~batch[name].values if name in batch else True
        kept = chosen if self._most is None else chosen & (_ranks(chosen, boxes) < self._most)
        left_out = boxes.owner[~usable | (chosen & ~kept)].bincount(minlength=len(indices))
        return {**select_objects(batch, kept), **self._truth(fields, indices), LEFT_OUT: left_out}

    def _fitting(self, fields: Mapping[str, Any], indices: Int64s) -> dict[str, Any]:
        """Select the fields of detectors, and check that each has a value for each box."""
        if missing := [name for name in (_IMAGE, "boxes", "labels") if name not in fields]:
            raise DataError(
                "This data has no objects on its images.",
                given=f"the fields {', '.join(fields)}",
                expected="image, boxes and labels",
                hint=f"give data with {' and '.join(missing)}: records of detection, VOC's folder, COCO's annotations",
            )
        batch = {_IMAGE: fields[_IMAGE], "source_id": self._source_ids(fields, indices)}
        batch[_SIZE] = fields[_SIZE] if _SIZE in fields else _sizes(fields[_IMAGE])
        for name in _COLUMNS:
            if name in fields:
                batch[name] = self._column(name, fields[name], indices)
        lengths = batch["boxes"].lengths
        counts = {name: batch[name].lengths for name in _COLUMNS if name in batch}
        if _MASKS in fields:
            batch[_MASKS] = fields[_MASKS]
            counts[_MASKS] = self._count_masks(batch, lengths, indices)
        for name, count in counts.items():
            if not torch.equal(count, lengths):
                row = int((count != lengths).nonzero()[0])
                given, expected = f"{count[row]} of them", f"{lengths[row]}, one for each of the boxes"
                raise self._unfit(int(indices[row]), name, given, expected)
        return batch | _keypoints(batch)

    def _source_ids(self, fields: Mapping[str, Any], indices: Int64s) -> list[str]:
        given = fields.get("source_id", [""] * len(indices))
        return [text or self.example_id(index) for text, index in zip(given, indices.tolist(), strict=True)]

    def _column(self, name: str, values: Any, indices: Int64s) -> Ragged:
        kind = _COLUMNS[name]
        rows = [values.values] if isinstance(values, Ragged) else list(values)
        for row, each in enumerate(rows):
            fits = isinstance(each, Tensor) and each.dtype == kind.dtype and kind.has(each.shape[1:])
            if not fits or each.shape[1:] != rows[0].shape[1:]:
                given = (
                    f"{each.dtype} of shape {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
                )
                raise self._unfit(int(indices[row]), name, given, f"{kind}, for all images alike")
        if name == _KEYPOINTS and self._num_keypoints not in (0, rows[0].shape[1]):
            given, expected = f"{rows[0].shape[1]} of each object", f"{self._num_keypoints}, as data.num_keypoints says"
            raise self._unfit(int(indices[0]), name, given, expected)
        return as_ragged(values)

    def _count_masks(self, batch: Mapping[str, Any], lengths: Tensor, indices: Int64s) -> Tensor:
        """Count the masks of each image; one that has none of its objects' masks counts as one that has all."""
        sizes = batch[_SIZE].tolist()
        for row, masks in enumerate(batch[_MASKS]):
            if masks.dim() != 3 if isinstance(masks, Tensor) else not hasattr(masks, "decode"):
                given = f"shape {tuple(masks.shape)}" if isinstance(masks, Tensor) else type(masks).__name__
                expected = "lazy masks, or a tensor of shape (objects, height, width)"
                raise self._unfit(int(indices[row]), _MASKS, given, expected)
            found = list(masks.shape[1:]) if isinstance(masks, Tensor) else [masks.height, masks.width]
            if len(masks) and found != sizes[row]:
                given = f"{found[1]} x {found[0]} pixels"
                expected = f"{sizes[row][1]} x {sizes[row][0]}, as the image has"
                raise self._unfit(int(indices[row]), _MASKS, given, expected)
        counts = torch.tensor([len(masks) for masks in batch[_MASKS]])
        return torch.where(counts == 0, lengths, counts)

    def _numbered(self, labels: Ragged) -> tuple[Ragged, Tensor]:
        """Number labels from 1 to `num_classes`; also return which of them are classes."""
        numbered, are_classes = self._numbers_of(labels.values)
        return labels.replaced(numbered), are_classes

    def _numbers_of(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        given = labels - self._offset
        places = torch.searchsorted(self._numbers, given).clamp(max=len(self._numbers) - 1)
        are_classes = self._numbers[places] == given
        return torch.where(are_classes, places + 1, given), are_classes

    def _truth(self, fields: Mapping[str, Any], indices: Int64s) -> dict[str, Any]:
        """Return the fields of ground truth, with labels numbered as those to train on, but for bad objects."""
        truth = {
            name: values if name.endswith(_MASKS) else as_ragged(values)
            for name, values in fields.items()
            if name.startswith(_TRUTH)
        }
        if not truth:
            return truth
        for name in (f"{_TRUTH}boxes", f"{_TRUTH}labels"):
            if name not in truth:
                raise self._unfit(int(indices[0]), name, f"no such field, but {', '.join(truth)}", "both, or none")
        boxes, labels = truth[f"{_TRUTH}boxes"], truth[f"{_TRUTH}labels"]
        sides = boxes.values[:, 2:]
        truth.setdefault(f"{_TRUTH}area", boxes.replaced(sides.prod(1)))
        for flag in _FLAGS:
            truth.setdefault(_TRUTH + flag, boxes.replaced(torch.zeros(len(sides), dtype=torch.bool)))
        none = Ragged(torch.zeros(0, dtype=torch.int64), torch.zeros(len(indices), dtype=torch.int64))
        verified, are_verified = self._numbered(truth.pop(_VERIFIED, none))
        truth[f"{_TRUTH}labels"], are_classes = self._numbered(labels)
        if self._raises and not are_classes.all():
            raise self._bad_object({"labels": ~are_classes}, {"labels": truth[f"{_TRUTH}labels"]}, indices)
        usable = are_classes & (sides >= 0).all(1) & torch.isfinite(boxes.values).all(1)
        truth = truth if usable.all() else {name: _kept(values, usable, boxes) for name, values in truth.items()}
        return truth | {_VERIFIED: verified.kept(are_verified)}

    def _bad_object(
        self, bad: Mapping[str, Tensor], batch: Mapping[str, Any], indices: Int64s, texts: Any = None
    ) -> DataError:
        """Make the error for the first bad object, by field and mask; texts are the names of the objects' classes."""
        name = next(name for name, mask in bad.items() if mask.any())
        column, place = batch[name], int(bad[name].nonzero()[0])
        row = int(column.owner[place])
        number = place - int(column.lengths[:row].sum())
        value = column.values[place].tolist()
        hint = 'repair the data; or leave such objects out: --set data.bad_objects="drop"'
        text = texts[row][number] if texts is not None and texts[row] else ""
        if name == "labels":
            value += self._offset
            if self._label_map_path is not None and value == UNKNOWN_LABEL:
                return DataError(
                    f"{self.example_id(int(indices[row]))}: object {number} is of a class that the label map lacks.",
                    given=f"the class {text!r}, and {self._label_map_path}",
                    expected=f"one of {shorten(list(self.classes.values()))}",
                    hint="add the class to the label map, and to model.num_classes; or leave such objects out: "
                    '--set data.bad_objects="drop"',
                )
            hint = f"{hint}; or say what labels there are: model.num_classes, data.labels_offset, data.label_map"
        return DataError(
            f"{self.example_id(int(indices[row]))}: object {number} has {name} that cannot be used.",
            given=f"{name}={value}" + (f", of the class {text!r}" if text and name == "labels" else ""),
            expected=_EXPECTED[name].format(
                first=int(self._numbers[0]) + self._offset, last=int(self._numbers[-1]) + self._offset
            ),
            hint=hint,
        )

    def _unfit(self, index: int, name: str, given: str, expected: str) -> DataError:
        return DataError(
            f"{self.example_id(index)}: the field {name!r} does not fit the others.",
            given=given,
            expected=expected,
            hint="repair the data, or what reads it",
        )


def _labels_in_order(named: Mapping[int, str], num_classes: int) -> list[int]:
    """Return the labels of the data that become 1, 2, ...: these very numbers, unless some are above `num_classes`."""
    labels = sorted(label for label in named if label > 0)
    if not labels or labels[-1] <= num_classes:
        return list(range(1, num_classes + 1))
    if len(labels) > num_classes:
        raise DataError(
            "The data has more classes than the detector.",
            given=f"{len(labels)} classes: {shorten([named[label] for label in labels])}",
            expected=f"{num_classes} at most",
            hint=f"--set model.num_classes={len(labels)}; or give a label map with the classes wanted",
        )
    return labels


def _bad(batch: Mapping[str, Any], are_classes: Tensor) -> dict[str, Tensor]:
    """Tell by field which objects cannot be used because of it, in masks of shape (total,)."""
    bad = {"boxes": torch.from_numpy(~are_edges(batch["boxes"].values.numpy()).all(1)), "labels": ~are_classes}
    if "weights" in batch:
        weights = batch["weights"].values
        bad["weights"] = ~((weights >= 0) & (weights < torch.inf))
    return bad


def _ranks(chosen: Tensor, boxes: Ragged) -> Tensor:
    """Count for each object how many chosen ones are before it on its image."""
    before = chosen.cumsum(0) - chosen.long()
    starts = boxes.lengths.cumsum(0) - boxes.lengths
    return before - torch.cat([before, before.new_zeros(1)])[starts][boxes.owner]


def _sizes(images: Tensor | Sequence[EncodedImage | Tensor]) -> Tensor:
    """Read the height and width of each image, of a file from its header: int64 (batch, 2)."""
    return torch.tensor(
        [image.size[::-1] if isinstance(image, EncodedImage) else image.shape[-2:] for image in images]
    ).view(-1, 2)


def _keypoints(batch: Mapping[str, Any]) -> dict[str, Ragged]:
    """Return keypoints that are NaN where they are not labelled on their image, and visibilities that are 0 there."""
    if _KEYPOINTS not in batch:
        return {}
    points = batch[_KEYPOINTS]
    are_inside = ((points.values >= 0) & (points.values <= 1)).all(-1)  # NaN is not
    visibility = (
        batch[_VISIBILITY].values if _VISIBILITY in batch else torch.full_like(are_inside, _VISIBLE, dtype=torch.int64)
    )
    is_labelled = are_inside & (visibility > 0)
    return {
        _KEYPOINTS: points.replaced(points.values.masked_fill(~is_labelled[..., None], torch.nan)),
        _VISIBILITY: points.replaced(visibility * is_labelled),
    }


def _kept(values: Any, mask: Tensor, boxes: Ragged) -> Any:
    """Keep the objects of a mask in a field of ground truth; of masks each image has its own."""
    if isinstance(values, Ragged):
        return values.kept(mask)
    places = [own.nonzero()[:, 0].tolist() for own in boxes.replaced(mask)]
    return [masks.selected(own) for masks, own in zip(values, places, strict=True)]
