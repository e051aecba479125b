"""The images of any reader with their classes, as a classifier is trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.checks import check_whole
from lockstep.errors import DataError
from lockstep.readers.reader import Int64s, Reader, decoder_of, draws_globally

_LABEL = "label"


class Labelled:
    """A reader's images and labels, which are checked: each is the number of one of the classes.

    A batch is {"image": as the reader gives it, "label": int64 (batch,)}, and "boxes" where they are asked for.

    Args:
        reader: with the fields "image" and "label".
        num_classes: labels are 0 to num_classes - 1, once the offset is off.
        offset: what is taken off each label; below 0 it is added.
        boxes: have "boxes", too; without any for each image of a reader that has no such field.

    Raises:
        InputError: a number is out of range.
    """

    def __init__(self, reader: Reader, num_classes: int, *, offset: int = 0, boxes: bool = False) -> None:
        check_whole("num_classes", num_classes, least=1)
        self._reader = reader
        self._num_classes, self._offset, self._boxes = num_classes, offset, boxes
        self.classes: Sequence[str] = getattr(reader, "classes", ())
        """The names of the classes as the reader numbers them; none where it knows none."""
        self.offset = offset
        self.cost = reader.cost
        self.decoder = decoder_of(reader)
        self.draws_globally = draws_globally(reader)

    def __len__(self) -> int:
        return len(self._reader)

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """The fields of these examples.

        Raises:
            DataError: the reader gives no images or no labels, or a label is that of no class; the example is named.
        """
        fields = self._reader.read_batch(indices)
        if "image" not in fields or not _is_labels(fields.get(_LABEL), len(indices)):
            raise DataError(
                "This data has not one class for each image.",
                given=f"the fields {', '.join(fields)}, of {self.example_id(int(indices[0]))}",
                expected=f'"image", and "label" as int64 of shape ({len(indices)},)',
                mend="give data that has classes; convert folders of images with `lockstep convert images`",
            )
        labels = fields[_LABEL] - self._offset
        wrong = ((labels < 0) | (labels >= self._num_classes)).nonzero().flatten().tolist()
        if wrong:
            raise self._no_class(int(indices[wrong[0]]), int(fields[_LABEL][wrong[0]]))
        boxes = {"boxes": fields.get("boxes") or [torch.zeros(0, 4)] * len(indices)} if self._boxes else {}
        return {"image": fields["image"], _LABEL: labels, **boxes}

    def example_id(self, index: int) -> str:
        """Its name in the reader."""
        return self._reader.example_id(index)

    def _no_class(self, index: int, label: int) -> DataError:
        name, first, last = self.example_id(index), self._offset, self._offset + self._num_classes - 1
        expected = f"{first} to {last}, for a model with {self._num_classes} classes"
        if label == -1 and first != -1:
            return DataError(
                f"{name} has no label.",
                given="a record without a class",
                expected=f"a label from {expected}",
                mend="convert the images again with their classes; or leave such examples out: "
                '--set feed.bad_examples="skip"',
            )
        return DataError(
            f"The label of {name} is none of the model's classes.",
            given=f"label {label}",
            expected=expected,
            mend=f"set model.num_classes to {label - first + 1} or more"
            if label > last
            else f"set data.labels_offset to {label}, if the labels begin there",
        )


def _is_labels(labels: object, count: int) -> bool:
    return isinstance(labels, Tensor) and labels.shape == (count,) and labels.dtype == torch.int64
