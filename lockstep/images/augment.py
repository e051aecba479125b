"""Augmentations change a whole batch at once, with every random number from the stream's own draws.

Here are their protocol, the two that only move pixels, and the checks that all of them share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias

import numpy as np
import torch

from lockstep.checks import Checked, Hint, PositiveFloat, PositiveInt, Probability, Range, ordered
from lockstep.errors import InputError
from lockstep.images.decode import EncodedImage
from lockstep.randomness import Draws

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

Bools: TypeAlias = "npt.NDArray[np.bool_]"

LOCATION_FIELDS = ("boxes", "masks", "keypoints", "keypoint_visibility", "area")
"""The fields that say where objects are on an image, or how much of it they take."""


class Augment(Protocol):
    """Whatever a `Loader` accepts as an augmentation; a frozen dataclass with this method is one.

    It may run in the trainer's process or in a loader process, on any part of a batch. So an example's result may
    depend on the example and on its own row of `draws` alone: on no other random number, no other example, no state.
    Equal column names give equal numbers: name a column after the augmentation and the field. Only where a list holds
    two augmentations that are equal, the later one draws other numbers.
    """

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the changed batch: the same number of examples in the same order."""
        ...


class NeedsPartners(Augment, Protocol):
    """An augmentation that puts an example together with others, its partners, as Mosaic and MixUp do.

    The loader draws the partners among the other examples of the same epoch, by arithmetic of the seed and the position
    of the example. They have gone through the augmentations before this one, with draws of their own.
    """

    @property
    def num_partners(self) -> int:
        """How many partners an example has, 1 or more."""
        ...

    def needs_partners(self, draws: Draws) -> Bools:
        """Say which examples need their partners, shape (batch,): those of the others are not read."""
        ...

    def __call__(self, batch: dict[str, Any], draws: Draws, partners: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Return the changed batch: the same number of examples in the same order.

        Args:
            batch: as for every augmentation.
            draws: as for every augmentation.
            partners: the first partners of the examples that need some, in their order, as a batch; then the second
                ones, and so on; nothing at all if no example needs any.
        """
        ...


def num_partners(augment: Augment) -> int:
    """Return how many partners an augmentation gives each example; 0 for most."""
    return int(getattr(augment, "num_partners", 0))


def turns(augmentations: Sequence[Augment]) -> list[int]:
    """Count for each augmentation how many before it in the list are equal to it: its turn for `Draws.again`.

    Two equal flips with the same numbers would undo each other.
    """
    return [
        sum(_are_equal(augment, earlier) for earlier in augmentations[:place])
        for place, augment in enumerate(augmentations)
    ]


def _are_equal(one: Augment, other: Augment) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:  # a dataclass that holds an array or a tensor cannot be compared
        return False


@dataclass(frozen=True)
class HorizontalFlip(Checked):
    """Exchange left and right of some of the images.

    The field holds images of shape (batch, channels, height, width) and any dtype.
    """

    p: Probability = 0.5
    """The probability that an image is flipped."""
    field: str = "image"

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with some of its images flipped; the images given stay as they are."""
        images = image_tensor(batch, self.field, self)
        check_no_locations(batch, self)
        flipped = images.clone()
        # Row by row: to gather and scatter them at once takes several times as long.
        for row in np.flatnonzero(draws.uniform(f"HorizontalFlip {self.field}") < self.p).tolist():
            flipped[row] = images[row].flip(-1)
        return {**batch, self.field: flipped}


@dataclass(frozen=True)
class RandomShift(Checked):
    """Shift each image by up to `pixels` in each direction; what moves in is zero.

    The field holds images of shape (batch, channels, height, width) and any dtype.
    """

    pixels: Annotated[PositiveInt, Hint("give the largest shift in pixels, or leave the augmentation out")]
    field: str = "image"

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images shifted."""
        images = image_tensor(batch, self.field, self)
        check_no_locations(batch, self)
        height, width = images.shape[2:]
        padded = torch.nn.functional.pad(images, [self.pixels] * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (batch, channels, shifts, shifts, height, width)
        top, left = (
            torch.from_numpy(draws.integers(f"RandomShift {self.field} {axis}", 0, 2 * self.pixels + 1))
            for axis in ("top", "left")
        )
        return {**batch, self.field: windows[torch.arange(len(images)), :, top, left]}


def encoded_images(batch: dict[str, Any], field: str, wanted_by: object) -> list[EncodedImage]:
    """Look up the encoded images in a field of a batch."""
    images = batch.get(field)
    if isinstance(images, list) and all(isinstance(image, EncodedImage) for image in images):
        return images
    name = type(wanted_by).__name__
    raise InputError(
        f"{name} finds no encoded images in the field {field!r}.",
        given=describe_field(batch, field),
        expected="a list of encoded images, as ImageFolder reads them",
        hint=f"name their field: {name}(..., field=...); let one augmentation alone decode them",
    )


def image_tensor(batch: dict[str, Any], field: str, wanted_by: object) -> Tensor:
    """Look up the images in a field of a batch: shape (batch, channels, height, width), any dtype."""
    images = batch.get(field)
    if isinstance(images, torch.Tensor) and images.ndim == 4:
        return images
    raise _no_decoded_images(batch, field, wanted_by, "a tensor of shape (batch, channels, height, width)")


def colour_images(batch: dict[str, Any], field: str, wanted_by: object) -> Tensor:
    """Look up the decoded images in a field of a batch: uint8 of shape (batch, 3, height, width)."""
    images = batch.get(field)
    if isinstance(images, torch.Tensor) and images.dtype == torch.uint8 and images.ndim == 4 and images.shape[1] == 3:
        return images
    raise _no_decoded_images(batch, field, wanted_by, "a uint8 tensor of shape (batch, 3, height, width)")


def _no_decoded_images(batch: dict[str, Any], field: str, wanted_by: object, expected: str) -> InputError:
    name = type(wanted_by).__name__
    return InputError(
        f"{name} finds no decoded images in the field {field!r}.",
        given=describe_field(batch, field),
        expected=expected,
        hint=f"crop or resize encoded images first, or name their field: {name}(..., field=...)",
    )


def describe_field(batch: dict[str, Any], field: str) -> str:
    """Say for an error what a field of a batch holds, and which fields there are."""
    value = batch.get(field)
    if isinstance(value, torch.Tensor):
        found = f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    elif isinstance(value, list) and value:
        found = f"a list of {', '.join(sorted({type(item).__name__ for item in value}))}"
    else:
        found = type(value).__name__ if field in batch else "missing"
    return f"{field!r} is {found}; the fields are {', '.join(batch)}"


def check_no_locations(batch: dict[str, Any], moved_by: object, consumed: str | None = None) -> None:
    """Refuse a batch with locations of objects: they would be wrong after an augmentation that moves the images.

    Fields that only say that an object is there may stay, and so may fields of one number for each image.

    Args:
        batch: given to the augmentation.
        moved_by: the augmentation.
        consumed: a field that the augmentation takes out of the batch.
    """
    wrong = [name for name in LOCATION_FIELDS if name in batch and name != consumed and not _one_each(batch[name])]
    if wrong:
        name, kept = type(moved_by).__name__, [f'"{name}"' for name in batch if name not in wrong]
        raise InputError(
            f"{name} would leave {', '.join(wrong)} where they are, and move the images.",
            given=f"a batch of {', '.join(batch)}",
            expected=f"no places of objects on the images, none of {', '.join(LOCATION_FIELDS)}",
            hint=f"read the fields wanted alone: lockstep.readers.combine.OnlyFields(reader, [{', '.join(kept)}])",
        )


def _one_each(values: object) -> bool:
    return isinstance(values, torch.Tensor) and values.ndim == 1


Share = Annotated[float, Range(gt=0, le=1)]
Shares = Annotated[tuple[Share, Share], ordered]
"""The least and the most of a share."""
Bounds = Annotated[tuple[PositiveFloat, PositiveFloat], ordered]
"""The least and the most of a ratio."""
