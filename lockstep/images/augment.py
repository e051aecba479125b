"""Augmentations change a whole batch at once, with every random number from the stream's own draws.

Here are their protocol, the two that only move pixels, and the checks that all of them share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias

import numpy as np
import torch

from lockstep.checks import Checked, Hint, NonNegativeInt, PositiveFloat, PositiveInt, Probability, Range, ordered
from lockstep.errors import InputError
from lockstep.images.decode import EncodedImage
from lockstep.images.moves import AS_IT_IS, MIRRORED, Region, Turn, move
from lockstep.images.objects import LOCATION_FIELDS, Fields, move_objects, object_fields
from lockstep.ragged import Ragged
from lockstep.randomness import Draws

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

Int64s: TypeAlias = "npt.NDArray[np.int64]"
Bools: TypeAlias = "npt.NDArray[np.bool_]"


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
    """Count for each augmentation how many of its kind are before it in the list: its turn for `Draws.again`.

    Of a kind are values of one class for one field, whose columns have the same names; of anything else, such as a
    function, it is that itself. Two flips with the same numbers would undo each other.
    """
    kinds = [_kind(augment) for augment in augmentations]
    return [kinds[:place].count(kind) for place, kind in enumerate(kinds)]


def _kind(augment: Augment) -> tuple[object, ...]:
    return (type(augment), getattr(augment, "field", None)) if is_dataclass(augment) else (id(augment),)


@dataclass(frozen=True)
class HorizontalFlip(Checked):
    """Exchange left and right of some of the images, and of the objects on them.

    The field holds images of shape (batch, channels, height, width) and any dtype, or a list of images.
    """

    p: Probability = 0.5
    """The probability that an image is flipped."""
    field: str = "image"
    keypoint_flip_permutation: tuple[NonNegativeInt, ...] = ()
    """For each keypoint of an object the one that is in its place on the mirrored image: a left eye is a right one
    there. Needed where there are keypoints."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with some of its images flipped; the images given stay as they are."""
        flipped = draws.uniform(f"HorizontalFlip {self.field}") < self.p
        return turned_rows(batch, self.field, MIRRORED, flipped, self, self.keypoint_flip_permutation)


