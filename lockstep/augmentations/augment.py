"""What an augmentation is: it changes a whole batch at once, with every random number from the stream's own draws.

Most are applied where images are read. Some need other examples, their partners; some leave the work for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeGuard

import numpy as np

from lockstep.checks import Checked, PositiveFloat, Range, ordered
from lockstep.errors import InputError
from lockstep.images.moves import Bools, Float64s, Int64s
from lockstep.images.objects import LOCATION_FIELDS, object_fields
from lockstep.randomness import Draws

if TYPE_CHECKING:
    from torch import Tensor


Share = Annotated[float, Range(gt=0, le=1)]
Shares = Annotated[tuple[Share, Share], ordered]
"""The least and the most of a share."""
Bounds = Annotated[tuple[PositiveFloat, PositiveFloat], ordered]
"""The least and the most of a ratio."""


class Augment(Protocol):
    """Whatever a `Loader` accepts as an augmentation; a frozen dataclass with this method is one.

    It may run in the trainer's process or in a loader process, on any part of a batch. So an example's result may
    depend on the example and on its own row of `draws` alone: on no other random number, no other example, no state.
    Equal column names give equal numbers: name a column after the augmentation and the field. Only where a list holds
    two augmentations of one class for one field, the later one draws other numbers.
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

        `partners` are the first partners of the examples that need some, in their order, as a batch; then the second
        ones, and so on; nothing at all if no example needs any.
        """
        ...


class Deferred(Checked, ABC):
    """Base of augmentations whose numbers a loader draws, and which are applied to whole batches on their device.

        jitter = ls.augmentations.JitterDraws(0.4, 0.4, 0.4)
        loader = Loader(reader, augment=[..., jitter])
        images = jitter.apply(batch)

    Called, it leaves the images as they are, and adds the numbers to the batch.
    """

    field: str
    ending: ClassVar[str]
    """What the name of the field of the numbers ends with."""

    @property
    def into(self) -> str:
        """The field that the numbers are in: "image.colour" for "image" and the ending "colour"."""
        return f"{self.field}.{self.ending}"

    @abstractmethod
    def numbers(self, batch: Mapping[str, Any], draws: Draws) -> Tensor:
        """Draw the numbers of a batch, a row for each image."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its numbers; the images stay as they are."""
        return {**batch, self.into: self.numbers(batch, draws)}

    @abstractmethod
    def apply(self, batch: Mapping[str, Any]) -> Tensor | list[Tensor]:
        """Compute the images of a batch by its numbers, on its device.

        Where the batch has no numbers, as in an evaluation, nothing is changed but the type.
        """


class FinishedOnDevice(Augment, Protocol):
    """An augmentation that leaves a part of its work for the device of the batch, before anything else sees this.

    A `Loader` calls `on_device` beside the computation of the batch before.
    """

    def on_device(self, batch: dict[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
        """Return the finished batch of what the augmentations have made, with its tensors on the device.

        Nothing may wait for these: `here` is the same, as it was before it was copied.
        """
        ...


def finished(augmentations: Sequence[Augment], batch: dict[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Do what augmentations have left for the device of a batch; see `FinishedOnDevice`."""
    for augment in augmentations:
        if is_finished_on_device(augment):
            batch = augment.on_device(batch, here)
    return batch


def is_finished_on_device(augment: Augment) -> TypeGuard[FinishedOnDevice]:
    """Whether an augmentation leaves a part of its work for the device."""
    return hasattr(augment, "on_device")


def num_partners(augment: Augment) -> int:
    """Return how many partners an augmentation gives each example; 0 for most."""
    return int(getattr(augment, "num_partners", 0))


def turns(augmentations: Sequence[Augment]) -> list[int]:
    """Count for each augmentation how many of its kind are before it in the list: its turn for `Draws.again`.

    Of a kind are values of one class for one field, whose columns have the same names; of anything else, such as a
    function, it is that itself. Two flips with the same numbers would undo each other.
    """
    kinds = [_kind(augment) for augment in augmentations]
    return [kinds[:place].count(kind) for place, kind in enumerate(kinds)]


def _kind(augment: Augment) -> tuple[object, ...]:
    return (type(augment), getattr(augment, "field", None)) if is_dataclass(augment) else (id(augment),)


def drawn_between(draws: Draws, column: str, least: float, most: float) -> Float64s:
    """Draw a number from the least to below the most for each example: shape (batch,)."""
    return least + draws.uniform(column) * (most - least)


def drawn_shares(draws: Draws, column: str, *axes: str) -> Float64s:
    """Draw a number in [0, 1) for each example and each of the axes, in columns of their own: shape (batch, axes)."""
    return np.stack([draws.uniform(f"{column} {axis}") for axis in axes], axis=1)


def drawn_corners(draws: Draws, column: str, room: Int64s) -> Int64s:
    """Draw the top and the left of a part of each image: whole numbers from 0 to the room that there is, (batch, 2)."""
    corners: Int64s = np.floor(drawn_shares(draws, column, "top", "left") * (room + 1)).astype(np.int64)
    return corners


def check_no_locations(batch: dict[str, Any], moved_by: object) -> None:
    """Refuse a batch with locations of objects: an augmentation that bends the images would leave them where they are.

    Fields that only say that an object is there may stay, and so may fields of one number for each image.
    """
    wrong = [name for name in LOCATION_FIELDS if name in object_fields(batch)]
    if wrong:
        name, kept = type(moved_by).__name__, [f'"{name}"' for name in batch if name not in wrong]
        raise InputError(
            f"{name} would leave {', '.join(wrong)} where they are, and move the images.",
            given=f"a batch of {', '.join(batch)}",
            expected=f"no places of objects on the images, none of {', '.join(LOCATION_FIELDS)}",
            hint=f"read the fields wanted alone: lockstep.readers.combine.OnlyFields(reader, [{', '.join(kept)}])",
        )
