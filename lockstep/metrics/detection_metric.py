"""Base of the metrics of detections, which collects their columns by image and returns them sorted by image id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lockstep.errors import InputError
from lockstep.listing import did_you_mean
from lockstep.metrics.pairs import Ints
from lockstep.metrics.scored_images import IMAGES, TRUTH, named_categories
from lockstep.ragged import Ragged

_OPENED_WITH = {
    f"{TRUTH}masks": "open the data with masks=True (data.masks=true in a recipe)",
    f"{TRUTH}keypoints": "open the data with keypoints=True (data.num_keypoints in a recipe)",
}


class DetectionMetric:
    """A metric whose `prepare` matches the detections of some images to their objects.

    What is `measured` of a detection, and compared with the object, is its "boxes", "masks" or "keypoints". `truth` are
    the columns of ground truth beside "truth_labels" and that of what is measured. Names of values begin with `prefix`.
    """

    def __init__(
        self, categories: Mapping[int, str] | Sequence[str], measured: str, truth: Sequence[str], prefix: str
    ) -> None:
        self.categories = named_categories(categories)
        self.measured = measured
        self.prefix = prefix
        self.fields = (IMAGES, measured, "scores", "labels", TRUTH + measured, f"{TRUTH}labels", *truth)
        """The columns that `prepare` takes, in its order."""
        self.reset()

    def columns(self, batch: Mapping[str, Any], detections: Mapping[str, Any]) -> tuple[Any, ...]:
        """Pick what `prepare` takes: "source_id" and the "truth_" fields from a batch, the rest from the detections."""
        columns = []
        for name in self.fields:
            is_of_batch = name == IMAGES or name.startswith(TRUTH)
            source = batch if is_of_batch else detections
            if name not in source:
                raise InputError(
                    f"A detection metric finds no {name!r} in the {'batch' if is_of_batch else 'detections'}.",
                    given=", ".join(map(repr, source)) or "no fields",
                    expected=", ".join(map(repr, self.fields)),
                    hint=_OPENED_WITH.get(name)
                    or did_you_mean(name, source)
                    or ("have the reader give it" if is_of_batch else "return a value for each detection"),
                )
            columns.append(source[name])
        return tuple(columns)

    def reset(self) -> None:
        """Forget all images."""
        self._images = ImageRows()

    def update(self, ids: Ragged, *columns: Ragged) -> None:
        """Take in what `prepare` returned; an InputError names an image that is there already."""
        self._images.add(ids, *columns)


class ImageColumn(NamedTuple):
    """The values of one column, those of the first image first."""

    values: npt.NDArray[Any]
    image: Ints
    """The place of each value's image among all images."""


class ImageRows:
    """Collects columns of images, each image once."""

    def __init__(self) -> None:
        self._ids: set[bytes] = set()
        self._order: list[bytes] = []
        self._parts: list[tuple[Ragged, ...]] = []

    def add(self, ids: Ragged, *columns: Ragged) -> None:
        """Add some images, with ids as `ids_of` makes them, and the same columns each time.

        Raises:
            InputError: an image is there already; nothing is added then.
        """
        new = [one.numpy().tobytes() for one in ids]
        twice = next((one for place, one in enumerate(new) if one in self._ids or one in new[:place]), None)
        if twice is not None:
            raise InputError(
                f"The image {twice.decode(errors='surrogateescape')!r} was scored twice.",
                given=f"{len(self._ids)} images before it",
                expected="each image once",
                hint="check that each image of the data has an id of its own, and that the metric is reset",
            )
        self._ids.update(new)
        self._order += new
        self._parts.append(columns)

    def columns(self, number: int) -> Sequence[ImageColumn]:
        """Return the columns, images in the order of their ids: shorter ids first, so that whole numbers ascend."""
        if not self._parts:
            return [ImageColumn(np.empty(0, np.int64), np.empty(0, np.int64))] * number
        order = torch.tensor(self._by_id())
        joined = [Ragged.cat(parts)[order] for parts in zip(*self._parts, strict=True)]
        return [ImageColumn(column.values.numpy(), column.owner.numpy()) for column in joined]

    def ids(self) -> list[str]:
        """Return the ids of the images in the order of the columns."""
        return [self._order[row].decode(errors="surrogateescape") for row in self._by_id()]

    def _by_id(self) -> list[int]:
        return sorted(range(len(self._order)), key=lambda row: (len(self._order[row]), self._order[row]))


def ids_of(texts: Sequence[str]) -> Ragged:
    """Convert texts to numbers that travel."""
    encoded = [text.encode(errors="surrogateescape") for text in texts]
    joined = np.frombuffer(bytearray(b"".join(encoded)), np.uint8)
    return Ragged(torch.from_numpy(joined), torch.tensor([len(text) for text in encoded]))


def ragged_of(values: npt.NDArray[Any], image: Ints, num_images: int) -> Ragged:
    """Make a column of values whose images ascend."""
    return Ragged(torch.from_numpy(values), torch.from_numpy(np.bincount(image, minlength=num_images)))
