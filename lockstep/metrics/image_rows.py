"""What the images of an evaluation have come to, in the order of their ids, however they came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lockstep.errors import InputError
from lockstep.metrics.pairs import Ints
from lockstep.ragged import Ragged


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
        """Add some images.

        Args:
            ids: as `ids_of` makes them.
            columns: the same each time.

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
        order = torch.tensor(sorted(range(len(self._order)), key=lambda row: (len(self._order[row]), self._order[row])))
        joined = [Ragged.cat(parts)[order] for parts in zip(*self._parts, strict=True)]
        return [ImageColumn(column.values.numpy(), column.owner.numpy()) for column in joined]


def ids_of(texts: Sequence[str]) -> Ragged:
    """Convert texts to numbers that travel."""
    encoded = [text.encode(errors="surrogateescape") for text in texts]
    joined = np.frombuffer(bytearray(b"".join(encoded)), np.uint8)
    return Ragged(torch.from_numpy(joined), torch.tensor([len(text) for text in encoded]))


def ragged_of(values: npt.NDArray[Any], image: Ints, num_images: int) -> Ragged:
    """Make a column of values whose images ascend."""
    return Ragged(torch.from_numpy(values), torch.from_numpy(np.bincount(image, minlength=num_images)))
