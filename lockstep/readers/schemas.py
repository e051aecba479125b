"""Schemas of `ImageRecords` for the records that TensorFlow's models write: ImageNet, detection, MNIST."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checks import Checked, Hint, OneOf, Range
from lockstep.images.masks import DenseMasks, PngMasks, dense_masks
from lockstep.images.objects import areas_of, select_objects
from lockstep.ragged import Ragged
from lockstep.readers.image_records import EDGES, ParsedExample, boxes_of, stored_boxes
from lockstep.readers.label_map import UNKNOWN_LABEL, LabelMap
from lockstep.records.example import Float32s, Values

MASKS = ("none", "numerical", "png", "any")

# Features of images with one class.
_CLASS_LABEL, _CLASS_TEXT = "image/class/label", "image/class/text"
_NO_LABEL = -1
_LARGEST_OFFSET = 2**31
_INT64 = range(-(2**63), 2**63)
_MNIST_PIXELS = 28

# Features of images with objects.
_OBJECT = "image/object/"
_BOXES = f"{_OBJECT}bbox/"
_IMAGE, _SOURCE_ID, _HEIGHT, _WIDTH = "image/encoded", "image/source_id", "image/height", "image/width"
_LABEL, _TEXT, _AREA = f"{_OBJECT}class/label", f"{_OBJECT}class/text", f"{_OBJECT}area"
_SCORES = f"{_OBJECT}class/multiclass_scores"
_WEIGHT, _MASK = f"{_OBJECT}weight", f"{_OBJECT}mask"
_KEYPOINT_Y, _KEYPOINT_X, _VISIBILITY = (f"{_OBJECT}keypoint/{part}" for part in ("y", "x", "visibility"))
_ADDITIONAL_CHANNELS = "image/additional_channels/encoded"
_FLAGS = ("is_crowd", "difficult", "group_of")
_MOST_OF_AN_OBJECT = 1 << 16  # keypoints, or channels
_VISIBLE = 2  # as COCO counts: 0 is not labelled, 1 is labelled and hidden


_Feature = Annotated[str, Hint('give the name of a feature: "image/encoded"')]
_NumOfObject = Annotated[int, Range(ge=0, lt=_MOST_OF_AN_OBJECT)]


@dataclass(frozen=True)
class ImageNetSchema(Checked):
    """Images with one class each, as inception's converters of ImageNet and folders write them, and slim's of flowers.

    A batch is {"image": a list of `EncodedImage`, "label": int64 (batch,)}. The label of a record without one is -1. A
    record without an image is an error, while the reference systems take an image of no bytes.
    """

    boxes: bool = False
    """Also read "boxes": for each image float32 (boxes, 4) of top, left, bottom and right as shares of its height and
    width; (0, 4) where it has none. `boxes_of` says which are refused; those without an area are left out."""
    text: bool = False
    """Also read "text": for each image the name of its class, "" where it has none."""
    label_offset: Annotated[int, Range(ge=-_LARGEST_OFFSET, lt=_LARGEST_OFFSET), Hint("give 0 or 1")] = 0
    """Subtracted from each label: with 1, ImageNet's labels 1 to 1000, whose 0 is the background, become 0 to 999."""
    image_feature: _Feature = "image/encoded"
    label_feature: _Feature = "image/class/label"

    @property
    def features(self) -> frozenset[str]:
        """The names of the features that are read."""
        boxes = {_BOXES + edge for edge in EDGES} if self.boxes else set()
        return frozenset({self.image_feature, self.label_feature, *boxes, *([_CLASS_TEXT] if self.text else [])})

    def fields(self, examples: Sequence[ParsedExample]) -> dict[str, Any]:
        """Return the fields of a batch of records."""
        fields: dict[str, Any] = {
            "image": [example.image(self.image_feature) for example in examples],
            "label": torch.tensor(self._labels(examples), dtype=torch.int64),
        }
        if self.boxes:
            boxes = boxes_of(examples, _BOXES)
            fields["boxes"] = boxes.kept(areas_of(boxes.values) > 0)
        if self.text:
            fields["text"] = [example.text(_CLASS_TEXT) for example in examples]
        return fields

    def _labels(self, examples: Sequence[ParsedExample]) -> list[int]:
        default = _NO_LABEL + self.label_offset
        labels = [example.integer(self.label_feature, default) - self.label_offset for example in examples]
        for example, label in zip(examples, labels, strict=True):
            if label not in _INT64:
                raise example.unusable(
                    self.label_feature, "a label that is an int64 once the offset is off", given=f"{label} then"
                )
        return labels