@dataclass(frozen=True)
class RandomShift(Checked):
    """Shift each image, and the objects on it, by up to `pixels` in each direction; what moves in is zero.

    The field holds images of shape (batch, channels, height, width) and any dtype.
    """

    pixels: Annotated[PositiveInt, Hint("give the largest shift in pixels, or leave the augmentation out")]
    field: str = "image"

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images shifted."""
        images = image_tensor(batch, self.field, self)
        height, width = images.shape[2:]
        padded = torch.nn.functional.pad(images, [self.pixels] * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (batch, channels, shifts, shifts, height, width)
        top, left = (
            torch.from_numpy(draws.integers(f"RandomShift {self.field} {axis}", 0, 2 * self.pixels + 1))
            for axis in ("top", "left")
        )
        shifted = windows[torch.arange(len(images)), :, top, left]
        corners = zip((top - self.pixels).tolist(), (left - self.pixels).tolist(), strict=True)
        moves = (move((height, width), Region(*corner, height, width)) for corner in corners)
        return {**move_objects(batch, moves), self.field: shifted}


def turned_rows(
    batch: Fields, field: str, turn: Turn, rows: Bools, wanted_by: object, keypoint_order: Sequence[int] = ()
) -> Fields:
    """Turn some of the images, and the objects on them.

    Args:
        batch: with images of any form in the field.
        field: of the images.
        turn: what is done to them.
        rows: which of them, shape (batch,).
        wanted_by: the augmentation.
        keypoint_order: see `move_objects`.
    """
    images = images_of(batch, field, wanted_by)
    if turn.mirrors and "keypoints" in object_fields(batch):
        _check_keypoint_order(keypoint_order, batch, wanted_by)
    moves = (
        move(sides, turn=turn if is_turned else AS_IT_IS)
        for sides, is_turned in zip(sides_of(images).tolist(), rows, strict=True)
    )
    stays_tensor = isinstance(batch[field], torch.Tensor) and not (
        turn.exchange and len(set(batch[field].shape[2:])) > 1
    )
    turned: Any = batch[field].clone() if stays_tensor else [*images]
    # Row by row: to gather and scatter them at once takes several times as long.
    for row in np.flatnonzero(rows).tolist():
        turned[row] = turned_image(images[row], turn)
    return {**move_objects(batch, moves, keypoint_order=keypoint_order), field: turned}


def _check_keypoint_order(order: Sequence[int], batch: Fields, wanted_by: object) -> None:
    """Refuse to mirror keypoints without knowing which are left and which are right."""
    keypoints = batch["keypoints"]
    count = (keypoints.values if isinstance(keypoints, Ragged) else keypoints[0]).shape[-2]
    if sorted(order) != [*range(count)]:
        name = type(wanted_by).__name__
        raise InputError(
            f"{name} does not know which keypoint is in whose place on a mirrored image.",
            given=f"keypoint_flip_permutation={(*order,)}, for {count} keypoints of an object",
            expected=f"each number from 0 to {count - 1}, once",
            hint="for eyes 0 (left) and 1 (right), and a nose, give keypoint_flip_permutation=(1, 0, 2)",
        )


Image: TypeAlias = "EncodedImage | Tensor"
"""An image file that is not decoded yet, or a raster of shape (channels, height, width)."""


def images_of(batch: Fields, field: str, wanted_by: object, *, colour: bool = False) -> Sequence[Image]:
    """Look up the images of a field: encoded or decoded, of one size or of several.

    Args:
        batch: with the field.
        field: of the images.
        wanted_by: the augmentation, for an error.
        colour: take rasters of uint8 and three channels alone, as encoded images are once they are decoded.
    """
    images: Any = batch.get(field)
    if isinstance(images, torch.Tensor) and images.ndim == 4:
        if not len(images) or _is_raster(images[0], colour=colour):
            return images  # type: ignore[return-value]
    elif isinstance(images, list) and all(
        isinstance(image, EncodedImage) or _is_raster(image, colour=colour) for image in images
    ):
        return images
    name = type(wanted_by).__name__
    rasters = "uint8 rasters of shape (3, height, width)" if colour else "rasters of shape (channels, height, width)"
    raise InputError(
        f"{name} finds no images in the field {field!r}.",
        given=describe_field(batch, field),
        expected=f"encoded images, as ImageFolder reads them, or {rasters}",
        hint=f"name their field: {name}(..., field=...)",
    )


def sides_of(images: Sequence[Image] | Tensor) -> Int64s:
    """Return heights and widths in pixels, shape (batch, 2), by the headers of encoded images alone."""
    if isinstance(images, torch.Tensor):
        return np.tile(images.shape[-2:], (len(images), 1))
    sides = [image.size[::-1] if isinstance(image, EncodedImage) else image.shape[-2:] for image in images]
    return np.array(sides, dtype=np.int64).reshape(-1, 2)


def decoded(image: Image, region: Region | None = None) -> Tensor:
    """Decode an image, or a region of it, if it is not decoded yet."""
    if isinstance(image, EncodedImage):
        return image.decode(region)
    return image if region is None else _part(image, region)


def cropped_image(image: Image, region: Region) -> Image:
    """Cut out a part that lies within the image; of one that is not decoded yet, no more is when it is."""
    return image.cropped(region) if isinstance(image, EncodedImage) else _part(image, region)


def _part(raster: Tensor, region: Region) -> Tensor:
    top, left, height, width = region
    return raster[:, top : top + height, left : left + width]


def turned_image(image: Image, turn: Turn) -> Image:
    """Turn an image; one that is not decoded yet is turned when it is."""
    return image.turned(turn) if isinstance(image, EncodedImage) else turn(image)


def name_of(image: Image) -> str:
    """Name an image in an error."""
    return image.source if isinstance(image, EncodedImage) else "An image"


def _is_raster(image: object, *, colour: bool) -> bool:
    if not isinstance(image, torch.Tensor) or image.ndim != 3:
        return False
    return not colour or (image.dtype == torch.uint8 and len(image) == 3)


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
    elif isinstance(value, Ragged):
        found = f"a Ragged of values of shape {tuple(value.values.shape)}, {value.values.dtype}"
    elif isinstance(value, list) and value:
        found = f"a list of {', '.join(sorted({type(item).__name__ for item in value}))}"
    else:
        found = type(value).__name__ if field in batch else "missing"
    return f"{field!r} is {found}; the fields are {', '.join(batch)}"


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


Share = Annotated[float, Range(gt=0, le=1)]
Shares = Annotated[tuple[Share, Share], ordered]
"""The least and the most of a share."""
Bounds = Annotated[tuple[PositiveFloat, PositiveFloat], ordered]
"""The least and the most of a ratio."""
