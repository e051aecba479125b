"""Images with one class each from any reader, as a classifier is trained on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from lockstep.checks import PositiveInt, Range, check_value
from lockstep.errors import DataError
from lockstep.ragged import Ragged
from lockstep.readers.fingerprint import tells_options
from lockstep.readers.reader import Int64s, Reader, ReaderWrapper

LabelsOffset = Annotated[int, Range(gt=-(2**31), lt=2**31)]
"""What may be subtracted from labels."""

_LABEL, _BOXES = "label", "boxes"
_NO_LABEL = -1  # given by readers of records


@tells_options
class ClassificationReader(ReaderWrapper):
    """A reader's images with labels that are checked to be the number of a class.

    A batch is {"image": as the reader gives it, "label": int64 (batch,)}, and "boxes" if asked for.

    Args:
        reader: with the fields "image" and "label".
        num_classes: labels are 0 to num_classes - 1 after subtracting the offset; before, they are 0 or more.
        offset: subtracted from each label.
        boxes: also give "boxes"; an image has none if the reader has no such field.
    """

    def __init__(self, reader: Reader, num_classes: int, *, offset: int = 0, boxes: bool = False) -> None:
        check_value("num_classes", num_classes, PositiveInt)
        check_value("offset", offset, LabelsOffset)
        super().__init__(reader)
        self._num_classes, self._boxes = num_classes, boxes
        self.classes: Sequence[str] = getattr(reader, "classes", ())
        """The names of the classes as the reader numbers them, if it knows them."""
        self.offset = offset

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the fields of these examples; an error names one whose label is none of the classes."""
        fields = self._reader.read_batch(indices)
        given = self._labels_of(fields, indices)
        labels = given - self.offset
        wrong = (given < 0) | (labels < 0) | (labels >= self._num_classes)
        if wrong.any():
            first = int(wrong.nonzero()[0])
            raise self._no_class(int(indices[first]), int(given[first]))
        found = {"image": fields["image"], _LABEL: labels}
        if self._boxes:
            found[_BOXES] = fields[_BOXES] if _BOXES in fields else Ragged(torch.zeros(0, 4), torch.zeros_like(labels))
        return found

    def _labels_of(self, fields: Mapping[str, Any], indices: Int64s) -> Tensor:
        labels, found = fields.get(_LABEL), ""
        if isinstance(labels, Tensor):
            if "image" in fields and labels.shape == (len(indices),) and labels.dtype == torch.int64:
                return labels
            found = f"label is {labels.dtype} of shape {tuple(labels.shape)}; "
        names = [self.example_id(index) for index in indices[:1].tolist()]
        raise DataError(
            "This data has not one class for each image.",
            given=f"{found}the fields {', '.join(fields)}" + "".join(f", of {name}" for name in names),
            expected=f'"image", and "label" as int64 of shape ({len(indices)},)',
            hint="give data that has classes; convert folders of images with `lockstep convert images`",
        )

    def _no_class(self, index: int, label: int) -> DataError:
        name, offset, num_classes = self.example_id(index), self.offset, self._num_classes
        expected = f"{max(0, offset)} to {offset + num_classes - 1}, for a model with {num_classes} classes"
        if label == _NO_LABEL:
            return DataError(
                f"{name} has no label.",
                given="a record without a class",
                expected=f"a label from {expected}",
                hint="convert the images again with their classes; or leave such examples out: "
                '--set feed.bad_examples="skip"',
            )
        return DataError(
            f"The label of {name} is none of the model's classes.",
            given=f"label {label}" + (f", and data.labels_offset={offset}" if offset else ""),
            expected=expected,
            hint=_hint(label, offset),
        )


def _hint(label: int, offset: int) -> str:
    if label < 0:
        return "convert the images again: their labels have to be 0 or more"
    if label < offset:
        return f"set data.labels_offset to {label}, if the labels begin there"
    enough = f"set model.num_classes to {label - offset + 1} or more"
    return f"{enough}; or data.labels_offset to {offset + 1}, if the labels begin there"