@dataclass(frozen=True)
class DetectionSchema(Checked):
    """Images with objects, as the converters of TensorFlow's object detection API write them.

    A batch has an entry for each image, of n objects: tensors with n first are `Ragged`, the others are lists:

    - "image": `EncodedImage`; "source_id": text, "" where the record has none
    - "boxes": float32 (n, 4) of top, left, bottom and right as shares of height and width, see `boxes_of`
    - "labels": int64 (n,), from the texts by the label map, -1 where it has no such name; from the numbers in the
      record without a label map, and for a record without texts
    - "class_text": n texts, "" where the record has none
    - "weights": float32 (n,), 1 where the record has none
    - "area": float32 (n,) in pixels, that of the box where the record has none
    - "is_crowd", "difficult", "group_of": bool (n,), False where the record does not say

    - with `truth`, the fields of `truth_of_records`; and "truth_verified_labels": int64, the labels in
      `image/class/label` or `image/class/text`, classes of which people looked whether the image shows them

    A feature of objects that a record has must have a value for each of its boxes. The image is required, and so is a
    label or a text for each box. A height and a width must be those of the image's header. An object whose box has no
    area on the image is left out, as in the readers of COCO and VOC.
    """

    label_map: Annotated[LabelMap | None, Hint("read it: read_label_map(path)")] = None
    """Names of classes, or their display names, in `image/object/class/text` and the numbers to give them."""
    masks: Annotated[str, OneOf(MASKS)] = "none"
    """Also read "masks": for each image n masks with `decode`, none where the record has none. They are stored as
    "numerical" (a float for each pixel, above 0 where the object is) or as "png" (an image for each); "any" takes both,
    each record as it is."""
    num_keypoints: _NumOfObject = 0
    """Above 0, also read "keypoints": float32 (n, num_keypoints, 2) of y and x as shares of height and width, NaN where
    not labelled; and "keypoint_visibility": int64 (n, num_keypoints) of 0 (not labelled), 1 (hidden) or 2 (visible, or
    the record does not say)."""
    num_additional_channels: _NumOfObject = 0
    """Above 0, also read "additional_channels": for each image a list of so many `EncodedImage`, grey ones."""
    num_multiclass_scores: _NumOfObject = 0
    """Above 0, also read "multiclass_scores": float32 (n, num_multiclass_scores), a score for each class."""
    check_boxes: bool = True
    """Refuse the boxes that `are_edges` refuses, clip the others, and leave out those without area. False: give all as
    they are stored, to a `DetectionReader`, which does the same by its policy, and counts."""
    truth: bool = False
    """Also read what objects are scored against: in pixels, and with those that are left out for want of an area."""

    @classmethod
    def of_all(cls, features: Mapping[str, Values]) -> DetectionSchema:
        """Make the schema that reads all that a record has, given its features."""
        names = _MASK, _KEYPOINT_Y, f"{_BOXES}ymin", _ADDITIONAL_CHANNELS
        masks, points, tops, channels = (features.get(name, []) for name in names)
        return cls(
            masks="none" if not len(masks) else "png" if isinstance(masks, list) else "numerical",
            num_keypoints=len(points) // max(1, len(tops)),
            num_additional_channels=len(channels),
        )

    @property
    def features(self) -> frozenset[str]:
        """The names of the features that are read."""
        names = {_IMAGE, _SOURCE_ID, _HEIGHT, _WIDTH, _LABEL, _TEXT, _WEIGHT, _AREA}
        names |= {_BOXES + edge for edge in EDGES} | {_OBJECT + flag for flag in _FLAGS}
        names |= {_KEYPOINT_Y, _KEYPOINT_X, _VISIBILITY} if self.num_keypoints else set()
        names |= {_MASK} if self.masks != "none" else set()
        names |= {_SCORES} if self.num_multiclass_scores else set()
        names |= {_CLASS_LABEL, _CLASS_TEXT} if self.truth else set()
        return frozenset(names | ({_ADDITIONAL_CHANNELS} if self.num_additional_channels else set()))

    def fields(self, examples: Sequence[ParsedExample]) -> dict[str, Any]:
        """Return the fields of a batch of records."""
        stored = stored_boxes(examples, _BOXES, check=self.check_boxes)
        boxes = stored.replaced(torch.from_numpy(stored.values.numpy().clip(0, 1)))
        objects = list(zip(examples, boxes, strict=True))
        sizes = [_size(example) for example in examples]
        columns = {
            "labels": [self._labels(example, len(own)) for example, own in objects],
            "weights": [_weights(example, len(own)) for example, own in objects],
            "area": [_areas(example, own, *size) for (example, own), size in zip(objects, sizes, strict=True)],
            **{flag: [_flags(example, flag, len(own)) for example, own in objects] for flag in _FLAGS},
        }
        if self.num_keypoints:
            points = [self._keypoints(example, len(own)) for example, own in objects]
            columns["keypoints"] = [places for places, _ in points]
            columns["keypoint_visibility"] = [visibility for _, visibility in points]
        if count := self.num_multiclass_scores:
            columns["multiclass_scores"] = [_scores(example, len(own), count) for example, own in objects]
        joined = {name: Ragged(torch.cat(rows or [torch.empty(0)]), boxes.lengths) for name, rows in columns.items()}
        fields: dict[str, Any] = {
            "image": [example.image(_IMAGE) for example in examples],
            "source_id": [example.text(_SOURCE_ID) for example in examples],
            "boxes": boxes,
            "labels": joined.pop("labels"),
            "class_text": [_texts(example, len(own)) for example, own in objects],
            **joined,
        }
        if self.masks != "none":
            fields["masks"] = [
                self._masks(example, len(own), *size) for (example, own), size in zip(objects, sizes, strict=True)
            ]
        if (channels := self.num_additional_channels) > 0:
            fields["additional_channels"] = [example.images(_ADDITIONAL_CHANNELS, channels) for example in examples]
        truth = truth_of_records(fields, stored, torch.tensor(sizes).view(-1, 2)) if self.truth else {}
        if self.truth and examples:
            truth["truth_verified_labels"] = Ragged.of([self._labels_of_image(example) for example in examples])
        if not self.check_boxes:
            return {**fields, **truth, "boxes": stored}
        return {**select_objects(fields, areas_of(boxes.values) > 0), **truth}

    def _labels(self, example: ParsedExample, count: int) -> Tensor:
        texts = _texts(example, count)
        if self.label_map and any(texts):
            return self._labels_of_texts(texts)
        labels = example.int64s(_LABEL, count)
        if len(labels) < count:
            raise example.unusable(_LABEL, f"{count} values of int64, one for each box; or texts, and a label map")
        return torch.from_numpy(labels)

    def _labels_of_image(self, example: ParsedExample) -> Tensor:
        texts = example.texts(_CLASS_TEXT)
        if self.label_map and any(texts):
            return self._labels_of_texts(texts)
        return torch.from_numpy(example.int64s(_CLASS_LABEL))

    def _labels_of_texts(self, texts: Sequence[str]) -> Tensor:
        ids = self.label_map.ids if self.label_map else {}
        return torch.tensor([ids.get(text, UNKNOWN_LABEL) for text in texts], dtype=torch.int64)

    def _keypoints(self, example: ParsedExample, count: int) -> tuple[Tensor, Tensor]:
        """Return the keypoints of each object, and how visible they are."""
        shape = count, self.num_keypoints
        y, x = (example.float32s(name, math.prod(shape)) for name in (_KEYPOINT_Y, _KEYPOINT_X))
        if len(x) != len(y):
            raise example.unusable(_KEYPOINT_X, f"{len(y)} values of float32, as many as {_KEYPOINT_Y!r} has")
        if not len(y):
            return torch.full((*shape, 2), math.nan), torch.zeros(shape, dtype=torch.int64)
        points = np.stack([y, x], axis=1)
        visibility = example.int64s(_VISIBILITY, len(y))
        if not len(visibility):
            visibility = np.full(len(y), _VISIBLE)
        elif not 0 <= visibility.min() <= visibility.max() <= _VISIBLE:
            wrong = visibility[(visibility < 0) | (visibility > _VISIBLE)][0]
            raise example.unusable(
                _VISIBILITY, "0 (not labelled), 1 (hidden) or 2 (visible)", given=f"the value {wrong}"
            )
        labelled = (visibility > 0) & np.isfinite(points).all(1)
        points[~labelled] = math.nan
        return torch.from_numpy(points).view(*shape, 2), torch.from_numpy(visibility * labelled).view(shape)

    def _masks(self, example: ParsedExample, count: int, height: int, width: int) -> DenseMasks | PngMasks:
        is_png = isinstance(example.features.get(_MASK), list) if self.masks == "any" else self.masks == "png"
        if not is_png:
            return dense_masks(example.float32s(_MASK, count * height * width), height, width)
        data = example.byte_strings(_MASK)
        if len(data) not in (0, count):
            raise example.unusable(_MASK, f"{count} encoded masks, one for each box, or none")
        return PngMasks(tuple(data), height, width, example.source, example.decoding)


