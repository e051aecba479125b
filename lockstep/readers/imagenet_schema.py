"""Records of images that have one class each, as TensorFlow's reference models write ImageNet, flowers and folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.checks import check_range, check_switch, check_type
from lockstep.readers.schema import EDGES, ParsedExample, boxes_of, places_with_area

_BOXES = "image/object/bbox/"
_TEXT = "image/class/text"
_NO_LABEL = -1
_LARGEST_OFFSET = 2**31
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True)
class ImageNetSchema:
    """A schema of `ImageRecords`: what inception's converters of ImageNet and of folders write, and slim's of flowers.

    A batch is {"image": a list of `EncodedImage`, "label": int64 (batch,)}. The label of a record without one is -1; an
    image it must have, where the reference systems take one of no bytes.

    Raises:
        InputError: an option is of another type, or out of range.
    """

    boxes: bool = False
    """Also read "boxes": for each image float32 (boxes, 4) of top, left, bottom and right as shares of its height and
    width; (0, 4) where it has none. `boxes_of` says which are refused; those without an area are left out."""
    text: bool = False
    """Also read "text": for each image the name of its class, "" where it has none."""
    label_offset: int = 0
    """What is taken off each label: with 1, ImageNet's labels 1 to 1000, whose 0 is the background, become 0 to 999."""
    image_feature: str = "image/encoded"
    label_feature: str = "image/class/label"

    def __post_init__(self) -> None:
        check_switch("boxes", self.boxes)
        check_switch("text", self.text)
        check_type("label_offset", self.label_offset, int, expected="a whole number", hint="give 0 or 1")
        check_range("label_offset", self.label_offset, -_LARGEST_OFFSET, _LARGEST_OFFSET)
        for name in ("image_feature", "label_feature"):
            check_type(name, getattr(self, name), str, expected="the name of a feature", hint=f'give {name}="..."')

    @property
    def features(self) -> frozenset[str]:
        """The names of the features that are read."""
        boxes = {_BOXES + edge for edge in EDGES} if self.boxes else set()
        return frozenset({self.image_feature, self.label_feature, *boxes, *([_TEXT] if self.text else [])})

    def fields(self, examples: Sequence[ParsedExample]) -> dict[str, Any]:
        """The fields of a batch of records.

        Raises:
            DataError: a record has no image, or a feature of another kind or number of values.
        """
        fields: dict[str, Any] = {
            "image": [example.image(self.image_feature) for example in examples],
            "label": torch.tensor([self._label(example) for example in examples], dtype=torch.int64),
        }
        if self.boxes:
            boxes = fields["boxes"] = boxes_of(examples, _BOXES)
            for row, places in places_with_area(boxes).items():
                boxes[row] = boxes[row][places]
        if self.text:
            fields["text"] = [example.text(_TEXT) for example in examples]
        return fields

    def _label(self, example: ParsedExample) -> int:
        label = example.integer(self.label_feature, _NO_LABEL + self.label_offset) - self.label_offset
        if label not in _INT64:
            raise example.unusable(
                self.label_feature, "a label that is an int64 once the offset is off", given=f"{label} then"
            )
        return label