def _texts(example: ParsedExample, count: int) -> list[str]:
    texts = example.texts(_TEXT)
    if len(texts) not in (0, count):
        raise example.unusable(_TEXT, f"{count} texts, one for each box, or none")
    return texts or [""] * count


def _weights(example: ParsedExample, count: int) -> Tensor:
    weights = _not_negative(example, _WEIGHT, count)
    return torch.from_numpy(weights) if len(weights) else torch.ones(count)


def _flags(example: ParsedExample, name: str, count: int) -> Tensor:
    flags = example.int64s(_OBJECT + name, count)
    return torch.from_numpy(flags != 0) if len(flags) else torch.zeros(count, dtype=torch.bool)


def _areas(example: ParsedExample, boxes: Tensor, height: int, width: int) -> Tensor:
    areas = _not_negative(example, _AREA, len(boxes))
    if len(areas) or not len(boxes):
        return torch.from_numpy(areas)
    # As the evaluation of the object detection API takes it where there is none.
    top, left, bottom, right = boxes.unbind(1)
    return (bottom - top) * (right - left) * (height * width)


def _scores(example: ParsedExample, count: int, num_classes: int) -> Tensor:
    scores = _not_negative(example, _SCORES, count * num_classes)
    if len(scores) < count * num_classes:
        raise example.unusable(_SCORES, f"{count * num_classes} values of float32, {num_classes} for each box")
    return torch.from_numpy(scores).view(count, num_classes)


def _not_negative(example: ParsedExample, name: str, count: int) -> Float32s:
    """Return the values of a feature, one for each box or none, all finite and 0 or more."""
    values = example.float32s(name, count)
    if len(values) and not 0 <= values.min() <= values.max() < math.inf:  # with a NaN among them, both are NaN
        wrong = values[~((values >= 0) & (values < math.inf))][0]
        raise example.unusable(name, "finite numbers of 0 or more", given=f"the value {wrong:g}")
    return values


def _size(example: ParsedExample) -> tuple[int, int]:
    """Height and width of the image by its header; an error if the record says otherwise."""
    width, height = example.image(_IMAGE).size
    for name, side in ((_HEIGHT, height), (_WIDTH, width)):
        if (told := example.integer(name, side)) != side:
            raise example.unusable(name, f"{side} pixels, as the image's header says", given=f"{told} pixels")
    return height, width


def truth_of_records(fields: Mapping[str, Any], stored: Ragged, sizes: Tensor) -> dict[str, Any]:
    """Make the fields of ground truth from those of the objects of a batch, by images of sizes (batch, 2), in pixels.

    - "truth_boxes": float64 (n, 4) of x, y, width and height in pixels, from the shares as they are stored
    - "truth_labels", "truth_is_crowd", "truth_difficult", "truth_group_of": as the fields to train on
    - "truth_area": float64 (n,); "truth_masks", if there are masks
    - "truth_keypoints", if there are keypoints: float64 (n, keypoints, 3) of x, y and visibility, all 0 where not
      labelled

    `stored` are the boxes, float32 (n, 4) of top, left, bottom and right as shares.
    """
    sides = sizes[stored.owner].double()
    corners = stored.values.double() * sides.repeat(1, 2)
    top_left, bottom_right = corners[:, :2], corners[:, 2:]
    boxes = torch.cat([top_left.flip(1), (bottom_right - top_left).flip(1)], dim=1)
    truth = {
        "truth_boxes": stored.replaced(boxes),
        **{f"truth_{name}": fields[name] for name in ("labels", *_FLAGS)},
        "truth_area": stored.replaced(fields["area"].values.double()),
    }
    if "masks" in fields:
        truth["truth_masks"] = fields["masks"]
    if "keypoints" in fields:
        points = (fields["keypoints"].values.double() * sides[:, None]).flip(-1).nan_to_num(0)
        visibility = fields["keypoint_visibility"].values.double()
        truth["truth_keypoints"] = stored.replaced(torch.cat([points, visibility[..., None]], dim=-1))
    return truth


@dataclass(frozen=True)
class MnistSchema:
    """Slim's records of MNIST, whose images are grey PNGs of 28 x 28 pixels.

    The images are decoded at once: a batch is {"image": uint8 (batch, 1, 28, 28), "label": int64 (batch,)}, as of the
    records with raw pixels. Both are required: slim takes a record without a label for a zero.
    """

    @property
    def features(self) -> frozenset[str]:
        """The names of the features that are read."""
        return frozenset({_IMAGE, _CLASS_LABEL})

    def fields(self, examples: Sequence[ParsedExample]) -> dict[str, Any]:
        """Return the fields of a batch of records."""
        labels = torch.tensor([example.integer(_CLASS_LABEL) for example in examples], dtype=torch.int64)
        return {"image": torch.stack([_pixels_of(example) for example in examples]), "label": labels}


def _pixels_of(example: ParsedExample) -> Tensor:
    image = example.image(_IMAGE)
    if image.size != (_MNIST_PIXELS, _MNIST_PIXELS):
        width, height = image.size
        raise example.unusable(
            _IMAGE, f"an image of {_MNIST_PIXELS} x {_MNIST_PIXELS} pixels", given=f"one of {width} x {height}"
        )
    colours = image.decode()
    if not torch.equal(colours, colours[:1].expand_as(colours)):
        raise example.unusable(_IMAGE, "a grey image", given="one in colour")
    return colours[:1]
